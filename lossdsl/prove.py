"""Do the objective and the knobs say the same? Proved cell by cell, or shown to differ by numbers.

The claim: dJ/d log pi of the written objective equals lambda * A * W (and, over the vocabulary,
-lambda * A * kappa * mu(v) * W_v) for every sign of A, every side of every bound and all values of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product

import numpy as np

from . import ir
from .algebra import Algebra, Fact
from .autodiff import Gradient, differentiate
from .axes import Axis
from .errors import Diagnostic
from .ir import Node
from .method import Method, advantage_of, centre_weight, holds_ratio
from .polynomials import GiveUp
from .reference import Batch, per_token
from .samples import sample_batches
from .text import infix

SAMPLES = 60  # tiny batches, each of a few dozen tokens


@dataclass(frozen=True)
class Witness:
    """One token at which two weights differ, with the values that decide it."""

    at: tuple[tuple[str, float], ...]
    first: float
    second: float
    batch: Batch
    token: int

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value:.4g}" for name, value in self.at)


def prove(method: Method) -> tuple[Method, tuple[Diagnostic, ...]]:
    """The method with its `proof` filled in, and what is wrong with it.

    A difference that numbers confirm is the error E0505, with the region and a witness. If the algebra cannot decide
    and no sample differs, the method passes with the warning W0701 and `proof` says how many points were sampled.
    """
    if method.W is None or method.doc.objective is None:
        return method, ()
    objective = differentiate(((method.normaliser, method.objective),))
    claim = knobs_gradient(method)
    found: list[tuple[Fact, ...]] = []
    # What stands on both sides may be anything: most methods agree whatever f, lambda and the conditions that they
    # share are, which takes far fewer cells to see.
    for opaque in (shared(*map(_parts, (objective, claim))), (method.f or ir.ONE, method.normaliser), ()):
        try:
            # with something taken as a whole one difference is enough to try again; the last try names the regions
            found = list(islice(differences(method, objective, claim, opaque), 1 if opaque else None))
        except GiveUp:
            continue
        if not found:
            return replace(method, proof="proved"), ()
    witness = _witness(method, objective, claim)
    if witness is not None:
        region = next((cell for cell in found if _holds(cell, witness, method)), ())
        return method, (_disagreement(method, region, witness),)
    points = f"sampled, {SAMPLES} batches"
    warning = Diagnostic(
        "W0701",
        f"objective and knobs agree on every sample ({points}) but this could not be proved",
        method.doc.objective.span,
        "write the weight the way the objective's derivative reads, or give only one of the two",
        severity="warning",
    )
    return replace(method, proof=points), (warning,)


def shared(left: tuple[Node, ...], right: tuple[Node, ...]) -> tuple[Node, ...]:
    """The bounded values and compound conditions that both of two expressions contain."""
    here = set(map(id, ir.topological(*left)))
    both = [n for n in ir.topological(*right) if id(n) in here]
    return tuple(n for n in both if n.op in ("min", "max", "clip", "and", "or", "sqrt", "add") and holds_ratio(n))


def knobs_gradient(method: Method, normaliser: Node | None = None) -> Gradient:
    """What T, f and kappa claim the gradient of the main part is, with the method's normaliser or another."""
    assert method.W is not None
    normaliser = method.normaliser if normaliser is None else normaliser
    scale = ir.mul(normaliser, advantage_of(method))
    coef = ir.mul(scale, method.W)
    if method.kappa is ir.ZERO:
        return Gradient(coef, ())
    centre = ir.reduce("sum", "v", ir.mul(ir.sg(centre_weight(method)), ir.logp("pi", Axis.VOCAB)))
    part = ir.mul(ir.neg(ir.mul(method.kappa, advantage_of(method))), centre)
    return Gradient(coef, differentiate(((normaliser, part),)).sums)


def per_entry(gradient: Gradient) -> Node:
    """sum_k (dJ/d sum_k) (d sum_k / d log pi(v)): the part of dJ / d log pi(v) that every vocabulary entry gets."""
    total = ir.ZERO
    for term in gradient.sums:
        total = ir.add(total, ir.mul(term.cotangent, term.slope))
    return total


def differences(
    method: Method, one: Gradient, other: Gradient, opaque: tuple[Node, ...] = ()
) -> Iterator[tuple[Fact, ...]]:
    """The cells in which the two gradients are not the same polynomial; none means they are proved equal."""
    bounds = {p.name.value: (p.min.value if p.min else None, p.max.value if p.max else None) for p in method.params}
    algebra = Algebra(bounds, opaque)
    for left, right in zip(_parts(one), _parts(other), strict=True):
        yield from differing_cells(algebra, advantage_of(method), left, right)


def _parts(gradient: Gradient) -> tuple[Node, Node]:
    return gradient.coef, per_entry(gradient)


def differing_cells(
    algebra: Algebra, A: Node, left: Node, right: Node, start: tuple[Fact, ...] = ()
) -> Iterator[tuple[Fact, ...]]:
    """The cells, within those that `start` leaves, in which two expressions are not the same polynomial."""

    def evaluate(facts: tuple[Fact, ...]) -> object:
        algebra.truth(ir.compare("<", ir.ZERO, A), facts, {})  # the sign of A first: it is how people read a method
        return algebra.poly(left, facts), algebra.poly(right, facts)

    for facts in algebra.cells(evaluate, start):
        if algebra.sign(algebra.poly(ir.sub(left, right), facts), facts) != 0:
            yield facts


def _side(fact: Fact, sign: dict[int, str], method: Method) -> str:
    left, right, order = fact.left, fact.right, fact.sign
    if left.axis < right.axis:  # the bound on the right, as people write it
        left, right, order = right, left, -order
    return f"{infix(left, method.hints, 60)} {sign[order]} {infix(right, method.hints, 60)}"


def _disagreement(method: Method, region: tuple[Fact, ...], witness: Witness) -> Diagnostic:
    assert method.doc.objective is not None
    where = describe_region(region, method)
    return Diagnostic(
        "E0505",
        f"objective and knobs disagree{' where ' + where if where else ''}",
        method.doc.objective.span,
        "mend one of the two; the objective's derivative is what `T`, `f` and `kappa` must give",
        notes=(f"at {witness}: the objective gives weight {witness.first:.6g}, the knobs give {witness.second:.6g}",),
    )


def describe_region(facts: tuple[Fact, ...], method: Method) -> str:
    """`A > 0, r > 1 + eps`: the cell in words."""
    sign = {1: ">", 0: "==", -1: "<"}
    return ", ".join(_side(f, sign, method) for f in facts)


def _holds(cell: tuple[Fact, ...], witness: Witness, method: Method) -> bool:
    """Whether the witness lies in a cell."""
    for fact in cell:
        difference = ir.sub(fact.left, fact.right)
        if difference.axis <= Axis.TOKEN:
            value = per_token(difference, witness.batch, _values(method))[witness.token]
            if int(np.sign(value)) != fact.sign:
                return False
    return True


def _values(method: Method) -> dict[str, float]:
    """Every parameter at its default, 1 where it has none."""
    return {name: 1.0 if value is None else value for name, value in method.defaults.items()}


def _witness(method: Method, one: Gradient, other: Gradient) -> Witness | None:
    """The token of the sampled batches at which the two weights differ most."""
    best: Witness | None = None
    gap = 1e-6
    defaults = _values(method)
    parts = [(one.coef, other.coef)]
    entries = (per_entry(one), per_entry(other))
    if entries != (ir.ZERO, ir.ZERO):
        parts.append((ir.reduce("sum", "v", _probe(entries[0])), ir.reduce("sum", "v", _probe(entries[1]))))
    for batch, (left, right) in product(sample_batches(method, SAMPLES), parts):
        weight = per_token(ir.mul(method.normaliser, advantage_of(method)), batch, defaults)
        a, b = per_token(left, batch, defaults), per_token(right, batch, defaults)
        with np.errstate(invalid="ignore", divide="ignore"):
            x, y = (np.where(weight == 0, 0.0, v / np.where(weight == 0, 1.0, weight)) for v in (a, b))
            wrong = np.abs(x - y) / (1 + np.abs(y))
        t = int(np.argmax(wrong)) if wrong.size else 0
        if wrong.size and wrong[t] > gap:
            gap = float(wrong[t])
            shown = [("A", per_token(advantage_of(method), batch, defaults)[t])]
            for name, (above, below) in ir.RATIOS.items():
                if above in batch.logp and below in batch.logp and _mentions(method, name):
                    shown.append((name, float(np.exp(batch.logp[above][t] - batch.logp[below][t]))))
            best = Witness(tuple((n, float(v)) for n, v in shown), float(x[t]), float(y[t]), batch, t)
    return best


def _probe(entry: Node) -> Node:
    """A fixed direction over the vocabulary, so that two different distributions of weight give different sums."""
    return ir.mul(entry, ir.exp(ir.logp("pi", Axis.VOCAB)))


def _mentions(method: Method, ratio: str) -> bool:
    pair = ir.RATIOS[ratio]
    return any(n.attr == ratio or n.attr in pair for n in ir.leaves(*method.loss_side) if n.op in ("logratio", "logp"))
