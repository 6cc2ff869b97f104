"""The logits entry by itself: against autograd through log_softmax, for any chunk, temperature, shift and layout."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from helpers import instance
from torch import Tensor

import lossdsl

NAN = math.nan
B, T, V = 3, 5, 7


@pytest.fixture
def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)

    def distribution() -> Tensor:
        return torch.randn(B, T, V, generator=g, dtype=torch.float64).log_softmax(-1)

    tokens = torch.randint(0, V, (B, T), generator=g)
    mask = torch.rand(B, T, generator=g) > 0.3
    mask[:, 0], mask[:, 1] = False, True
    mu, prox = distribution(), distribution()

    def at(x: Tensor) -> Tensor:
        return x.gather(-1, tokens[..., None])[..., 0]

    return {
        "logits": torch.randn(B, T, V, generator=g, dtype=torch.float64), "tokens": tokens, "mask": mask,
        "advantages": torch.randn(B, generator=g, dtype=torch.float64), "prox_logp": at(prox), "mu_logp": at(mu), "mu_logprobs": mu,
    }  # fmt: skip


def of(loss_fn: Any, batch: dict[str, Tensor], **changes: Any) -> tuple[float, Tensor]:
    """(loss, d loss / d logits) of one call, with some of the batch or of the options changed."""
    given = batch | changes
    given = {k: v for k, v in given.items() if k not in ("mu_logprobs",) or k in loss_fn.needs}
    z = given.pop("logits").detach().clone().requires_grad_()
    out = loss_fn.from_logits(z, given.pop("tokens"), **given)
    out.loss.backward()
    assert z.grad is not None
    return float(out.loss.detach()), z.grad


def token_tis(logp: Tensor, b: dict[str, Tensor], eps: float = 0.2, C: float = 2.0) -> Tensor:
    """min(c, C) min(r A, clip(r) A), averaged over an answer, then over answers: plain PyTorch, for autograd."""
    r, c = (logp - b["prox_logp"]).exp(), (b["prox_logp"] - b["mu_logp"]).exp().clamp(max=C)
    A, n = b["advantages"][:, None], b["mask"].sum(-1, keepdim=True).clamp(min=1)
    J = c * torch.minimum(r * A, r.clamp(1 - eps, 1 + eps) * A) / n
    return -torch.where(b["mask"], J, 0.0).sum() / B


def through_log_softmax(b: dict[str, Tensor], temperature: Any = 1.0, shift: bool = False) -> tuple[float, Tensor]:
    z = b["logits"].clone().requires_grad_()
    t = temperature if isinstance(temperature, float) else temperature.reshape(B, -1, 1)
    logp_v = (z / t).log_softmax(-1)
    if shift:
        logp_v = torch.cat([logp_v[:, :1], logp_v[:, :-1]], 1)
    loss = token_tis(logp_v.gather(-1, b["tokens"][..., None])[..., 0], b)
    loss.backward()
    assert z.grad is not None
    return float(loss.detach()), z.grad


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.5, 1.0, 2.0]), torch.rand(B, T) + 0.5])
def test_it_is_autograd_through_log_softmax(batch: dict[str, Tensor], temperature: Any, shift: bool) -> None:
    t = temperature.double() if isinstance(temperature, Tensor) else temperature
    if shift and isinstance(t, Tensor) and t.dim() == 2:  # a token's temperature belongs to the row that scores it
        t = torch.cat([t[:, 1:], t[:, :1]], 1)
    wanted, gradient = through_log_softmax(batch, t, shift)
    if shift and isinstance(t, Tensor) and t.dim() == 2:
        t = torch.cat([t[:, -1:], t[:, :-1]], 1)
    loss, found = of(instance("token_tis"), batch, temperature=t, shift=shift)
    assert loss == pytest.approx(wanted, abs=1e-12)
    assert torch.allclose(found, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["token_tis", "score_centering", "trm_max", "grpo_entropy"])
def test_neither_chunks_nor_layout_nor_padding_matter(name: str, batch: dict[str, Tensor]) -> None:
    loss_fn = instance(name)
    loss, gradient = of(loss_fn, batch)
    for size in (1, 200, 10**9):  # one row, some rows, all of them
        other, found = of(loss_fn, batch, max_chunk_bytes=size)
        assert other == pytest.approx(loss, abs=1e-13) and torch.allclose(found, gradient, rtol=0, atol=1e-14)
    mask = batch["mask"]
    for fill in (NAN, math.inf, -math.inf):
        dirty = {k: torch.where(mask[..., None] if v.dim() == 3 else mask, v, fill) for k, v in batch.items()
                 if k in ("logits", "prox_logp", "mu_logp", "mu_logprobs")}  # fmt: skip
        temperature = torch.where(mask, 1.0, 0.0).double()
        other, found = of(
            loss_fn, batch | dirty, temperature=temperature, tokens=torch.where(mask, batch["tokens"], -100)
        )
        assert other == pytest.approx(loss, abs=1e-13) and torch.allclose(found, gradient, rtol=0, atol=1e-14)
    rows = torch.arange(B)[:, None].expand(B, T).reshape(-1)
    flat = {k: v.reshape(B * T, *v.shape[2:]) if v.dim() > 1 else v[rows] for k, v in batch.items()}
    other, found = of(loss_fn, flat, seq_ids=torch.where(flat["mask"], rows, -1))
    assert other == pytest.approx(loss, abs=1e-13) and torch.allclose(
        found, gradient.reshape(B * T, V), rtol=0, atol=1e-14
    )


def test_a_shifted_packed_row_never_scores_across_answers(batch: dict[str, Tensor]) -> None:
    """Padded and packed agree, and an answer whose first position is live is refused in both."""
    loss_fn = instance("token_tis")
    rows = torch.arange(B)[:, None].expand(B, T).reshape(-1)
    flat = {k: v.reshape(B * T, *v.shape[2:]) if v.dim() > 1 else v[rows] for k, v in batch.items()}
    loss, gradient = of(loss_fn, batch, shift=True)
    other, found = of(loss_fn, flat, shift=True, seq_ids=rows)
    assert other == pytest.approx(loss, abs=1e-13) and torch.allclose(
        found, gradient.reshape(B * T, V), rtol=0, atol=1e-14
    )
    assert not bool(gradient[:, -1].any())  # the last row scores nothing
    mask = batch["mask"].clone()
    mask[1, 0] = True
    with pytest.raises(ValueError, match="first position"):
        of(loss_fn, batch | {"mask": mask}, shift=True)
    with pytest.raises(ValueError, match="first position"):
        of(loss_fn, flat | {"mask": mask.reshape(-1)}, shift=True, seq_ids=rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_has_the_logits_dtype_and_float32_inside(batch: dict[str, Tensor], dtype: torch.dtype) -> None:
    low = {k: v.to(dtype) if k == "logits" else v.float() if v.is_floating_point() else v for k, v in batch.items()}
    wanted, gradient = of(instance("token_tis"), batch | {"logits": low["logits"].double()})
    loss, found = of(instance("token_tis"), low)
    assert found.dtype is dtype and loss == pytest.approx(wanted, abs=1e-5)
    assert torch.allclose(found.double(), gradient, rtol=torch.finfo(dtype).eps, atol=1e-6)  # each entry rounded once


def test_a_probability_of_zero_in_the_sampler_is_exact(batch: dict[str, Tensor]) -> None:
    """A truncated sampler: -inf in its log-probs is a weight of 0, in the loss, the divergence and the gradient."""
    mu = batch["mu_logprobs"].clone()
    mu[..., 2] = -math.inf
    mu = torch.where(batch["tokens"][..., None] == torch.arange(V), batch["mu_logprobs"], mu).log_softmax(-1)
    for name in ("score_centering", "tis_sc", "trm_max"):
        loss, gradient = of(instance(name), batch, mu_logprobs=mu)
        almost, close = of(instance(name), batch, mu_logprobs=torch.clamp(mu, min=-80.0))
        assert loss == pytest.approx(almost, abs=1e-10) and torch.allclose(gradient, close, atol=1e-10)


def test_top_k_of_everything_but_one_is_the_whole(batch: dict[str, Tensor]) -> None:
    """One token in the tail: gamma is its true ratio, so nothing is lost; and the sampled token may be that one."""
    ids = batch["mu_logprobs"].argsort(-1, descending=True)[..., : V - 1]
    head = {"mu_topk_ids": ids, "mu_topk_logprobs": batch["mu_logprobs"].gather(-1, ids)}
    tail = (ids != batch["tokens"][..., None]).all(-1)
    assert bool((tail & batch["mask"]).any())
    for name in ("score_centering", "tis_sc", "mis_sc", "ppo_sc"):
        _, whole = of(instance(name), batch)
        _, found = of(instance(name), {k: v for k, v in batch.items() if k != "mu_logprobs"} | head)
        assert torch.allclose(found, whole, rtol=0, atol=1e-10)


def test_what_the_entry_refuses(batch: dict[str, Tensor]) -> None:
    loss_fn, sc = instance("token_tis"), instance("score_centering")
    ids = batch["mu_logprobs"].topk(3).indices
    head = {k: v for k, v in batch.items() if k != "mu_logprobs"} | {
        "mu_topk_ids": ids, "mu_topk_logprobs": batch["mu_logprobs"].gather(-1, ids)}  # fmt: skip
    out_of_range, twice, nan = ids.clone(), ids.clone(), batch["mu_logprobs"].clone()
    out_of_range[0, 1, 0], twice[0, 1, 0], nan[0, 1, 2] = V, int(ids[0, 1, 1]), NAN
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (loss_fn, batch | {"logits": batch["logits"][:, 1:]}, ValueError, r"\(3, 4, 7\).*\(3, 5\)"),
        (loss_fn, batch | {"tokens": batch["tokens"].double()}, ValueError, "integer"),
        (loss_fn, batch | {"tokens": batch["tokens"] + V}, ValueError, "vocabulary of 7"),
        (loss_fn, batch | {"temperature": torch.ones(2)}, ValueError, r"temperature.*\(2,\)"),
        (loss_fn, batch | {"temperature": torch.tensor([1.0, NAN, 1.0])}, ValueError, "temperature"),
        (loss_fn, batch | {"temperature": -0.5}, ValueError, "temperature"),
        (loss_fn, batch | {"logits": batch["logits"] * NAN}, ValueError, "logp is NaN"),
        (sc, batch | {"mu_logprobs": batch["mu_logprobs"][..., 1:]}, ValueError, "6 columns.*7"),
        (sc, batch | {"mu_logprobs": nan}, ValueError, "mu_logprobs.*NaN"),
        (sc, batch | {"mu_logprobs": batch["mu_logprobs"].exp()}, ValueError, "log-probs are wanted"),
        (sc, batch | {"mu_topk_ids": ids, "mu_topk_logprobs": head["mu_topk_logprobs"]}, TypeError, "not both"),
        (sc, head | {"mu_topk_ids": out_of_range}, ValueError, "mu_topk_ids.*vocabulary"),
        (sc, head | {"mu_topk_ids": twice}, ValueError, "twice"),
        (sc, head | {"mu_topk_ids": ids.double()}, ValueError, "mu_topk_ids.*integer"),
        (sc, head | {"mu_topk_ids": ids[..., :2]}, ValueError, "agree"),
        (sc, {k: v for k, v in head.items() if "topk" not in k}, TypeError, "mu_logprobs"),
        (instance("T: 1\nf: 1[sum_v(mu[v] * pi[v]) < 0.5]\n"), head, TypeError, "full distribution"),
    ]  # fmt: skip
    for function, given, kind, message in refused:
        with pytest.raises(kind, match=message):
            of(function, given)


def test_with_nothing_that_requires_grad_there_is_no_graph(batch: dict[str, Tensor]) -> None:
    given = {k: v for k, v in batch.items() if k not in ("logits", "tokens", "mu_logprobs")}
    out = instance("token_tis").from_logits(batch["logits"], batch["tokens"], **given)
    assert not out.loss.requires_grad
    with torch.no_grad():
        again = instance("token_tis").from_logits(batch["logits"].clone().requires_grad_(), batch["tokens"], **given)
    assert not again.loss.requires_grad and torch.equal(out.loss, again.loss)


def saved_bytes(name: str, width: int, vocab: int) -> int:
    """Bytes kept for backward besides the logits and the sampler's distribution themselves."""
    z = torch.randn(1, width, vocab, requires_grad=True)
    lp = torch.full((1, width), -3.0)
    given = {
        "mask": torch.ones(1, width, dtype=torch.bool),
        "advantages": torch.ones(1),
        "prox_logp": lp,
        "mu_logp": lp,
    }
    mu = torch.randn(1, width, vocab).log_softmax(-1)
    loss_fn = instance(name)
    if "mu_logprobs" in loss_fn.needs:
        given["mu_logprobs"] = mu
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = loss_fn.from_logits(z, torch.zeros(1, width, dtype=torch.long), max_chunk_bytes=64 * vocab * 4, **given)
    own = {x.untyped_storage().data_ptr() for x in (z, mu)}
    out.loss.backward()
    return sum(n for at, n in seen.items() if at not in own)


@pytest.mark.parametrize("name", ["token_tis", "score_centering"])
def test_what_is_kept_for_backward_does_not_grow_with_the_vocabulary(name: str) -> None:
    """No float32 chunk survives the forward: a few numbers per token are kept, whatever V."""
    small, large = saved_bytes(name, 256, 512), saved_bytes(name, 256, 4096)
    assert small == large and 0 < large < 64 * 256
    assert saved_bytes(name, 512, 512) <= 2 * small + 64


def test_a_loss_kept_for_a_log_keeps_no_logits(batch: dict[str, Tensor]) -> None:
    z = batch["logits"].clone().requires_grad_()
    logits = z * 1.0
    alive = weakref.ref(logits)
    given = {k: v for k, v in batch.items() if k not in ("logits", "tokens")}
    history = [instance("score_centering").from_logits(logits, batch["tokens"], **given).loss]
    history[0].backward()
    storage = logits.untyped_storage()._cdata
    del logits
    gc.collect()
    assert alive() is None and math.isfinite(float(history[0].detach()))
    held = [x for x in gc.get_objects() if type(x) is Tensor and x.untyped_storage()._cdata == storage]
    assert not held


def test_a_loss_can_be_differentiated_twice_over_if_the_graph_is_kept(batch: dict[str, Tensor]) -> None:
    z = batch["logits"].clone().requires_grad_()
    given = {k: v for k, v in batch.items() if k not in ("logits", "tokens", "mu_logprobs")}
    loss = instance("token_tis").from_logits(z, batch["tokens"], **given).loss
    loss.backward(retain_graph=True)
    once = z.grad.clone()  # type: ignore[union-attr]
    (3 * loss).backward()
    assert torch.allclose(z.grad, 4 * once)  # type: ignore[arg-type]


def test_logits_changed_in_place_before_backward_are_noticed(batch: dict[str, Tensor]) -> None:
    logits = batch["logits"].clone().requires_grad_() * 1.0
    given = {k: v for k, v in batch.items() if k not in ("logits", "tokens", "mu_logprobs")}
    loss = instance("token_tis").from_logits(logits, batch["tokens"], **given).loss
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["token_tis", "score_centering"])
def test_compiled_rows_are_the_eager_ones(name: str, batch: dict[str, Tensor]) -> None:
    """Whole, in chunks, with the top k, shifted: the same numbers as eager."""
    compiled, eager = lossdsl.compile(name), instance(name)
    ids = batch["mu_logprobs"].topk(3).indices
    head = {"mu_topk_ids": ids, "mu_topk_logprobs": batch["mu_logprobs"].gather(-1, ids)}
    variants: list[dict[str, Any]] = [
        batch,
        batch | {"max_chunk_bytes": 4 * V * 8},
        batch | {"shift": True, "temperature": 0.7},
    ]
    if name == "score_centering":
        variants.append({k: v for k, v in batch.items() if k != "mu_logprobs"} | head)
    for given in variants:
        (a, x), (b, y) = of(compiled, given), of(eager, given)
        assert a == pytest.approx(b, abs=1e-12) and torch.allclose(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("name", ["token_tis", "score_centering"])
def test_the_gradient_may_be_written_over_the_logits(name: str, shift: bool, batch: dict[str, Tensor]) -> None:
    """The same gradient, in the logits' own memory, whatever the chunks; the graph cannot be walked again."""
    loss_fn = instance(name)
    given = {
        k: v for k, v in batch.items() if k not in ("logits", "tokens") and (k != "mu_logprobs" or k in loss_fn.needs)
    }
    _, wanted = of(loss_fn, batch, shift=shift)
    for size in (1, 200, 10**9):
        z = batch["logits"].clone().requires_grad_()
        logits = z * 1.0
        loss = loss_fn.from_logits(
            logits, batch["tokens"], shift=shift, inplace=True, max_chunk_bytes=size, **given
        ).loss
        loss.backward(retain_graph=True)
        assert torch.allclose(z.grad, wanted, rtol=0, atol=1e-14)  # type: ignore[arg-type]
        assert torch.equal(logits.detach(), z.grad)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_in_place_is_refused_where_the_logits_are_needed_again(batch: dict[str, Tensor]) -> None:
    """By us where that can be seen at once, by autograd where another step of the graph needs them."""
    loss_fn = instance("token_tis")
    given = {k: v for k, v in batch.items() if k not in ("logits", "tokens", "mu_logprobs")} | {"inplace": True}
    z = batch["logits"].clone().requires_grad_()
    with pytest.raises(ValueError, match="leaf"):
        loss_fn.from_logits(z, batch["tokens"], **given)
    with pytest.raises(ValueError, match="contiguous"):
        loss_fn.from_logits((z * 1.0).transpose(0, 1).contiguous().transpose(0, 1), batch["tokens"], **given)
    capped = torch.exp(z)  # its own backward needs its value
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_fn.from_logits(capped, batch["tokens"], **given).loss.backward()
