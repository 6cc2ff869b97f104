"""The hidden entry: the same loss, metrics and gradients as the other entries, for every method, layout and budget."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import instance
from layouts import CHOSEN, Case, expected, packed, padded, random_case
from methods_by_hand import Band, Centred, Clip, Geometric
from test_rollouts import inputs as rollout_inputs
from test_rollouts import rollouts
from torch import Tensor

import lossdsl

NAN = math.nan
B, T, V, H = 3, 5, 7, 4


def keywords(loss_fn: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in given.items() if k in (*loss_fn.needs, "mask", "seq_ids", "counts")}


def gradients(loss_fn: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, **rest: Any) -> tuple[Any, Tensor, Tensor]:
    """(output, d loss / d hidden, d loss / d head) through the hidden entry."""
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = loss_fn.from_hidden(h, w, tokens, **rest)
    out.loss.backward()
    assert h.grad is not None and w.grad is not None
    return out, h.grad, w.grad


def through_logits(loss_fn: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, **rest: Any) -> Any:
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = loss_fn.from_logits(h @ w.T, tokens, **rest)
    out.loss.backward()
    return out, h.grad, w.grad


def as_hidden(case: Case, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Hidden states and a head whose logits are the case's: the head is part of a rotation."""
    logits = given["pi_logprobs"]
    g = torch.Generator().manual_seed(5)
    vocab = logits.shape[-1]
    rotation = torch.linalg.qr(torch.randn(vocab + 1, vocab + 1, generator=g, dtype=torch.float64))[0]
    return logits @ rotation[:vocab], rotation[:vocab]


@pytest.mark.parametrize("name", lossdsl.builtins())
def test_it_is_the_reference_padded_and_packed_for_any_budget(name: str) -> None:
    loss_fn = instance(name, **CHOSEN.get(name, {}))
    case = random_case(lossdsl.load(name), 3)
    value, _, per_logit = expected(case)
    for layout in (padded, packed):
        given = layout(case)
        hidden, weight = as_hidden(case, given)
        wanted = np.zeros((*given["mask"].shape, weight.shape[0]))
        wanted[given["mask"].numpy()] = per_logit
        d_logits = torch.tensor(wanted)
        vocab = weight.shape[0]
        metrics = loss_fn.from_logits(hidden @ weight.T, given["tokens"], **keywords(loss_fn, given)).metrics
        for budget in (None, 5 * vocab * 8, 1):  # at once, some rows, one row
            for loss_fn.metrics in (True, False):
                out, d_hidden, d_weight = gradients(
                    loss_fn, hidden, weight, given["tokens"], max_logits_bytes=budget, **keywords(loss_fn, given)
                )
                assert float(out.loss.detach()) == pytest.approx(value, rel=1e-10, abs=1e-10)
                assert torch.allclose(d_hidden, d_logits @ weight, rtol=0, atol=1e-10)
                flat = d_logits.reshape(-1, vocab)
                assert torch.allclose(d_weight, flat.T @ hidden.reshape(-1, hidden.shape[-1]), rtol=0, atol=1e-10)
                for key, (total, count) in out.metrics.items():
                    assert torch.allclose(total, metrics[key][0], atol=1e-10) and torch.equal(count, metrics[key][1])
        loss_fn.metrics = True


@pytest.mark.parametrize("name", lossdsl.builtins())
def test_real_rollouts(name: str) -> None:
    """Their own hidden states and head, in chunks of 100 rows: what the logits entry gives, which equals the reference."""
    loss_fn = instance(name, **CHOSEN.get(name, {}))
    data, given = rollouts(), rollout_inputs(name, loss_fn)
    hidden, weight, tokens = data["hidden"], data["lm_head"], data["tokens"].long()
    plain, d_hidden, d_weight = through_logits(loss_fn, hidden, weight, tokens, **given)
    out, found_hidden, found_weight = gradients(
        loss_fn, hidden, weight, tokens, max_logits_bytes=100 * weight.shape[0] * 8, **given
    )
    assert float(out.loss.detach()) == pytest.approx(float(plain.loss.detach()), rel=1e-10, abs=1e-12)
    assert torch.allclose(found_hidden, d_hidden, rtol=0, atol=1e-10)
    assert torch.allclose(found_weight, d_weight, rtol=0, atol=1e-9)
    if not loss_fn.SUMS and "mu_logprobs" not in loss_fn.needs:  # log-probs are enough: the third entry
        logp = (hidden @ weight.T).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        assert float(loss_fn(logp, **given).loss) == pytest.approx(float(plain.loss.detach()), rel=1e-10, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "gspo", "seq_tis", "trm_max", "tis_sc", "grpo_entropy", "grpo_k3", "topr"])
def test_compiled_it_is_the_same(name: str) -> None:
    case = random_case(lossdsl.load(name), 1)
    given = padded(case)
    hidden, weight = as_hidden(case, given)
    for budget in (7 * weight.shape[0] * 8, None):
        found, wanted = (
            gradients(f, hidden, weight, given["tokens"], max_logits_bytes=budget, **keywords(f, given))
            for f in (lossdsl.compile(name, compile=how, **CHOSEN.get(name, {})) for how in (True, False))
        )
        assert torch.allclose(found[0].loss, wanted[0].loss)
        for x, y in zip(found[1:], wanted[1:], strict=True):
            assert bool(y.any()) and torch.allclose(x, y, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["score_centering", "tis_sc", "mis_sc"])
def test_a_top_k_distribution(name: str) -> None:
    """Three entries and the rest by the tail rule, as the logits entry has it."""
    loss_fn, case = instance(name), random_case(lossdsl.load(name), 1)
    given = padded(case)
    hidden, weight = as_hidden(case, given)
    top = given.pop("mu_logprobs").topk(3, -1)
    rest = keywords(loss_fn, given) | {"mu_topk_ids": top.indices, "mu_topk_logprobs": top.values}
    plain, *wanted = through_logits(loss_fn, hidden, weight, given["tokens"], **rest)
    for budget in (1, 7 * weight.shape[0] * 8, None):
        out, *found = gradients(loss_fn, hidden, weight, given["tokens"], max_logits_bytes=budget, **rest)
        assert torch.allclose(out.loss, plain.loss)
        assert all(
            bool(y.any()) and torch.allclose(x, y, rtol=0, atol=1e-9) for x, y in zip(found, wanted, strict=True)
        )


def test_micro_batches_with_global_counts_add_up() -> None:
    loss_fn, case = instance("grpo"), random_case(lossdsl.load("grpo"), 1)
    given = padded(case)
    hidden, weight = as_hidden(case, given)
    whole, _, wanted = gradients(loss_fn, hidden, weight, given["tokens"], **keywords(loss_fn, given))
    total, found = 0.0, torch.zeros_like(wanted)
    for at in (slice(0, 4), slice(4, None)):
        part = {k: x[at] for k, x in keywords(loss_fn, given).items()} | {"counts": {"n_seqs": len(given["mask"])}}
        out, _, d_weight = gradients(loss_fn, hidden[at], weight, given["tokens"][at], **part)
        total, found = total + float(out.loss.detach()), found + d_weight
    assert total == pytest.approx(float(whole.loss.detach())) and torch.allclose(found, wanted)


def test_f1_the_fused_path_has_the_correction_and_the_normaliser() -> None:
    """hidden (1,0), (0,1); head rows (1,0), (0,1), (0,0); prox = pi, c = 0.01 and 1; values by hand."""
    head = torch.tensor([[1.0, 0], [0, 1], [0, 0]], dtype=torch.float64)
    hidden = torch.eye(2, dtype=torch.float64)[None].requires_grad_()
    tokens = torch.tensor([[0, 1]])
    logp = (hidden.detach() @ head.T).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    c = torch.tensor([[0.01, 1.0]], dtype=torch.float64)
    spec = "inputs:\n  c_given: {axis: token, doc: the correction}\nf: min(c_given, 2)\nT: M(r, 0.8, 1.2) * r\nobjective: sg(min(c_given, 2)) * min(r * A, clip(r, 0.8, 1.2) * A)\nnormaliser: token_mean"
    fused = instance(spec).from_hidden(hidden, head, tokens, mask=torch.ones(1, 2, dtype=torch.bool), advantages=torch.ones(1),
                                       prox_logp=logp, c_given=c)  # fmt: skip
    assert float(fused.loss.detach()) == pytest.approx(-0.505)
    fused.loss.backward()
    # d loss / d hidden = head.T @ dz with dz[0, 0] = -0.00211942 and dz[1, 1] = -0.21194156; the first unit of head.T is row 0
    assert hidden.grad is not None
    assert float(hidden.grad[0, 0, 0]) == pytest.approx(-0.00211942, abs=1e-8)
    assert float(hidden.grad[0, 1, 1]) == pytest.approx(-0.21194156, abs=1e-8)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tokens = torch.randint(0, V, (B, T), generator=g)
    mask = torch.rand(B, T, generator=g) > 0.3
    mask[:, 0], mask[:, 1] = False, True
    mu = randn(B, T, V).log_softmax(-1)
    mu_logp = mu.gather(-1, tokens[..., None])[..., 0]
    return {
        "hidden": randn(B, T, H), "weight": randn(V, H), "tokens": tokens, "mask": mask, "advantages": randn(B),
        "prox_logp": mu_logp + 0.3 * randn(B, T), "mu_logp": mu_logp, "mu_logprobs": mu,
    }  # fmt: skip


def split(batch: dict[str, Any]) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    rest = {k: v for k, v in batch.items() if k not in ("hidden", "weight", "tokens", "mu_logprobs")}
    return (batch["hidden"], batch["weight"], batch["tokens"]), rest


def test_what_the_model_does_to_its_logits(batch: dict[str, Tensor]) -> None:
    """Bias, logit scale, soft cap, temperature, padded columns and the shift, against autograd through all of them."""
    (hidden, weight, tokens), rest = split(batch)
    loss_fn = instance("token_tis")
    real = V - 2
    tokens, t = tokens % real, torch.tensor([0.5, 1.0, 2.0]).double()
    bias = torch.linspace(-1, 1, V).double()

    def plain(h: Tensor, w: Tensor, b: Tensor, shift: bool) -> Tensor:
        z = 3.0 * torch.tanh(0.7 * (h @ w[:real].T + b[:real]) / 3.0)
        return loss_fn.from_logits(z, tokens, temperature=t, shift=shift, **rest).loss

    for shift in (False, True):
        for budget in (None, 2 * real * 8):
            found, wanted = ([x.clone().requires_grad_() for x in (hidden, weight, bias)] for _ in range(2))
            loss = loss_fn.from_hidden(
                found[0], found[1], tokens, bias=found[2], temperature=t, logit_scale=0.7, softcap=3.0, vocab_size=real,
                shift=shift, max_logits_bytes=budget, **rest,
            ).loss  # fmt: skip
            expected_loss = plain(*wanted, shift)
            (2.5 * loss).backward()
            (2.5 * expected_loss).backward()
            assert torch.allclose(loss, expected_loss, rtol=0, atol=1e-12)
            for x, y in zip(found, wanted, strict=True):
                assert x.grad is not None and y.grad is not None and torch.allclose(x.grad, y.grad, rtol=0, atol=1e-12)
            assert not bool(found[1].grad[real:].any())  # type: ignore[index]


def test_what_needs_no_gradient_gets_none(batch: dict[str, Tensor]) -> None:
    (hidden, weight, tokens), rest = split(batch)
    loss_fn = instance("token_tis")
    _, d_hidden, d_weight = gradients(loss_fn, hidden, weight, tokens, **rest)
    frozen, h = weight.clone(), hidden.clone().requires_grad_()
    loss_fn.from_hidden(h, frozen, tokens, **rest).loss.backward()
    assert torch.equal(h.grad, d_hidden) and frozen.grad is None  # type: ignore[arg-type]
    w = weight.clone().requires_grad_()
    loss_fn.from_hidden(hidden, w, tokens, **rest).loss.backward()
    assert torch.equal(w.grad, d_weight)  # type: ignore[arg-type]
    assert not loss_fn.from_hidden(hidden, weight, tokens, **rest).loss.requires_grad
    with torch.no_grad():
        assert not loss_fn.from_hidden(h, w, tokens, **rest).loss.requires_grad


def test_upstream_factor_two_losses_and_a_kept_graph(batch: dict[str, Tensor]) -> None:
    """Cases F1's kinds: gradients come with the forward, so whatever comes from above must still scale them."""
    (hidden, weight, tokens), rest = split(batch)
    one, two = instance("token_tis"), instance("grpo")
    _, a, _ = gradients(one, hidden, weight, tokens, **rest)
    _, b, _ = gradients(two, hidden, weight, tokens, **rest)
    h = hidden.clone().requires_grad_()
    (3 * one.from_hidden(h, weight, tokens, **rest).loss - two.from_hidden(h, weight, tokens, **rest).loss).backward()
    assert torch.allclose(h.grad, 3 * a - b, rtol=0, atol=1e-14)  # type: ignore[arg-type]
    h = hidden.clone().requires_grad_()
    loss = one.from_hidden(h, weight, tokens, **rest).loss
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    assert torch.allclose(h.grad, 3 * a, rtol=0, atol=1e-14)  # type: ignore[arg-type]


@pytest.mark.parametrize(("low", "head"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
                                           (torch.bfloat16, torch.float32), (torch.float32, torch.float64)])  # fmt: skip
def test_dtypes(low: torch.dtype, head: torch.dtype, batch: dict[str, Tensor]) -> None:
    """An equal or wider head; a loss without a clip edge (no flips), against float64 on the same rounded inputs."""
    (hidden, weight, tokens), rest = split(batch)
    del rest["prox_logp"]
    loss_fn = instance("topr")
    h, w = hidden.to(low), weight.to(head)
    out, d_hidden, d_weight = gradients(loss_fn, h, w, tokens, **rest)
    plain, x, y = through_logits(loss_fn, h.double(), w.double(), tokens, **rest)
    assert d_hidden.dtype is low and d_weight.dtype is head
    eps = 4 * torch.finfo(low if head is not torch.float64 else torch.float32).eps
    assert float(out.loss.detach()) == pytest.approx(float(plain.loss.detach()), abs=eps * 4)
    for found, wanted in ((d_hidden, x), (d_weight, y)):
        assert float((found.double() - wanted).norm() / wanted.norm()) < eps


def test_the_head_s_gradient_is_summed_in_float32() -> None:
    """512 chunks of one row: a bfloat16 sum would stall (performance study: the norm 0.2% short at 128 chunks)."""
    g = torch.Generator().manual_seed(0)
    n = 512
    hidden = (1 + 0.1 * torch.randn(1, n, 4, generator=g)).bfloat16()
    weight = (0.1 * torch.randn(8, 4, generator=g)).bfloat16()
    tokens = torch.zeros(1, n, dtype=torch.long)
    rest: dict[str, Any] = {"mask": torch.ones(1, n, dtype=torch.bool), "advantages": torch.ones(1)}
    _, _, found = gradients(instance("reinforce"), hidden, weight, tokens, max_logits_bytes=16, **rest)
    _, _, wanted = through_logits(instance("reinforce"), hidden.double(), weight.double(), tokens, **rest)
    assert float((found.double() - wanted).norm() / wanted.norm()) < 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "gspo", "seq_mis", "score_centering"])
def test_accuracy_at_the_performance_study_s_size(name: str) -> None:
    """4096 tokens, V 4096, H 256 against float64 on the same inputs: 7e-7 in float32, 2e-3 to 3e-3 in bfloat16 (section 6).

    Every ratio stays away from every bound, so that both sides of the comparison have one mask: where rounding moves a
    token across an edge its whole gradient comes or goes, in any implementation.
    """
    g = torch.Generator().manual_seed(0)
    answers, width, vocab, size = 16, 256, 4096, 256
    low_h = torch.randn(answers, width, size, generator=g).bfloat16()
    low_w = (0.05 * torch.randn(vocab, size, generator=g)).bfloat16()
    tokens = torch.randint(0, vocab, (answers, width), generator=g)
    logp = (low_h.double() @ low_w.double().T).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    far = torch.tensor([0.0, 0.1, -0.1, 0.7, -0.7]).double()  # log r: inside, and well outside [0.8, 1.28]
    log_r = far[torch.randint(0, 5, (answers, width) if name == "dapo" else (answers, 1), generator=g)]
    rest: dict[str, Any] = {
        "mask": torch.rand(answers, width, generator=g) > 0.2,
        "advantages": torch.randn(answers, generator=g).double(),
    }
    loss_fn = instance(name, **({"eps_low": 0.2, "eps_high": 0.28} if name == "gspo" else {}))
    prox = (logp - log_r).float().double()  # what is given is the same for both: float32 numbers
    rest |= {"prox_logp": prox, "mu_logp": (prox - 0.001).float().double()}
    if name == "score_centering":
        top = (low_h.double() @ low_w.double().T).log_softmax(-1).topk(64, -1)
        rest |= {"mu_topk_ids": top.indices, "mu_topk_logprobs": top.values - 0.05}
    rest = {k: v for k, v in rest.items() if k in (*loss_fn.needs, "mask", "mu_topk_ids", "mu_topk_logprobs")}
    _, d_hidden, d_weight = through_logits(loss_fn, low_h.double(), low_w.double(), tokens, **rest)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        _, *found = gradients(
            loss_fn, low_h.to(dtype), low_w.to(dtype), tokens, max_logits_bytes=512 * vocab * 4, **rest
        )
        for x, y in zip(found, (d_hidden, d_weight), strict=True):
            assert float((x.double() - y).norm() / y.norm()) < bound


@pytest.mark.parametrize("loss", [Clip, Geometric, Centred, Band])
def test_methods_by_hand(loss: Any, batch: dict[str, Tensor]) -> None:
    """A class that says nothing of what its weights wait for is taken to wait for the whole batch: two passes."""
    loss_fn = loss(compile=False)
    (hidden, weight, tokens), rest = split(batch | {"ref_logp": batch["mu_logp"]})
    rest |= {"mu_logprobs": batch["mu_logprobs"]} if "mu_logprobs" in loss_fn.needs else {}
    plain, x, y = through_logits(loss_fn, hidden, weight, tokens, **rest)
    out, d_hidden, d_weight = gradients(loss_fn, hidden, weight, tokens, max_logits_bytes=2 * V * 8, **rest)
    assert torch.allclose(out.loss, plain.loss, rtol=0, atol=1e-12)
    assert torch.allclose(d_hidden, x, rtol=0, atol=1e-12) and torch.allclose(d_weight, y, rtol=0, atol=1e-12)


def test_masked_slots_may_hold_anything(batch: dict[str, Tensor]) -> None:
    (hidden, weight, tokens), rest = split(batch)
    loss_fn, mask = instance("seq_tis"), rest["mask"]
    out, x, y = gradients(loss_fn, hidden, weight, tokens, **rest)
    for fill in (NAN, math.inf):
        dirty = {k: torch.where(mask, v, fill) if k.endswith("_logp") else v for k, v in rest.items()}
        again, p, q = gradients(loss_fn, torch.where(mask[..., None], hidden, fill), weight,
                                torch.where(mask, tokens, -100), **dirty)  # fmt: skip
        assert torch.equal(out.loss, again.loss) and torch.equal(x, p) and torch.equal(y, q)


@pytest.mark.parametrize("name", ["grpo", "gspo", "score_centering"])
def test_no_live_row_is_no_loss_and_a_gradient_of_zeros(name: str, batch: dict[str, Tensor]) -> None:
    (hidden, weight, tokens), rest = split(batch)
    loss_fn = instance(name)
    rest |= {"mu_logprobs": batch["mu_logprobs"]} if "mu_logprobs" in loss_fn.needs else {}
    out, x, y = gradients(loss_fn, hidden, weight, tokens, **rest | {"mask": torch.zeros(B, T, dtype=torch.bool)})
    assert float(out.loss.detach()) == 0 and not bool(x.any()) and not bool(y.any())


def test_what_the_entry_refuses(batch: dict[str, Tensor]) -> None:
    (hidden, weight, tokens), rest = split(batch)
    bad_hidden, bad_weight = hidden.clone(), weight.clone()
    bad_hidden[0, 1, 2], bad_weight[3, 0] = NAN, math.inf
    refused: list[tuple[tuple[Any, Any, Any], dict[str, Any], type[Exception], str]] = [
        ((hidden[:, 1:], weight, tokens), {}, ValueError, r"hidden \(3, 4, 4\).*\(3, 5\)"),
        ((hidden, weight[:, 1:], tokens), {}, ValueError, r"lm_head_weight \(7, 3\).*4"),
        ((hidden, weight, tokens), {"bias": torch.zeros(6).double()}, ValueError, r"bias \(6,\).*\(7,\)"),
        ((hidden, weight.float(), tokens), {}, ValueError, "wider"),
        ((hidden, weight, tokens), {"bias": torch.zeros(7)}, ValueError, "wider"),
        ((hidden, weight, tokens + V), {}, ValueError, "vocabulary of 7"),
        ((hidden, weight, tokens), {"vocab_size": 8}, ValueError, "vocab_size=8"),
        ((hidden, weight, tokens), {"vocab_size": 1}, ValueError, "vocabulary of 1"),
        ((hidden, weight, tokens), {"softcap": 0.0}, ValueError, "softcap"),
        ((hidden, weight, tokens), {"logit_scale": 0.0}, ValueError, "logit_scale"),
        ((hidden, weight, tokens), {"temperature": 0.0}, ValueError, "temperature"),
        ((hidden, weight, tokens), {"max_logits_bytes": 0}, ValueError, "max_logits_bytes"),
        ((bad_hidden, weight, tokens), {}, ValueError, "hidden is NaN or infinite at 1 live token"),
        ((hidden, bad_weight, tokens), {}, ValueError, "lm_head_weight is NaN or infinite"),
        ((hidden, weight, tokens), {"max_logit_bytes": 5}, TypeError, "max_logit_bytes"),
    ]  # fmt: skip
    loss_fn = instance("token_tis")
    for args, changes, kind, message in refused:
        with pytest.raises(kind, match=message):
            loss_fn.from_hidden(*args, **rest | changes)


def test_what_is_kept_for_backward_does_not_grow_with_tokens_times_vocabulary(batch: dict[str, Tensor]) -> None:
    """Case F2: the gradients of hidden states and head, and nothing else."""

    def saved(width: int, vocab: int) -> int:
        h, w = torch.randn(1, width, H).requires_grad_(), torch.randn(vocab, H).requires_grad_()
        lp = torch.full((1, width), -3.0)
        given = {
            "mask": torch.ones(1, width, dtype=torch.bool),
            "advantages": torch.ones(1),
            "prox_logp": lp,
            "mu_logp": lp,
        }
        total = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal total
            total += x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = instance("token_tis").from_hidden(h, w, torch.zeros(1, width, dtype=torch.long), **given).loss
        loss.backward()
        return total

    for width, vocab in ((256, 512), (512, 512), (256, 4096)):
        assert saved(width, vocab) == 4 * H * (width + vocab)
