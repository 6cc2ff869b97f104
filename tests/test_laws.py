"""What must hold for every method, whatever it is: held for all built-ins, on random ragged batches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from helpers import instance
from layouts import CHOSEN, call, expected, on_policy, packed, padded, place, random_case, reads_logits

import lossdsl
from lossdsl.reference import per_token

NAMES = lossdsl.builtins()
SEEDS = (0, 1, 2)
TIGHT = 1e-10


@cache
def method(name: str) -> lossdsl.Method:
    return lossdsl.load(name)


def loss_of(name: str, **options: object) -> object:
    return instance(name, **CHOSEN.get(name, {}), **options)


def entries(loss_fn: object) -> tuple[bool, ...]:
    """The entries to try: logits always; log-probs where the loss can be had from them."""
    return (True,) if reads_logits(loss_fn) else (False, True)


def close(a: object, b: object, tolerance: float = TIGHT) -> bool:
    return bool(np.allclose(np.asarray(a, dtype=float), np.asarray(b, dtype=float), rtol=tolerance, atol=tolerance))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_the_generated_module_is_the_reference(name: str, seed: int) -> None:
    """Loss and gradient, padded and packed, from log-probs and from logits, to 1e-10 in float64."""
    loss_fn = loss_of(name)
    case = random_case(method(name), seed, spread=(0.1, 0.5, 1.5)[seed])
    loss, d_logp, d_logits = expected(case)
    _, rows, columns = place(case)
    for logits in entries(loss_fn):
        wanted = d_logits if logits else d_logp
        found, gradient, metrics = call(loss_fn, padded(case), logits)
        assert close(found, loss) and close(gradient[rows, columns], wanted)
        assert all(math.isfinite(x) for x in loss_fn.summary(metrics).values())  # type: ignore[attr-defined]
        given = packed(case)
        found, gradient, _ = call(loss_fn, given, logits)
        assert close(found, loss) and close(gradient[given["keep"]], wanted)
        assert float(gradient.abs().sum()) == pytest.approx(np.abs(wanted).sum(), abs=1e-9)  # dead slots get nothing


PURE = [name for name in NAMES if not lossdsl.load(name).terms]


@pytest.mark.parametrize("name", PURE)
def test_the_gradient_is_the_master_equation(name: str) -> None:
    """dJ/dz = lambda A (W (e_y - pi) - kappa sum_v mu(v) W_v (e_v - pi)), for every method without further terms."""
    m = method(name)
    assert m.W is not None
    case = random_case(m, 5)
    b, p = case.batch, case.params
    scale = per_token(m.normaliser, b, p) * per_token(lossdsl.method.advantage_of(m), b, p)
    pi, W = np.exp(b.logp_v["pi"]), per_token(m.W, b, p)
    score = np.eye(pi.shape[1])[None] - pi[:, None, :]  # s_v in logit space: [N, v, V]
    total = W[:, None] * score[np.arange(len(W)), case.tokens]
    if m.kappa.attr == 1:
        weight = lossdsl.reference.evaluate(lossdsl.method.centre_weight(m), b, p)
        total = total - np.einsum("nv,nvz->nz", np.broadcast_to(weight, pi.shape), score)
    _, gradient, _ = call(loss_of(name), padded(case), True)
    _, rows, columns = place(case)
    assert close(gradient[rows, columns], -scale[:, None] * total)


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, -1e10, 1000.0])
@pytest.mark.parametrize("name", NAMES)
def test_padding_never_matters(name: str, fill: float) -> None:
    """Neither what stands in masked slots nor how many there are."""
    loss_fn = loss_of(name)
    case = random_case(method(name), 1)
    _, rows, columns = place(case)
    for logits in entries(loss_fn):
        loss, gradient, metrics = call(loss_fn, padded(case), logits)
        other, wide, more = call(loss_fn, padded(case, width=11, fill=fill), logits)
        assert close(other, loss, 1e-13) and close(wide[rows, columns], gradient[rows, columns], 1e-13)
        assert float(wide.abs().sum()) == pytest.approx(float(gradient.abs().sum()))  # exactly 0 in every masked slot
        one, two = loss_fn.summary(metrics), loss_fn.summary(more)  # type: ignore[attr-defined]
        assert one.keys() == two.keys() and close(list(one.values()), list(two.values()), 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_answers_never_matters(name: str) -> None:
    loss_fn = loss_of(name)
    case = random_case(method(name), 2)
    given = padded(case)
    order = torch.randperm(given["mask"].shape[0], generator=torch.Generator().manual_seed(0))
    moved = {k: v[order] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in given.items()}
    for logits in entries(loss_fn):
        loss, gradient, _ = call(loss_fn, given, logits)
        other, permuted, _ = call(loss_fn, moved, logits)
        assert close(other, loss, 1e-12) and close(permuted, gradient[order], 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_with_global_counts_add_up(name: str) -> None:
    """Splitting between groups and passing the whole batch's counts changes neither loss nor gradient nor metrics."""
    loss_fn = loss_of(name)
    case = random_case(method(name), 0)
    given, b = padded(case), case.batch
    counts = {k: float(b.count(k)) for k in ("n_tokens", "n_seqs", "n_groups")}
    for logits in entries(loss_fn):
        loss, gradient, metrics = call(loss_fn, given, logits)
        parts = []
        for rows in (slice(0, 3), slice(3, 9)):
            part = {k: v[rows] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in given.items()}
            part["groups"] = part["groups"] - part["groups"].min()
            parts.append(call(loss_fn, part | {"counts": counts}, logits))
        assert close(sum(p[0] for p in parts), loss) and close(torch.cat([p[1] for p in parts]), gradient)
        merged = loss_fn.summary(loss_fn.merge([p[2] for p in parts]))  # type: ignore[attr-defined]
        whole = loss_fn.summary(metrics)  # type: ignore[attr-defined]
        assert merged.keys() == whole.keys() and close(list(merged.values()), list(whole.values()))


# A penalty whose gradient does not vanish on policy is switched off for the law below.
SILENCED = {"grpo_entropy": {"entropy_coef": 0.0}, "grpo_k1": {"beta": 0.0}}


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_method_is_reinforce(name: str) -> None:
    """With pi = prox = mu = ref the gradient with respect to the logits is -lambda * A * (e_y - pi)."""
    loss_fn = instance(name, **CHOSEN.get(name, {}) | SILENCED.get(name, {}))
    case = on_policy(random_case(method(name), 3))
    m, b, p = case.method, case.batch, case.params
    scale = per_token(m.normaliser, b, p) * per_token(lossdsl.method.advantage_of(m), b, p)
    score = np.eye(b.logp_v["pi"].shape[1])[case.tokens] - np.exp(b.logp_v["pi"])
    _, gradient, _ = call(loss_fn, padded(case), True)
    _, rows, columns = place(case)
    assert close(gradient[rows, columns], -scale[:, None] * score)


@pytest.mark.parametrize("name", NAMES)
def test_finite_inputs_give_finite_outputs(name: str) -> None:
    """Log-probs anywhere in [-1000, 0], long and short answers, float32: never NaN, never infinite."""
    loss_fn = loss_of(name)
    case = random_case(method(name), 4)
    rng = np.random.default_rng(8)
    wild = {
        p: np.minimum(x * rng.choice([1e-3, 1.0, 100.0], size=(len(x), 1)), 0.0) for p, x in case.batch.logp_v.items()
    }
    n = np.arange(len(case.tokens))
    case = replace(case, batch=replace(case.batch, logp_v=wild, logp={p: x[n, case.tokens] for p, x in wild.items()}))
    for logits in entries(loss_fn):
        for layout in (padded, packed):
            loss, gradient, metrics = call(loss_fn, layout(case, dtype=torch.float32), logits)
            assert math.isfinite(loss) and bool(torch.isfinite(gradient).all())
            assert all(math.isfinite(x) for x in loss_fn.summary(metrics).values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (3, 0), (3, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_live_gives_zero_with_gradients(name: str, rows: int, width: int) -> None:
    loss_fn = loss_of(name)
    case = random_case(method(name), 0)
    shape = {"mask": (rows, width), "tokens": (rows, width)}
    given = {}
    for k, v in padded(case).items():
        size = shape.get(k, (rows, width, *v.shape[2:]) if v.dim() > 1 else (rows,))
        given[k] = torch.zeros(size, dtype=v.dtype)
    for logits in entries(loss_fn):
        loss, gradient, metrics = call(loss_fn, given, logits)
        assert loss == 0.0 and not bool(gradient.any())
        assert all(math.isfinite(x) for x in loss_fn.summary(metrics).values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_taken_and_given_back(name: str, dtype: torch.dtype) -> None:
    loss_fn = loss_of(name)
    case = random_case(method(name), 0, spread=0.1)
    for logits in entries(loss_fn):
        loss, gradient, _ = call(loss_fn, padded(case, dtype=dtype), logits)
        assert gradient.dtype is dtype and math.isfinite(loss)


@pytest.mark.parametrize("name", NAMES)
def test_an_upstream_factor_is_honoured(name: str) -> None:
    loss_fn = loss_of(name)
    case = random_case(method(name), 0)
    given = padded(case)
    for logits in entries(loss_fn):
        x = given["pi_logprobs" if logits else "logp"].clone().requires_grad_()
        rest = {k: given[k] for k in given if k in loss_fn.needs or k in ("mask", "tokens" if logits else "entropy")}  # type: ignore[attr-defined]
        out = loss_fn.from_logits(x, **rest) if logits else loss_fn(x, **rest)  # type: ignore[operator]
        (out.loss * 3 + out.loss).backward()
        assert x.grad is not None
        assert close(x.grad, 4 * call(loss_fn, given, logits)[1])


COMPILED = [n for n in NAMES if n in ("token_tis", "seq_mis", "trm_max", "tis_sc", "grpo_entropy", "aspo")]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in COMPILED else pytest.mark.slow) for n in NAMES])
def test_compiled_is_eager_is_the_reference(name: str) -> None:
    """torch.compile(fullgraph=True): no graph break, the same numbers to 1e-10, padded (with metrics) and packed."""
    loss_fn = lossdsl.compile(name, **CHOSEN.get(name, {}))
    case = random_case(method(name), 1)
    loss, d_logp, d_logits = expected(case)
    logits = reads_logits(loss_fn)
    wanted = d_logits if logits else d_logp
    _, rows, columns = place(case)
    found, gradient, metrics = call(loss_fn, padded(case), logits)
    assert close(found, loss) and close(gradient[rows, columns], wanted)
    eager = loss_of(name)
    assert close(
        list(loss_fn.summary(metrics).values()), list(eager.summary(call(eager, padded(case), logits)[2]).values())
    )  # type: ignore[attr-defined]
    loss_fn.metrics = False
    given = packed(case)
    found, gradient, metrics = call(loss_fn, given, logits)
    assert close(found, loss) and close(gradient[given["keep"]], wanted) and metrics == {}
