"""Regions: intervals of quantities and comparisons between them, and how neighbouring regions are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir import Node
from ..primitives import interval
from .branches import Decision
from .probes import constant, number


@dataclass(frozen=True)
class Interval:
    """Where a quantity lies; an end is (value, its expression, whether it belongs) or None for no end."""

    low: tuple[float, Node, bool] | None = None
    high: tuple[float, Node, bool] | None = None

    def contains(self, other: Interval) -> bool:
        return self.meet(other) == other

    def meet(self, other: Interval) -> Interval:
        low = self.low if other.low is None else other.low if self.low is None else max(self.low, other.low, key=_from)
        high = (
            self.high
            if other.high is None
            else other.high
            if self.high is None
            else min(self.high, other.high, key=_to)
        )
        return Interval(low, high)

    def joins(self, other: Interval) -> Interval | None:
        """The union of two that touch: where one ends the other begins, and the point belongs to one of them."""
        for first, second in ((self, other), (other, self)):
            high, low = first.high, second.low
            if high is not None and low is not None and _near(high[0], low[0]) and high[2] != low[2]:
                return Interval(first.low, second.high)
        return None

    @property
    def is_empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        apart = self.high[0] - self.low[0]
        return apart < 0 or (_near(self.low[0], self.high[0]) and not (self.low[2] and self.high[2]))

    @property
    def is_point(self) -> bool:
        return self.low is not None and self.high is not None and _near(self.low[0], self.high[0])


def _near(x: float, y: float) -> bool:
    return abs(x - y) <= 1e-9 * max(1.0, abs(x), abs(y))


def _from(end: tuple[float, Node, bool]) -> tuple[float, bool]:
    return end[0], not end[2]


def _to(end: tuple[float, Node, bool]) -> tuple[float, bool]:
    return end[0], end[2]


@dataclass(frozen=True)
class Region:
    """The probes that take the same branches in both weights."""

    where: Mapping[Node, Interval]
    also: frozenset[Decision]
    weights: tuple[Node, Node]
    probes: list[int]


def constraints(
    decisions: tuple[Decision, ...], values: Mapping[str, float]
) -> tuple[dict[Node, Interval], frozenset[Decision]]:
    """Decisions as intervals per quantity; those between two moving values stay as they are."""
    where: dict[Node, Interval] = {}
    also = []
    for d in decisions:
        if not constant(d.limit):
            also.append(d)
            continue
        edge = number(d.limit, values)
        if d.sign > 0 and interval(d.tested)[0] >= edge:
            continue  # a ratio is above 0 everywhere
        end = (edge, d.limit, d.closed or d.sign == 0)
        here = Interval(end if d.sign >= 0 else None, end if d.sign <= 0 else None)
        where[d.tested] = where.get(d.tested, Interval()).meet(here)
    return where, frozenset(also)


def join(regions: list[Region]) -> list[Region]:
    """Join regions in which the weights read the same and that touch along one quantity, until none do."""
    regions = list(regions)
    changed = True
    while changed:
        changed = False
        for i in range(len(regions)):
            j = len(regions) - 1
            while j > i:
                where = _joined(regions[i], regions[j])
                if where is not None:
                    open_first = sorted((regions[i], regions[j]), key=on_a_bound)
                    probes = [t for region in open_first for t in region.probes]
                    regions[i] = Region(where, regions[i].also, regions[i].weights, probes)
                    del regions[j]
                    changed = True
                j -= 1
    return regions


def _joined(a: Region, b: Region) -> dict[Node, Interval] | None:
    """The union of two regions, if it is one region and both weights read the same in it."""
    if a.also != b.also or a.weights != b.weights:
        return None
    everywhere = Interval()
    quantities = [q for q in {**a.where, **b.where} if a.where.get(q, everywhere) != b.where.get(q, everywhere)]
    for big, small in ((a, b), (b, a)):
        if all(big.where.get(q, everywhere).contains(small.where.get(q, everywhere)) for q in quantities):
            return dict(big.where)
    if len(quantities) != 1:
        return None
    (q,) = quantities
    union = a.where.get(q, everywhere).joins(b.where.get(q, everywhere))
    if union is None:
        return None
    where = {**a.where, **b.where, q: union}
    if union == everywhere:
        del where[q]
    return where


def on_a_bound(region: Region) -> bool:
    return any(i.is_point for i in region.where.values()) or any(d.sign == 0 for d in region.also)


def widest(where: Mapping[Node, Interval], others: Sequence[Mapping[Node, Interval]]) -> dict[Node, Interval]:
    """The region without the intervals it does not need: dropping them lets it meet none of the others."""
    kept = dict(where)
    for quantity in where:
        wider = {q: i for q, i in kept.items() if q is not quantity}
        if not any(_meet(wider, other) for other in others):
            kept = wider
    return kept


def _meet(a: Mapping[Node, Interval], b: Mapping[Node, Interval]) -> bool:
    return not any(q in b and a[q].meet(b[q]).is_empty for q in a)
