"""A pair on paper: which one or two quantities are the axes, how far they go, and where a weight is flat along one.

One quantity makes a curve, two make a map. Where probabilities are tested, the map is over the probability before and
the probability after; of more coordinates the first two are drawn and the others rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from .. import ir
from ..ir import Node
from ..reference import Array, per_token
from .measure import fitted, missing
from .naming import spell
from .report import Diff
from .rollouts import Rollouts
from .view import SIDES, Coordinate, View, view

SIGNS = (1, -1)
EVERYWHERE = Coordinate("r", "r", "ratio", True, 1.0)  # an axis for weights that read nothing


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: as in the table of cases; `kind` as of a coordinate.
        rest: its value where nothing moves it.
        edges: the numbers that the quantity is tested against, ascending.
    """

    label: str
    kind: str
    rest: float
    edges: tuple[float, ...] = ()

    @property
    def is_log(self) -> bool:
        return self.kind == "ratio"

    @cached_property
    def range(self) -> tuple[float, float]:
        """Well beyond every edge on both sides."""
        match self.kind:
            case "flag":
                return 0.0, 1.0
            case "chance":
                return 0.001, 0.999
            case "number":
                far = 2.2 * max((abs(e) for e in self.edges), default=0.0) or 2 * max(self.rest, 0.5)
                return (-far if min(self.edges, default=0.0) < 0 else 0.0), far
        logs = [math.log(e) for e in self.edges if e > 0]
        below, above = max([-x for x in logs] + [0.0]), max([*logs, 0.0])
        spread = max(below, above)
        least = 0.0 if self.label.startswith("geomean") and logs else math.log(2)  # it stays near 1, a ratio does not
        return math.exp(-max(2 * below, spread / 1.5, least)), math.exp(max(2 * above, spread / 1.5, least))

    def t(self, x: Array | float) -> Array:
        """Values as they are spaced on paper: the log of a ratio."""
        return np.asarray(np.log(x) if self.is_log else x, dtype=np.float64)

    def x(self, t: Array | float) -> Array:
        return np.asarray(np.exp(t) if self.is_log else t)

    def grid(self, n: int) -> Array:
        """`n` values from end to end."""
        low, high = self.t(np.array(self.range))
        return self.x(np.linspace(low, high, n))


@dataclass(frozen=True)
class Paper:
    """Two weights over one or two axes; `resting` are the coordinates that are not drawn."""

    view: View
    axes: tuple[Axis, ...]
    resting: tuple[Coordinate, ...]

    def weight(self, side: int, sign: int, *where: Array, plain: bool = False) -> Array:
        """W, or what it is where nothing binds, at the given values of the axes."""
        at: dict[str, Array | float] = {}
        for coordinate, values in zip(self._moved, where, strict=True):
            at[coordinate.key] = values
        if self._before_after:
            at[self._moved[1].key] = where[1] / where[0]  # the ratio of the two probabilities
        w = self.view.values(SIDES[side], sign, at, plain)
        return np.broadcast_to(w, np.shape(where[0])) if len(w) == 1 else w

    @property
    def _moved(self) -> tuple[Coordinate, ...]:
        """The view's coordinates behind the axes."""
        rest = {c.key for c in self.resting}
        found = [c for c in self.view.coordinates if c.key not in rest] or [EVERYWHERE]
        return tuple(sorted(found, key=lambda c: c.kind != "chance"))

    @property
    def _before_after(self) -> bool:
        return len(self.axes) == 2 and all(a.kind == "chance" for a in self.axes)

    def tokens(self, diff: Diff, rollouts: Rollouts) -> tuple[list[Array], Array] | None:
        """Where live tokens lie on each axis, and the sign of A; None where something that is read is lacking."""
        sides = (diff.a, diff.b)
        if any(missing(s, rollouts) for s in sides):
            return None
        side, batch = fitted(diff.a, rollouts), rollouts.batch
        named = {spell(q, 60): q for s in sides for w in s.weights for q in _quantities(w)}
        policies = {p: ir.exp(ir.logp(p)) for p in ir.POLICIES}
        named |= policies | {name: ir.exp(ir.logratio(name)) for name in ir.RATIOS}
        if any(a.label not in named for a in self.axes):
            return None
        values = diff.b.values | diff.a.values
        return [per_token(named[a.label], batch, values) for a in self.axes], np.sign(per_token(side.A, batch, {}))


def paper(diff: Diff) -> Paper:
    """How a diff is drawn."""
    seen = view((diff.a, diff.b))
    edges = _edges(diff)

    def axis(c: Coordinate) -> Axis:
        return Axis(c.label, c.kind, c.start, edges.get(c.label, ()))

    chance = next((c for c in seen.coordinates if c.kind == "chance"), None)
    ratio = next((c for c in seen.coordinates if c.key in ("r", "rho")), None)
    if chance is not None and ratio is not None:
        axes = (axis(chance), Axis("pi", "chance", chance.start))
        return Paper(seen, axes, tuple(c for c in seen.coordinates if c not in (chance, ratio)))
    drawn = seen.coordinates[:2] or (EVERYWHERE,)
    return Paper(seen, tuple(map(axis, drawn)), seen.coordinates[2:])


def _edges(diff: Diff) -> Mapping[str, tuple[float, ...]]:
    """Quantity, as people write it -> the ends of its intervals in the table of cases, ascending."""
    found: dict[str, set[float]] = {}
    for case in diff.cases:
        for quantity, where in case.where.items():
            ends = {float(f"{end[0]:.12g}") for end in (where.low, where.high) if end is not None}
            found.setdefault(spell(quantity, 60), set()).update(ends)
    return {label: tuple(sorted(ends)) for label, ends in found.items()}


def _quantities(root: Node) -> Iterator[Node]:
    """The values that may be coordinates: inputs, reductions and products of ratios."""
    for node in ir.topological(root):
        if node.op == "reduce" and not node.is_bool:
            yield node
            yield ir.exp(node)
        elif node.op == "input":
            yield node


@dataclass(frozen=True)
class Stretch:
    """A piece of an axis on which a weight is exactly 0 (masked) or stays at a bound (capped; raised from below)."""

    kind: str
    low: float
    high: float
    weight: float


def stretches(on: Paper, side: int, sign: int, points: int = 801) -> Iterator[Stretch]:
    """The pieces of a curve on which it is flat, their ends to the last digit."""
    axis = on.axes[0]

    def weight(t: Sequence[float] | Array) -> Array:
        return on.weight(side, sign, axis.x(np.asarray(t)))

    def border(inside: float, outside: float, level: float) -> float:
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if weight([middle])[0] == level else (inside, middle)
        return inside

    grid = axis.t(axis.grid(points))
    w = weight(grid)
    steps = np.diff(w)
    cuts = [0, *(np.flatnonzero(steps != 0) + 1), points]
    for first, last in pairwise(map(int, cuts)):
        level = float(w[first])
        if last - first < 2 or (last - first == points and level != 0):
            continue  # a weight that is the same everywhere is not bounded, unless it is 0
        low = grid[0] if first == 0 else border(grid[first], grid[first - 1], level)
        high = grid[-1] if last == points else border(grid[last - 1], grid[last], level)
        middle = float(on.weight(side, sign, axis.x(np.array([(low + high) / 2])), plain=True)[0])
        kind = "masked" if level == 0 else "raised" if level > middle else "capped"
        yield Stretch(kind, float(axis.x(low)), float(axis.x(high)), level)
