"""The hidden-state entry is the logits entry of hidden @ head.T: same loss, metrics and gradients, whatever the chunks.

The logits entry is held against the float64 reference elsewhere; field cases F1 and F2 and the real rollouts are here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import DATA, instance
from layouts import packed, padded, random_case
from safetensors.torch import load_file
from test_diff import METHODS
from torch import Tensor

import lossdsl

V, H = 6, 5
BUDGETS = (1, 8 * V * 7, 1 << 20)  # one row a chunk, seven, all: answers of up to six tokens fit the second alone


def inputs(name: str, layout: str, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], dict[str, float]]:
    """(keyword arguments with hidden, lm_head_weight, bias and tokens; parameters) of a random ragged batch."""
    case = random_case(METHODS[name], 1)
    given = (padded if layout == "padded" else packed)(case, dtype=dtype)
    for key in ("keep", "pi_logprobs", "entropy", "logp"):
        given.pop(key, None)
    g = torch.Generator().manual_seed(3)
    shape = given["tokens"].shape
    given["hidden"] = torch.randn(*shape, H, generator=g, dtype=dtype)
    given["lm_head_weight"] = torch.randn(V, H, generator=g, dtype=dtype)
    given["bias"] = torch.randn(V, generator=g, dtype=dtype) / 10
    return given, case.params


def run(
    loss_fn: Any, entry: str, given: dict[str, Any], upstream: float = 1.0, **options: Any
) -> tuple[Any, list[Tensor]]:
    """(output, gradients to hidden, head and bias)."""
    rest = dict(given)
    x, w, b = (rest.pop(k).detach().clone().requires_grad_() for k in ("hidden", "lm_head_weight", "bias"))
    tokens = rest.pop("tokens")
    if loss_fn.LOCAL_STATISTICS:
        rest.pop("counts", None)
    if entry == "hidden":
        out = loss_fn.from_hidden(x, w, tokens, bias=b, **rest, **options)
    else:
        out = loss_fn.from_logits(x @ w.T + b, tokens, **rest)
    (upstream * out.loss).backward()
    return out, [x.grad, w.grad, b.grad]


def same(loss_fn: Any, given: dict[str, Any], tolerance: float = 1e-9, **options: Any) -> None:
    plain, wanted = run(loss_fn, "logits", given, 2.5)
    fused, found = run(loss_fn, "hidden", given, 2.5, **options)
    assert float(fused.loss.detach()) == pytest.approx(float(plain.loss.detach()), rel=tolerance, abs=tolerance)
    for x, y in zip(found, wanted, strict=True):
        assert float((x - y).abs().max()) <= tolerance * (1 + float(y.abs().max()))
    a, b = (loss_fn.summary(o.metrics) for o in (plain, fused))
    assert a == pytest.approx(b, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_in_every_layout_and_chunk(name: str) -> None:
    for layout in ("padded", "packed"):
        given, params = inputs(name, layout)
        for metrics in (True, False):
            loss_fn = lossdsl.compile(name, compile=False, metrics=metrics, **params)
            for budget in BUDGETS:
                same(loss_fn, given | {"temperature": 1.3}, max_logits_bytes=budget)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "gspo", "seq_tis", "trm_max", "tis_sc", "grpo_entropy", "grpo_k3", "topr"])
def test_compiled_it_is_the_same(name: str) -> None:
    given, params = inputs(name, "padded")
    loss_fn = lossdsl.compile(name, **params)
    for budget in BUDGETS[1:]:
        same(loss_fn, given, max_logits_bytes=budget)


@pytest.mark.parametrize("name", ["score_centering", "tis_sc", "mis_sc"])
def test_a_top_k_distribution(name: str) -> None:
    given, params = inputs(name, "padded")
    top = given.pop("mu_logprobs").topk(3, -1)
    given |= {"mu_topk_ids": top.indices, "mu_topk_logprobs": top.values}
    for budget in BUDGETS:
        same(lossdsl.compile(name, compile=False, **params), given, max_logits_bytes=budget)


@pytest.mark.parametrize("name", ["dapo", "gspo", "tis_sc"])
def test_the_real_rollouts(name: str) -> None:
    """The stored log-probs are those of the stored hidden states, so the plain entry from log-probs is a third path."""
    d = {k: x.double() if x.is_floating_point() else x for k, x in load_file(DATA / "rollouts.safetensors").items()}
    given = {k: d[k] for k in ("prox_logp", "mu_logp", "mu_logprobs")}
    given |= {"mask": d["mask"].bool(), "advantages": d["advantage"], "groups": d["group"], "tokens": d["tokens"]}
    given |= {"hidden": d["hidden"], "lm_head_weight": d["lm_head"], "bias": torch.zeros(32, dtype=torch.float64)}
    loss_fn = lossdsl.compile(name, compile=False)
    for budget in (32 * 8 * 40, 1 << 24):
        same(loss_fn, given, max_logits_bytes=budget)
    if name != "tis_sc":
        plain = loss_fn(
            d["logp"], mask=given["mask"], advantages=d["advantage"], prox_logp=d["prox_logp"], groups=d["group"]
        )
        fused = run(loss_fn, "hidden", given)[0]
        assert float(fused.loss.detach()) == pytest.approx(float(plain.loss.detach()), abs=1e-5)


# --- field cases ------------------------------------------------------------------------------------------------------------


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


def saved_bytes(T: int, vocab: int) -> int:
    """Bytes that autograd keeps for backward."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, T, 8, generator=g).requires_grad_()
    head = torch.randn(vocab, 8, generator=g).requires_grad_()
    tokens = torch.randint(0, vocab, (1, T), generator=g)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        instance("dapo").from_hidden(hidden, head, tokens, mask=torch.ones(1, T, dtype=torch.bool), advantages=torch.ones(1),
                                     prox_logp=torch.full((1, T), -5.0), max_logits_bytes=64 * vocab * 4)  # fmt: skip
    return sum(kept.values())


def test_f2_what_is_kept_for_backward_does_not_grow_with_tokens_times_vocabulary() -> None:
    """It is one gradient of the hidden states and one of the head."""
    short, long = saved_bytes(256, 4096), saved_bytes(512, 4096)
    assert long - short <= 256 * (8 + 4) * 4
    assert long <= 2 * (512 * 8 + 4096 * 8) * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f3_the_inputs_type_and_float32_inside(dtype: torch.dtype) -> None:
    """Without a clip edge to flip, a narrow type is as exact as its rounding of the logits."""
    given, params = inputs("score_centering", "padded")
    narrow = {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in given.items()}
    loss_fn = lossdsl.compile("score_centering", compile=False, **params)
    _, wanted = run(
        loss_fn,
        "logits",
        {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in narrow.items()},
    )
    _, found = run(loss_fn, "hidden", narrow, max_logits_bytes=8 * V)
    limit = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5}[dtype]
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype is dtype
        assert float((x.double() - y).norm()) <= limit * float(y.norm())


# --- what is multiplied --------------------------------------------------------------------------------------------------------


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """The rows of every product with the head: [rows, H] x [H, V] and back."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.forward, self.backward = vocab, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and isinstance(out, Tensor):
            if out.shape[1] == self.vocab:
                self.forward += out.shape[0]
            elif out.shape[0] != self.vocab:
                self.backward += out.shape[0]
        return out


def count(name: str, metrics: bool = False, frozen: bool = False, **changes: Any) -> Products:
    B, T, vocab = 4, 6, 11
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, T, 3, generator=g).requires_grad_()
    head = torch.randn(vocab, 3, generator=g).requires_grad_(not frozen)
    tokens = torch.randint(0, vocab, (B, T), generator=g)
    logp = (hidden @ head.T).log_softmax(-1).gather(-1, tokens[..., None])[..., 0].detach()
    given = {
        "mask": torch.ones(B, T, dtype=torch.bool),
        "advantages": torch.ones(B),
        "prox_logp": logp,
        "mu_logp": logp,
        "ref_logp": logp - 0.3,
    }
    with Products(vocab) as seen:
        out = instance(name, metrics=metrics).from_hidden(hidden, head, tokens, **given | changes)
        out.loss.backward()
    assert (head.grad is None) == frozen
    return seen


@pytest.mark.parametrize(
    ("name", "metrics", "forward"),
    [("dapo", False, 12), ("dapo", True, 24), ("gspo", False, 12), ("grpo_k3", False, 24)],
)
def test_answers_without_an_advantage_leave_before_the_first_product(name: str, metrics: bool, forward: int) -> None:
    """Two of four answers have A = 0. Metrics want their rows in the forward; a penalty without A wants them wholly."""
    seen = count(name, metrics, advantages=torch.tensor([1.0, 0.0, -1.0, 0.0]))
    assert seen.forward == forward
    assert seen.backward == (24 if name == "grpo_k3" else 12)


def test_masked_rows_are_not_multiplied() -> None:
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[:, :2] = True
    seen = count("dapo", True, mask=mask)
    assert (seen.forward, seen.backward) == (8, 8)


def test_rows_that_are_clipped_skip_the_products_back() -> None:
    """A > 0 and r = 2 for three answers of four: masked."""
    seen_logp = count("dapo").forward
    assert seen_logp == 24
    B, T = 4, 6
    g = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(B, T, 3, generator=g), torch.randn(11, 3, generator=g)
    tokens = torch.randint(0, 11, (B, T), generator=g)
    logp = (hidden @ head.T).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    prox = logp.clone()
    prox[:3] -= math.log(2)
    seen = count("dapo", prox_logp=prox)
    assert (seen.forward, seen.backward) == (24, 6)


def test_a_frozen_head_costs_nothing() -> None:
    assert count("dapo", frozen=True).backward == 24


def test_without_gradients_there_is_only_the_forward() -> None:
    given, params = inputs("grpo", "padded")
    loss_fn = lossdsl.compile("grpo", compile=False, **params)
    hidden, head, tokens, _ = (given.pop(k) for k in ("hidden", "lm_head_weight", "tokens", "bias"))
    with Products(V) as seen:
        out = loss_fn.from_hidden(hidden, head, tokens, **given)
    assert not out.loss.requires_grad and seen.backward == 0 and seen.forward == int(given["mask"].sum())


# --- options and mistakes ------------------------------------------------------------------------------------------------------


def test_soft_capped_logits_are_autograd_s() -> None:
    given, params = inputs("dapo", "padded")
    loss_fn = lossdsl.compile("dapo", compile=False, **params)
    rest = {k: v for k, v in given.items() if k not in ("hidden", "lm_head_weight", "bias", "tokens")}
    x, w = (given[k].clone().requires_grad_() for k in ("hidden", "lm_head_weight"))
    loss_fn.from_logits(2.0 * torch.tanh(x @ w.T / 2.0), given["tokens"], temperature=0.7, **rest).loss.backward()
    y, u = (given[k].clone().requires_grad_() for k in ("hidden", "lm_head_weight"))
    loss_fn.from_hidden(
        y, u, given["tokens"], temperature=0.7, softcap=2.0, max_logits_bytes=8 * V * 4, **rest
    ).loss.backward()
    assert torch.allclose(x.grad, y.grad, atol=1e-12) and torch.allclose(w.grad, u.grad, atol=1e-12)  # type: ignore[arg-type]


def test_shifted_hidden_states() -> None:
    given, params = inputs("dapo", "padded")
    given["mask"] = given["mask"].clone()
    given["mask"][:, 0] = False
    loss_fn = lossdsl.compile("dapo", compile=False, **params)
    same_shift = {k: v for k, v in given.items() if k not in ("hidden", "lm_head_weight", "bias", "tokens")}
    x, w, b = (given[k].clone().requires_grad_() for k in ("hidden", "lm_head_weight", "bias"))
    loss_fn.from_logits(x @ w.T + b, given["tokens"], shift=True, **same_shift).loss.backward()
    y, u, c = (given[k].clone().requires_grad_() for k in ("hidden", "lm_head_weight", "bias"))
    loss_fn.from_hidden(y, u, given["tokens"], bias=c, shift=True, max_logits_bytes=100, **same_shift).loss.backward()
    for p, q in ((x, y), (w, u), (b, c)):
        assert torch.allclose(p.grad, q.grad, atol=1e-12)  # type: ignore[arg-type]


def test_micro_batches_with_global_counts_add_up() -> None:
    given, params = inputs("grpo", "padded")
    loss_fn = lossdsl.compile("grpo", compile=False, **params)
    whole, wanted = run(loss_fn, "hidden", given)
    counts = {"n_seqs": given["mask"].shape[0]}
    total, found = 0.0, torch.zeros_like(wanted[1])
    for at in (slice(0, 4), slice(4, 9)):
        part = {k: x if k in ("lm_head_weight", "bias") else x[at] for k, x in given.items()}
        out, grads = run(loss_fn, "hidden", part | {"counts": counts})
        total, found = total + float(out.loss.detach()), found + grads[1]
    assert total == pytest.approx(float(whole.loss.detach())) and torch.allclose(found, wanted[1])


def test_two_losses_of_one_head_add_up() -> None:
    """Each scales its own gradient; a graph that is kept can be walked twice."""
    given, _ = inputs("grpo", "padded")
    hidden, head, tokens, _ = (given.pop(k) for k in ("hidden", "lm_head_weight", "tokens", "bias"))
    head = head.clone().requires_grad_()
    outs = [
        lossdsl.compile(n, compile=False).from_hidden(hidden, head, tokens, **given).loss for n in ("grpo", "cispo")
    ]
    one, other = (torch.autograd.grad(x, head, retain_graph=True)[0] for x in outs)
    both = torch.autograd.grad(outs[0] + 3 * outs[1], head)[0]
    assert torch.allclose(both, one + 3 * other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head_weight": torch.zeros(V, H + 1, dtype=torch.float64)}, "as hidden"),
        ({"hidden": torch.zeros(2, 3, H, dtype=torch.float64)}, "must be tokens' shape"),
        ({"bias": torch.zeros(V + 1, dtype=torch.float64)}, "as lm_head_weight has rows"),
        ({"tokens": None}, "outside the vocabulary"),
        ({"hidden": None}, "NaN or infinite"),
        ({"softcap": 0.0}, "softcap=0.0 must be positive"),
        ({"temperature": 0.0}, "temperature must be positive"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    given, params = inputs("grpo", "padded")
    if change.get("tokens", 0) is None:
        change = {"tokens": torch.full_like(given["tokens"], V)}
    if change.get("hidden", 0) is None:
        change = {"hidden": torch.full_like(given["hidden"], math.nan)}
    with pytest.raises(ValueError, match=message):
        run(lossdsl.compile("grpo", compile=False, **params), "hidden", given | change)


def test_an_empty_batch_gives_zero_with_gradients() -> None:
    given, params = inputs("gspo", "padded")
    given["mask"] = torch.zeros_like(given["mask"])
    out, grads = run(lossdsl.compile("gspo", compile=False, **params), "hidden", given)
    assert float(out.loss.detach()) == 0.0 and all(g is not None and not g.any() for g in grads)
