"""Derivatives of random expressions against central differences of their values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lossdsl import ir
from lossdsl.autodiff import NotDifferentiable, differentiate
from lossdsl.axes import Axis
from lossdsl.reference import Batch, evaluate, logits_gradient, per_token

A = ir.value("A", Axis.SEQUENCE)
PI, PROX, MU = (ir.exp(ir.logp(p)) for p in ("pi", "prox", "mu"))
R, C, RHO = (ir.exp(ir.logratio(x)) for x in ("r", "c", "rho"))


def batch(seed: int, vocab: int = 5) -> tuple[Batch, np.ndarray, np.ndarray]:
    """Ragged answers with full distributions; returns the batch, the sampled tokens and pi's logits."""
    rng = np.random.default_rng(seed)
    seq = np.array([0, 0, 0, 1, 2, 2])
    tokens = rng.integers(0, vocab, len(seq))
    z = {p: rng.normal(size=(len(seq), vocab)) for p in ("pi", "prox", "mu", "ref")}
    logp_v = {p: x - np.log(np.exp(x).sum(-1, keepdims=True)) for p, x in z.items()}
    logp = {p: x[np.arange(len(seq)), tokens] for p, x in logp_v.items()}
    values = {"A": np.array([1.0, -0.7, 0.4])}
    return (
        Batch(seq=seq, n_seqs=4, logp=logp, logp_v=logp_v, values=values | {"A": np.array([1.0, -0.7, 0.4, 2.0])}),
        tokens,
        z["pi"],
    )


def with_logits(b: Batch, tokens: np.ndarray, z: np.ndarray) -> Batch:
    logp_v = dict(b.logp_v) | {"pi": z - np.log(np.exp(z).sum(-1, keepdims=True))}
    logp = dict(b.logp) | {"pi": logp_v["pi"][np.arange(len(tokens)), tokens]}
    return Batch(seq=b.seq, n_seqs=b.n_seqs, group=b.group, logp=logp, logp_v=logp_v, values=b.values)


def check(weight: ir.Node, objective: ir.Node, seed: int = 0, tolerance: float = 2e-6) -> None:
    """The closed-form gradient with respect to the logits equals central differences of J."""
    b, tokens, z = batch(seed)
    gradient = differentiate(((weight, objective),))
    exact = logits_gradient(gradient, tokens, b, {})

    def total(logits: np.ndarray) -> float:
        here = with_logits(b, tokens, logits)
        return float((per_token(weight, here, {}) * per_token(objective, here, {})).sum())

    numeric, h = np.zeros_like(z), 1e-5
    for index in np.ndindex(z.shape):
        up, down = z.copy(), z.copy()
        up[index] += h
        down[index] -= h
        numeric[index] = (total(up) - total(down)) / (2 * h)
    assert np.abs(exact - numeric).max() < tolerance * (1 + np.abs(numeric).max())


mean_r = ir.exp(ir.reduce("mean", "t", ir.logratio("r")))
SUM_V = ir.reduce("sum", "v", ir.neg(ir.mul(ir.exp(ir.logp("pi", Axis.VOCAB)), ir.logp("pi", Axis.VOCAB))))
KL = ir.reduce(
    "sum", "v", ir.mul(ir.exp(ir.logp("mu", Axis.VOCAB)), ir.sub(ir.logp("mu", Axis.VOCAB), ir.logp("pi", Axis.VOCAB)))
)
PER_SEQUENCE = ir.div(ir.ONE, ir.mul(ir.value("n_seqs", Axis.BATCH), ir.value("len", Axis.SEQUENCE)))


@pytest.mark.parametrize(
    "objective",
    [
        ir.mul(R, A),
        ir.minimum(ir.mul(R, A), ir.mul(ir.clip(R, ir.const(1), ir.const(2)), A)),
        ir.mul(mean_r, A),
        ir.mul(ir.exp(ir.reduce("sum", "t", ir.logratio("rho"))), A),
        ir.mul(ir.reduce("max", "t", R), A),
        ir.mul(ir.unary("sigmoid", ir.sub(R, ir.ONE)), A),
        ir.mul(ir.unary("tanh", R), ir.unary("abs", ir.sub(R, C))),
        ir.div(R, ir.add(R, ir.ONE)),
        ir.power(ir.logratio("r"), ir.const(2)),
        ir.mul(SUM_V, A),
        ir.sub(ir.mul(R, A), ir.mul(ir.const(2), KL)),
        ir.reduce("mean", "t", ir.mul(RHO, ir.unary("sqrt", R))),
        ir.log(ir.add(ir.ONE, R)),
    ],
    ids=lambda n: ir.dump(n).splitlines()[0],
)  # fmt: skip
@pytest.mark.parametrize("weight", [ir.ONE, PER_SEQUENCE], ids=["sum", "seq_mean"])
def test_gradient_is_the_derivative_of_the_value(objective: ir.Node, weight: ir.Node) -> None:
    check(weight, objective)


LEAVES = st.sampled_from([A, R, C, RHO, PI, MU, ir.logratio("r"), ir.const(2), ir.ONE, mean_r, SUM_V])


def grow(children: st.SearchStrategy[ir.Node]) -> st.SearchStrategy[ir.Node]:
    two = st.tuples(children, children)
    return st.one_of(
        two.map(lambda p: ir.add(*p)), two.map(lambda p: ir.sub(*p)), two.map(lambda p: ir.mul(*p)),
        two.map(lambda p: ir.minimum(*p)), two.map(lambda p: ir.maximum(*p)),
        two.map(lambda p: ir.where(ir.compare("<", *p), p[0], ir.mul(p[1], p[0]))),
        children.map(ir.sg), children.map(lambda x: ir.unary("tanh", x)), children.map(lambda x: ir.unary("sigmoid", x)),
        children.map(lambda x: ir.div(x, ir.add(ir.const(3), ir.mul(x, x)))),
        children.map(lambda x: ir.reduce("mean", "t", x)),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.recursive(LEAVES, grow, max_leaves=8), st.integers(0, 5))
def test_random_expressions(objective: ir.Node, seed: int) -> None:
    if ir.contains(objective, lambda n: n.op == "sg"):
        objective = ir.rewrite(objective, lambda n: n.args[0] if n.op == "sg" else None)  # differences see through sg
    check(ir.ONE, objective, seed, tolerance=1e-4)


def test_a_tie_keeps_the_gradient_on_the_bound() -> None:
    """clip and min(r A, clip(r) A) at r == hi: the weight is r, as the review's mask says (M = 0 only beyond it)."""
    b = Batch(
        seq=np.array([0]),
        n_seqs=1,
        logp={"pi": np.array([np.log(2.0)]), "prox": np.array([0.0])},
        values={"A": np.array([1.0])},
    )
    clipped = ir.clip(R, ir.const(0), ir.const(2))
    for objective in (
        clipped,
        ir.minimum(ir.mul(R, A), ir.mul(clipped, A)),
        ir.minimum(ir.const(2), R),
        ir.minimum(R, ir.const(2)),
    ):
        coef = per_token(differentiate(((ir.ONE, objective),)).coef, b, {})
        assert coef[0] == pytest.approx(2.0)


def test_stop_gradient_stops() -> None:
    assert differentiate(((ir.ONE, ir.sg(R)),)).coef is ir.ZERO
    gradient = differentiate(((ir.ONE, ir.mul(ir.sg(KL), ir.mul(ir.sg(RHO), ir.logp("pi")))),))
    b, _, _ = batch(0)
    assert gradient.sums == ()
    assert per_token(gradient.coef, b, {}) == pytest.approx(per_token(KL, b, {}) * np.exp(b.logp["pi"] - b.logp["mu"]))


@pytest.mark.parametrize("node", [ir.reduce("quantile", "t", R, ir.const(1)), ir.mul(ir.reduce("mean", "b", R), R)])
def test_what_has_no_closed_form_is_refused(node: ir.Node) -> None:
    with pytest.raises(NotDifferentiable):
        differentiate(((ir.ONE, node),))


def test_shared_values_and_empty_answers_are_finite() -> None:
    b, _, _ = batch(3)
    assert np.isfinite(evaluate(mean_r, b, {})).all() and evaluate(mean_r, b, {})[3] == 1.0  # a mean over nothing is 1
