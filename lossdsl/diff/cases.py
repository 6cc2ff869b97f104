"""The table of cases: what each of two weights is in every region that either tells apart.

Every comparison that a weight makes (and every side that a min, max, clip or abs takes) is decided at each probe; along
the branches taken the weight is a smooth expression. Probes that take the same branches in both weights form a region.
Regions that touch along one quantity and in which both weights read the same are joined, so what is left are the exact
breakpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .. import ir
from ..axes import Axis
from ..ir import Node
from ..reference import Array, Batch, per_token
from .branches import Branches, Decision
from .equality import Equality
from .naming import spell
from .regions import Interval, Region, constraints, join, on_a_bound
from .side import Side


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        sign: of the advantage.
        where: quantity -> the interval it lies in.
        also: comparisons that are not an interval of one quantity.
        weights: both weights as expressions; values: at the sample; actions: kept, masked, capped, ...
        sample: (name, value) of the ratios and probabilities at one probe.
        same: whether the two weights are equal throughout; `proved` if so by algebra, else at every probe.
    """

    sign: int
    where: Mapping[Node, Interval]
    also: frozenset[Decision]
    weights: tuple[Node, Node]
    values: tuple[float, float]
    actions: tuple[str, str]
    sample: tuple[tuple[str, float], ...]
    same: bool
    proved: bool


def cases(sides: tuple[Side, Side], batch: Batch, probes: Array, algebra: Equality) -> tuple[Case, ...]:
    """All cases of a pair, A > 0 first."""
    rows: list[Case] = []
    values = sides[1].values | sides[0].values
    for sign in (1, -1):
        if not _possible(sides[0], sign):
            continue
        branches = [Branches(s.weight(sign), batch, values) for s in sides]
        allowed = probes & _holds(sides[0], batch, sign, values)
        found: dict[tuple[object, ...], Region] = {}
        for token in map(int, np.flatnonzero(allowed)):
            pieces = [b.piece(token) for b in branches]
            key = (*(id(x) for piece in pieces for x in piece),)
            if key in found:
                found[key].probes.append(token)
            else:
                where, also = constraints((*pieces[0][1], *pieces[1][1]), values)
                found[key] = Region(where, also, (pieces[0][0], pieces[1][0]), [token])
        logs = batch.logp
        spread = np.abs(logs["pi"] - logs["prox"]) + np.abs(logs["prox"] - logs["mu"])
        nominal = [b.nominal(np.where(allowed, spread, np.inf)) for b in branches]
        plain = [per_token(n, batch, values) for n in nominal]
        made = []
        for region in join(list(found.values())):
            gaps = [not _close(*(float(b.values[t]) for b in branches)) for t in region.probes]
            same = not any(gaps) if on_a_bound(region) else algebra.same(*region.weights)
            token = region.probes[0] if same or not any(gaps) else region.probes[gaps.index(True)]
            numbers = tuple(float(b.values[token]) for b in branches)
            actions = tuple(
                action(w, v, float(p[token])) for w, v, p in zip(region.weights, numbers, plain, strict=True)
            )
            shown = sample(region, token, sides, batch, values)
            made.append(
                Case(sign, region.where, region.also, region.weights, (numbers[0], numbers[1]),
                     (actions[0], actions[1]), shown, same or not any(gaps), same)
            )  # fmt: skip
        rows += sorted(made, key=_order)
    return tuple(rows)


def _order(case: Case) -> list[tuple[bool, str, float]]:
    """Regions along r first, then c, rho and the rest; from low to high."""
    ends = [
        (spell(q) not in ir.RATIOS, spell(q), -math.inf if i.low is None else i.low[0]) for q, i in case.where.items()
    ]
    return sorted(ends)


def _close(x: float, y: float) -> bool:
    return abs(x - y) <= 1e-9 * max(1.0, abs(x), abs(y))


def _possible(side: Side, sign: int) -> bool:
    """Whether the assumptions leave room for this sign of the advantage."""
    return all(side.at(condition, sign) is not ir.FALSE for condition in side.conditions)


def _holds(side: Side, batch: Batch, sign: int, values: Mapping[str, float]) -> Array:
    """The probes at which every assumption holds."""
    result = np.ones(len(batch.seq), bool)
    for condition in side.conditions:
        at = side.at(condition, sign)
        if at is not ir.TRUE:
            result &= per_token(ir.where(at, ir.ONE, ir.ZERO), batch, values) > 0
    return result


def action(weight: Node, value: float, plain: float) -> str:
    """What a method does to the token here, against `plain`, its value where nothing binds."""
    if weight is ir.ZERO:
        return "masked"
    if value < 0:
        return "flipped"
    return "kept" if _close(value, plain) else "capped" if value < plain else "raised"


def sample(
    region: Region, token: int, sides: tuple[Side, Side], batch: Batch, values: Mapping[str, float]
) -> tuple[tuple[str, float], ...]:
    """A probe in the names that a reader knows: probabilities where they matter, ratios, and what the region tests."""
    leaves = list(ir.leaves(*(w for s in sides for w in s.weights)))
    ratios = [n for n in ir.RATIOS if any(x.op == "logratio" and x.attr == n for x in leaves)]
    chances = {str(n.attr) for n in leaves if n.op == "logp" and n.axis is not Axis.VOCAB}
    shown: dict[str, float] = {
        p: math.exp(float(batch.logp[p][token])) for p in ("mu", "prox", "pi", "ref") if p in chances
    }
    for name in ratios:
        above, below = ir.RATIOS[name]
        shown[name] = math.exp(float(batch.logp[above][token] - batch.logp[below][token]))
    for quantity in region.where:
        shown.setdefault(spell(quantity, 60), float(per_token(quantity, batch, values)[token]))
    return tuple(shown.items())


def first_difference(rows: Sequence[Case]) -> Case | None:
    """The first row whose weights differ."""
    return next((row for row in rows if not row.same), None)
