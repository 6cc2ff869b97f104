"""The runtime alone: method parts written by hand against autograd of their plain objectives, and its promises to a caller."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from methods_by_hand import FROM_LOGITS, FROM_LOGP, PLAIN, Band, Centred, Clip, Entropy, Geometric, Hand, Product, Trust
from torch import Tensor

from lossdsl.runtime.loss import PolicyLoss
from lossdsl.runtime.metrics import Weights

NAN = math.nan
B, T, V = 4, 6, 5
LENGTHS = (6, 3, 0, 4)
TOKENWISE = ("logp", "prox_logp", "mu_logp", "ref_logp", "entropy", "mu_logprobs", "logits", "tokens")


@pytest.fixture(params=[0, 1])
def batch(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    """Random policies, a little and a lot apart; one answer is empty."""
    g = torch.Generator().manual_seed(request.param)
    base, spread = torch.randn(B, T, V, generator=g, dtype=torch.float64), (0.2, 1.0)[request.param]

    def policy() -> Tensor:
        return (base + spread * torch.randn(B, T, V, generator=g, dtype=torch.float64)).log_softmax(-1)

    tokens = torch.randint(0, V, (B, T), generator=g)
    pi, prox, mu, ref = (policy() for _ in range(4))
    at = {k: x.gather(-1, tokens[..., None])[..., 0] for k, x in
          {"logp": pi, "prox_logp": prox, "mu_logp": mu, "ref_logp": ref}.items()}  # fmt: skip
    return at | {
        "logits": pi, "tokens": tokens, "mu_logprobs": mu, "entropy": -(pi.exp() * pi).sum(-1),
        "mask": torch.arange(T) < torch.tensor(LENGTHS)[:, None], "advantages": torch.randn(B, generator=g, dtype=torch.float64),
    }  # fmt: skip


def call(
    loss_fn: PolicyLoss, batch: dict[str, Any], logits: bool = False, **changes: Any
) -> tuple[Any, dict[str, Tensor]]:
    """(output, gradients of what can have one) of one call; a loss ignores what it does not need."""
    given = batch | changes
    x = given.pop("logits" if logits else "logp").detach().clone().requires_grad_()
    given.pop("logp" if logits else "logits", None)
    tokens = given.pop("tokens", None)
    entropy = given.get("entropy")
    if not logits and entropy is not None:
        given["entropy"] = entropy = entropy.detach().clone().requires_grad_()
    out = loss_fn.from_logits(x, tokens, **given) if logits else loss_fn(x, **given)
    out.loss.backward()
    assert x.grad is not None
    found = {"x": x.grad}
    if not logits and entropy is not None and entropy.grad is not None:
        found["entropy"] = entropy.grad
    return out, found


def by_autograd(loss: type[PolicyLoss], batch: dict[str, Tensor], logits: bool) -> tuple[float, dict[str, Tensor]]:
    b: dict[str, Tensor] = dict(batch)
    leaves = {"x": batch["logits" if logits else "logp"].clone().requires_grad_()}
    if logits:
        b["log_pi"] = leaves["x"].log_softmax(-1)
        b["logp"] = b["log_pi"].gather(-1, batch["tokens"][..., None])[..., 0]
    else:
        b["logp"] = leaves["x"]
        b["entropy"] = leaves["entropy"] = batch["entropy"].clone().requires_grad_()
    value = -PLAIN[loss](b)
    value.backward()
    return float(value.detach()), {k: x.grad for k, x in leaves.items() if x.grad is not None}


def same(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return a.shape == b.shape and bool(torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance))


def entries() -> list[tuple[type[PolicyLoss], bool]]:
    return [(m, False) for m in FROM_LOGP] + [(m, True) for m in FROM_LOGITS]


@pytest.mark.parametrize(("method", "logits"), entries())
def test_loss_and_gradients_are_autograd_s_of_the_plain_objective(
    method: type[PolicyLoss], logits: bool, batch: dict[str, Tensor]
) -> None:
    out, found = call(method(compile=False), batch, logits)
    value, wanted = by_autograd(method, batch, logits)
    assert float(out.loss.detach()) == pytest.approx(value, abs=1e-12)
    assert found.keys() == wanted.keys() and all(same(found[k], wanted[k]) for k in wanted)


def packed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The live tokens only, answers in another order."""
    rows = torch.arange(B)[:, None].expand(B, T)
    order = torch.tensor([3, 0, 2, 1])
    pick = batch["mask"][order]
    flat = {k: v[order][pick] for k, v in batch.items() if k in TOKENWISE}
    ids = rows[order][pick]
    return flat | {
        "seq_ids": ids,
        "mask": torch.ones_like(ids, dtype=torch.bool),
        "advantages": batch["advantages"][ids],
    }


@pytest.mark.parametrize(("method", "logits"), entries())
def test_packed_is_padded(method: type[PolicyLoss], logits: bool, batch: dict[str, Tensor]) -> None:
    """The counts say how many answers there are: packed, an empty one has no tokens to show itself by."""
    loss_fn = method(compile=False)
    out, found = call(loss_fn, batch, logits)
    flat, gradient = call(loss_fn, packed(batch), logits, counts={"n_seqs": B})
    order = torch.tensor([3, 0, 2, 1])
    assert same(flat.loss, out.loss) and same(gradient["x"], found["x"][order][batch["mask"][order]])
    one, two = loss_fn.summary(out.metrics), loss_fn.summary(flat.metrics)
    assert one.keys() == two.keys() and all(one[k] == pytest.approx(two[k]) for k in one)


@pytest.mark.parametrize("fill", [NAN, math.inf, -math.inf, -1e10, 1e10])
@pytest.mark.parametrize(("method", "logits"), entries())
def test_what_stands_in_masked_slots_never_matters(
    method: type[PolicyLoss], logits: bool, fill: float, batch: dict[str, Tensor]
) -> None:
    loss_fn = method(compile=False)
    out, found = call(loss_fn, batch, logits)
    mask = batch["mask"]
    dirty = {k: torch.where(mask[..., None] if v.dim() == 3 else mask, v, fill) for k, v in batch.items()
             if k in TOKENWISE and v.is_floating_point()}  # fmt: skip
    dirty["advantages"] = torch.where(mask.any(-1), batch["advantages"], fill)  # an empty answer's A is filler too
    other, gradient = call(loss_fn, batch | dirty, logits)
    assert torch.equal(other.loss, out.loss) and all(torch.equal(gradient[k], found[k]) for k in found)
    assert not bool(found["x"][~mask].any())
    one, two = loss_fn.summary(out.metrics), loss_fn.summary(other.metrics)
    assert one == two


@pytest.mark.parametrize(("method", "logits"), entries())
def test_micro_batches_with_global_counts_add_up(
    method: type[PolicyLoss], logits: bool, batch: dict[str, Tensor]
) -> None:
    loss_fn = method(compile=False)
    out, found = call(loss_fn, batch, logits)
    counts = {"n_tokens": torch.tensor(sum(LENGTHS)), "n_seqs": B}
    parts = [
        call(loss_fn, {k: v[rows] for k, v in batch.items()}, logits, counts=counts)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    assert same(sum(p[0].loss for p in parts), out.loss)  # type: ignore[arg-type]
    assert same(torch.cat([p[1]["x"] for p in parts]), found["x"])
    merged, whole = loss_fn.summary(loss_fn.merge([p[0].metrics for p in parts])), loss_fn.summary(out.metrics)
    assert merged.keys() == whole.keys() and all(merged[k] == pytest.approx(whole[k]) for k in whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", FROM_LOGP)
def test_every_dtype_is_computed_in_float32(
    method: type[PolicyLoss], dtype: torch.dtype, batch: dict[str, Tensor]
) -> None:
    """The same rounded inputs in float64 give the same loss to float32's precision; gradients keep the input's dtype."""
    low = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items() if k in (*TOKENWISE, "mask")}
    low["advantages"] = batch["advantages"].float()
    out, found = call(method(compile=False), low)
    exact, gradient = call(
        method(compile=False), {k: v.double() if v.is_floating_point() else v for k, v in low.items()}
    )
    assert out.loss.dtype is torch.float32 and same(out.loss, exact.loss, 1e-5)
    assert all(found[k].dtype is dtype for k in found)
    assert all(torch.allclose(found[k].double(), gradient[k], rtol=torch.finfo(dtype).eps, atol=1e-6) for k in found)


def kept_weights(ax, logp, A, n_seqs):  # type: ignore[no-untyped-def]
    kept = torch.where(A * logp < 9, 1.0, 0.0)
    lam = 1 / (n_seqs * ax.sum_t(kept) + 0 * ax.sum_b(kept, "token"))
    return Weights(value=lam * A * logp, coef=lam * A, W=kept, T=None, f=None, ratios={}, limits={"f/mask": kept == 1},
                   outside={}, grads={}, centre=None)  # fmt: skip


class Kept(Hand):
    NEEDS = {"advantages": "A weighs every token"}
    weights = staticmethod(kept_weights)


def test_a_default_dtype_of_bfloat16_changes_nothing() -> None:
    """Trainers set it while they build a model; counted in it, 1001 tokens are 1000."""
    given = {"logp": -torch.rand(1, 1001), "mask": torch.ones(1, 1001), "advantages": torch.ones(1)}
    flat = {k: v[0] if v.dim() > 1 else v.expand(1001) for k, v in given.items()} | {
        "seq_ids": torch.zeros(1001, dtype=torch.long)
    }
    for layout in (given, flat):
        out, found = call(Kept(compile=False), layout)
        torch.set_default_dtype(torch.bfloat16)
        try:
            other, gradient = call(Kept(compile=False), layout)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(other.loss, out.loss) and torch.equal(gradient["x"], found["x"])
        assert float(other.metrics["f/mask_pos"][0]) == 1001.0


def test_what_comes_from_above_scales_the_gradient(batch: dict[str, Tensor]) -> None:
    for method, logits in ((Band, False), (Entropy, True), (Centred, True)):
        x = batch["logits" if logits else "logp"].clone().requires_grad_()
        rest = {k: v for k, v in batch.items() if k not in ("logits", "logp", "tokens", "entropy")}
        loss_fn = method(compile=False)
        out = loss_fn.from_logits(x, batch["tokens"], **rest) if logits else loss_fn(x, **rest)
        (2.5 * out.loss).backward()
        assert x.grad is not None
        assert same(x.grad, 2.5 * call(method(compile=False), batch, logits)[1]["x"])


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 3)])
def test_nothing_live_is_a_loss_of_zero_with_gradients(shape: tuple[int, int]) -> None:
    zeros = torch.zeros(shape)
    given = dict.fromkeys(("logp", "prox_logp", "mu_logp", "ref_logp", "entropy"), zeros)
    for method in FROM_LOGP:
        out, found = call(
            method(compile=False),
            given | {"mask": zeros.bool(), "advantages": zeros[:, 0] if shape[1] else zeros.sum(-1)},
        )
        assert str(float(out.loss)) == "0.0" and not bool(found["x"].any()) and found["x"].shape == shape
        assert all(math.isfinite(x) for x in method(compile=False).summary(out.metrics).values())


# --- parameters ---------------------------------------------------------------------------------------------------------------------


def test_parameters_are_checked_when_given_and_when_set() -> None:
    with pytest.raises(TypeError, match=r"'epss'.*did you mean 'eps'"):
        Clip(epss=0.1)
    loss_fn = Clip(eps=0.3)
    assert loss_fn.eps == 0.3
    for bad in (-0.1, 1.5, NAN, math.inf):
        with pytest.raises(ValueError, match=r"eps=.*outside \[0, 1\]"):
            loss_fn.eps = bad
        with pytest.raises(ValueError, match="eps"):
            Clip(eps=bad)
    for worse in ("0.3", True):
        with pytest.raises(TypeError, match="must be a number"):
            loss_fn.eps = worse
    with pytest.raises(AttributeError, match=r"'highh'.*did you mean 'high'"):
        Band().highh = 3.0
    assert loss_fn.eps == 0.3 and repr(loss_fn) == "Clip(eps=0.3)"
    with pytest.raises(ValueError, match="on_missing"):
        Clip(on_missing="skip")


class Required(Clip):
    PARAMS = {"eps": (None, 0.0, 1.0, "half width of the clip range")}


def test_a_parameter_without_a_default_is_required_and_says_what_it_is() -> None:
    with pytest.raises(TypeError, match=r"'eps'.*half width of the clip range"):
        Required()
    assert Required(eps=0.1).eps == 0.1


def test_a_changed_parameter_takes_effect(batch: dict[str, Tensor]) -> None:
    loss_fn = Band(compile=False)
    before = call(loss_fn, batch)[0].loss
    loss_fn.beta = 7.0
    after = call(loss_fn, batch)[0].loss
    assert not torch.equal(before, after) and torch.equal(after, call(Band(compile=False, beta=7.0), batch)[0].loss)


def test_it_is_a_module_like_others(batch: dict[str, Tensor]) -> None:
    loss_fn = Band(compile=False, beta=0.5, on_missing="drop", metrics=False)
    wanted = call(loss_fn, batch)[0]
    for other in (
        copy.deepcopy(loss_fn),
        pickle.loads(pickle.dumps(loss_fn)),
        loss_fn.to(torch.float64).eval().train(),
    ):
        assert repr(other) == repr(loss_fn) and other.on_missing == "drop"
        assert torch.equal(call(other, batch)[0].loss, wanted.loss)
    copied = copy.deepcopy(loss_fn)
    copied.beta = 9.0
    assert loss_fn.beta == 0.5
    assert not loss_fn.state_dict() and not list(loss_fn.parameters())  # a checkpoint of the model stays what it was
    assert loss_fn.rescale is False and set(loss_fn.needs) == {"advantages", "prox_logp", "mu_logp", "ref_logp"}
    assert wanted.metrics == {}


# --- inputs -------------------------------------------------------------------------------------------------------------------------


def refused(loss_fn: PolicyLoss, batch: dict[str, Any], **changes: Any) -> str:
    """The message of the error that this call must raise."""
    with pytest.raises((TypeError, ValueError)) as error:
        call(loss_fn, {k: v for k, v in (batch | changes).items() if v is not None})
    return str(error.value)


def test_an_input_that_is_missing_or_unknown_is_named(batch: dict[str, Tensor]) -> None:
    loss_fn = Band(compile=False)
    assert "band needs mu_logp: c = prox/mu is bounded" in refused(loss_fn, batch, mu_logp=None)
    assert "band needs advantages" in refused(loss_fn, batch, advantages=None)
    assert "'prox_lopg'; did you mean 'prox_logp'" in refused(loss_fn, batch, prox_lopg=batch["prox_logp"])
    assert "did you mean 'advantages'" in refused(loss_fn, batch, advantage=batch["advantages"])
    assert "entropy" in refused(Entropy(compile=False), batch, entropy=None)
    for method in (Trust, Centred):
        message = refused(method(compile=False), batch)
        assert "from_logits" in message and "mu_logprobs" in message
    everything = {"mu_topk_ids": None, "groups": torch.zeros(B, dtype=torch.long), "segment_ids": None}
    call(
        Clip(compile=False), batch | {k: v for k, v in everything.items() if v is not None}
    )  # known, not needed: ignored


def test_shapes_dtypes_and_devices_are_checked_and_quoted(batch: dict[str, Tensor]) -> None:
    loss_fn, b = Band(compile=False), batch
    assert "(4, 7)" in refused(loss_fn, b, mask=torch.ones(B, T + 1)) and "(4, 6)" in refused(
        loss_fn, b, mask=torch.ones(B, T + 1)
    )
    assert "prox_logp has shape (4, 5)" in refused(loss_fn, b, prox_logp=b["prox_logp"][:, 1:])
    assert "(3,)" in refused(loss_fn, b, advantages=b["advantages"][1:])
    assert "must be (4,)" in refused(
        Geometric(compile=False), b, advantages=b["prox_logp"]
    )  # one number per answer only
    assert "floating point" in refused(loss_fn, b, mu_logp=b["mu_logp"].long())
    assert "seq_ids" in refused(
        loss_fn, {k: v.reshape(-1)[:6] for k, v in b.items() if k not in ("logits", "mu_logprobs")}
    )
    assert "meta" in refused(loss_fn, b, mu_logp=b["mu_logp"].to("meta"))
    with pytest.raises(ValueError, match="floating point"):
        loss_fn(b["logp"].long(), **{k: b[k] for k in ("mask", *loss_fn.needs)})


def test_advantages_of_shape_b_never_broadcast_along_time() -> None:
    """With B = T a wrong broadcast would go unnoticed."""
    zeros, A = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([2.0, -1.0], dtype=torch.float64)
    out, found = call(Product(compile=False), {"logp": zeros, "prox_logp": zeros, "mu_logp": zeros, "advantages": A,
                                               "mask": torch.tensor([[1, 1], [0, 1]])})  # fmt: skip
    assert float(out.loss) == pytest.approx(-1.0) and found["x"].tolist() == [[-2 / 3, -2 / 3], [0.0, 1 / 3]]
    each, _ = call(Product(compile=False), {"logp": zeros, "prox_logp": zeros, "mu_logp": zeros, "advantages": A[:, None].expand(2, 2),
                                            "mask": torch.tensor([[1, 1], [0, 1]])})  # fmt: skip
    assert torch.equal(each.loss, out.loss)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_a_mask_may_have_any_dtype(dtype: torch.dtype, batch: dict[str, Tensor]) -> None:
    assert torch.equal(
        call(Band(compile=False), batch, mask=batch["mask"].to(dtype))[0].loss, call(Band(compile=False), batch)[0].loss
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_live_values_are_checked_on_the_cpu(compiled: bool, batch: dict[str, Tensor]) -> None:
    """The compiled program must not optimise the check away."""
    loss_fn = Band(compile=compiled)
    for key in ("logp", "prox_logp", "mu_logp", "ref_logp", "advantages"):
        for value in (NAN, math.inf, -math.inf):
            bad = batch[key].clone()
            bad.view(-1)[1] = value
            assert key in refused(loss_fn, batch, **{key: bad})
    positive = batch["ref_logp"].clone()
    positive[0, 1] = 0.5
    assert "ref_logp is above 0" in refused(loss_fn, batch, ref_logp=positive)
    assert "mask" in refused(loss_fn, batch, mask=torch.full((B, T), 0.5))
    assert "mask" in refused(loss_fn, batch, mask=batch["prox_logp"])
    call(loss_fn, batch, ref_logp=torch.where(batch["mask"], batch["ref_logp"], 3.0))  # masked: nobody looks


def test_checks_of_values_cost_no_synchronisation_where_it_would_hurt(batch: dict[str, Tensor]) -> None:
    """On another device they run only with debug=True."""
    elsewhere = torch.empty(1, device="meta")
    assert not Band()._checking(elsewhere) and Band(debug=True)._checking(elsewhere) and Band()._checking(batch["logp"])


def test_ids_are_checked(batch: dict[str, Tensor]) -> None:
    class Grouped(Clip):
        NEEDS = Clip.NEEDS | {"groups": "for the test"}

    assert "from 0 to 3" in refused(Grouped(compile=False), batch, groups=torch.tensor([0, 0, 1, 4]))
    assert "from 0 to 3" in refused(Grouped(compile=False), batch, groups=torch.tensor([0, 0, -1, 1]))
    assert "must be integers" in refused(Grouped(compile=False), batch, groups=torch.ones(B))
    call(Grouped(compile=False), batch, groups=torch.tensor([3, 3, 0, 1], dtype=torch.int32))
    flat = packed(batch)
    n = len(flat["seq_ids"])
    assert f"from 0 to {n - 1}" in refused(Clip(compile=False), flat, seq_ids=flat["seq_ids"] + n)
    assert "seq_ids" in refused(Clip(compile=False), flat, seq_ids=flat["seq_ids"] - 1)
    dead = {k: torch.cat([v, v[:2]]) for k, v in flat.items() if k not in ("mask", "seq_ids")}
    dead |= {"mask": torch.arange(n + 2) < n, "seq_ids": torch.cat([flat["seq_ids"], torch.tensor([-1, -100])])}
    assert torch.equal(call(Clip(compile=False), dead)[0].loss, call(Clip(compile=False), flat)[0].loss)


# --- counts -------------------------------------------------------------------------------------------------------------------------


class Local(Product):
    LOCAL_STATISTICS = "`sum_b(1[f != 0])` is taken over the whole batch it is given"


def test_counts_are_checked(batch: dict[str, Tensor]) -> None:
    loss_fn = Product(compile=False)
    assert "did you mean 'n_tokens'" in refused(loss_fn, batch, counts={"n_token": 3})
    assert "n_tokens has shape (4,)" in refused(loss_fn, batch, counts={"n_tokens": torch.ones(B)})
    assert "over the whole batch" in refused(Local(compile=False), batch, counts={"n_tokens": 3})
    call(Local(compile=False), batch)
    twice, _ = call(loss_fn, batch, counts={"n_tokens": 2 * sum(LENGTHS), "n_seqs": 999})
    assert same(2 * twice.loss, call(loss_fn, batch)[0].loss)


def test_with_several_ranks_a_missing_count_is_an_error(
    batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falling back to the count at hand would silently change the objective."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert "n_tokens" in refused(Product(compile=False), batch)
    call(Product(compile=False), batch, counts={"n_tokens": 26})
    assert "split over ranks" in refused(Local(compile=False), batch)


# --- missing log-probs of the sampler ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [NAN, -math.inf])
def test_a_sampler_log_prob_that_is_missing(missing: float, batch: dict[str, Tensor]) -> None:
    mu = batch["mu_logp"].clone()
    mu[0, 2] = missing
    assert "on_missing" in refused(Band(compile=False), batch, mu_logp=mu)
    neutral, found = call(Band(compile=False, on_missing="neutral"), batch, mu_logp=mu)
    replaced = torch.where(torch.isfinite(mu), mu, batch["prox_logp"])
    assert torch.equal(neutral.loss, call(Band(compile=False), batch, mu_logp=replaced)[0].loss)
    drop, found = call(Band(compile=False, on_missing="drop"), batch, mu_logp=mu)
    assert float(found["x"][0, 2]) == 0.0 and all(math.isfinite(x) for x in Band.summary(drop.metrics).values())
    mask = batch["mask"].clone()
    mask[0, 2] = False
    without, gradient = call(Band(compile=False), batch, mask=mask, counts={"n_tokens": sum(LENGTHS)})  # still counted
    assert same(drop.loss, without.loss) and same(found["x"], gradient["x"])
    other = batch["prox_logp"].clone()
    other[0, 2] = missing
    assert "prox_logp" in refused(Band(compile=False, on_missing="drop"), batch, prox_logp=other)


@pytest.mark.parametrize("method", [Clip, Product])
def test_what_comes_from_above_scales_the_gradient_and_nothing_else(
    method: type[PolicyLoss], batch: dict[str, Tensor]
) -> None:
    """loss.backward() hands the gradient over as it is: what is done to it then is not seen by the next backward."""
    _, once = call(method(compile=False), batch)
    given = {k: x for k, x in batch.items() if k in ("mask", *method(compile=False).needs)}
    for scale in (1.0, -0.5, 0.0):
        x = batch["logp"].clone().requires_grad_()
        (method(compile=False)(x, **given).loss * scale).backward()
        assert x.grad is not None and torch.allclose(x.grad, once["x"] * scale, rtol=1e-12, atol=0)
    x = batch["logp"].clone().requires_grad_()
    loss = method(compile=False)(x, **given).loss
    for _ in range(3):
        x.grad = None
        loss.backward(retain_graph=True)
        assert x.grad is not None and torch.equal(x.grad, once["x"])
        x.grad.mul_(7.0)  # clipping does that
    loss.backward(retain_graph=True)
    assert torch.allclose(x.grad, 8 * once["x"], rtol=1e-12, atol=0)


# --- metrics ------------------------------------------------------------------------------------------------------------------------------


def test_metrics_by_hand() -> None:
    """Four live tokens in two answers; every number worked out by hand."""
    log_r = torch.tensor([[0.5, -0.5, 9.0], [0.5, -0.5, 0.0]], dtype=torch.float64)
    prox = torch.full((2, 3), -9.0, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    out, _ = call(
        Clip(compile=False),
        {"logp": prox + log_r, "prox_logp": prox, "advantages": torch.tensor([1.0, -1.0]).double(), "mask": mask},
    )
    up, down = math.exp(0.5), math.exp(-0.5)
    mean, square = (up + down) / 2, (up * up + down * down) / 2
    wanted = {
        "tokens": 4, "answers": 2, "r/mean": mean, "r/max": up, "r/abs_log_max": 0.5, "r/ess": mean**2 / square, "r/outside": 1.0,
        "T/mask_pos": 0.25, "T/mask_neg": 0.25, "W/mean": (up + down) / 4, "W/mean_abs": (up + down) / 4, "W/zero": 0.5,
        "f/mean": 1.0, "kl(prox|pi)/k1": 0.0, "kl(prox|pi)/k3": mean - 1,
    }  # fmt: skip
    found = Clip.summary(out.metrics)
    assert {k: found[k] for k in wanted} == {k: pytest.approx(v) for k, v in wanted.items()}
    assert all(s.dim() == n.dim() == 0 and not s.requires_grad for s, n in out.metrics.values())


def test_a_ratio_of_an_answer_is_counted_once_per_answer() -> None:
    log_r = torch.tensor([[0.3, 0.3, 0.3], [-0.1, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
    prox = torch.full((3, 3), -9.0, dtype=torch.float64)
    out, _ = call(Geometric(compile=False), {"logp": prox + log_r, "prox_logp": prox, "advantages": torch.ones(3).double(),
                                             "mask": torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])})  # fmt: skip
    found = Geometric.summary(out.metrics)
    assert found["s/mean"] == pytest.approx((math.exp(0.3) + math.exp(-0.1)) / 2) and found["answers"] == 2
    assert found["T/mask_pos"] == pytest.approx(3 / 4)  # a share of tokens: three of four


def test_merge_is_the_metrics_of_the_whole_and_summary_of_nothing_is_nothing(batch: dict[str, Tensor]) -> None:
    loss_fn = Band(compile=False)
    parts = [call(loss_fn, {k: v[i : i + 1] for k, v in batch.items()})[0].metrics for i in range(B)]
    whole = loss_fn.summary(call(loss_fn, batch)[0].metrics)
    merged = loss_fn.summary(PolicyLoss.merge(parts))
    assert merged == {k: pytest.approx(v) for k, v in whole.items()}
    assert PolicyLoss.merge([]) == {} and PolicyLoss.summary({}) == {}


# --- the data side ------------------------------------------------------------------------------------------------------------------------


def group_mean(ax, R, length, scale):  # type: ignore[no-untyped-def]
    return (R - ax.mean_g(R)) * scale / length


class Data(Hand):
    name = "data"
    PARAMS = {"scale": (2.0, None, None, "of the advantage")}
    INPUTS = {"bonus": "sequence"}
    weights = staticmethod(lambda ax, logp, A: None)
    advantage = staticmethod(group_mean)
    reward = staticmethod(lambda ax, R, bonus: R + bonus)
    kept = staticmethod(lambda ax, R: ax.std_g(R) > 0)


def test_prepare_shapes_first_and_filters_on_the_raw_reward() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([7, 7, -3, -3])
    given = {"bonus": torch.tensor([0.0, 0.0, 1.0, 0.0]), "lengths": torch.tensor([1, 2, 1, 4])}
    found = Data().prepare(rewards, groups, **given)
    assert found.rewards.tolist() == [1.0, 0.0, 2.0, 1.0]
    assert found.advantages.tolist() == [1.0, -0.5, 1.0, -0.25]
    assert found.keep.tolist() == [True, True, False, False]  # equal before the bonus
    assert torch.equal(Data().advantages(rewards, groups, **given), found.advantages)
    assert torch.equal(Data().keep(rewards, groups), found.keep) and torch.equal(
        Data().shape(rewards, groups, **given), found.rewards
    )
    mask = torch.arange(4) < given["lengths"][:, None]
    assert torch.equal(Data().prepare(rewards, groups, mask=mask, bonus=given["bonus"]).advantages, found.advantages)


def test_the_data_side_refuses_what_has_no_meaning() -> None:
    rewards, groups, bonus = torch.ones(3), torch.zeros(3, dtype=torch.long), torch.zeros(3)
    with pytest.raises(ValueError, match="NaN"):
        Data().prepare(torch.tensor([1.0, NAN, 0.0]), groups, bonus=bonus, lengths=torch.ones(3))
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        Data().prepare(rewards, groups[:2], bonus=bonus)
    with pytest.raises(TypeError, match="lengths"):
        Data().prepare(rewards, groups, bonus=bonus)
    with pytest.raises(TypeError, match="states no advantage"):
        Clip().advantages(rewards, groups)
    with pytest.warns(UserWarning, match="one answer"):
        Data().prepare(rewards, torch.tensor([0, 0, 1]), bonus=bonus, lengths=torch.ones(3))
