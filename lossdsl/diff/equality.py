"""Are two expressions equal everywhere? By algebra, cell by cell; sound, and silent where it cannot tell.

Equal is said only where the difference is the zero polynomial in every cell that linear arithmetic leaves open; see
`algebra`. Ratios are taken as they are, without the saturation at e**20 that the loss applies to them.
"""

from __future__ import annotations

from itertools import product

from .. import ir
from ..algebra import Algebra, Fact, Split
from ..ir import Node
from ..polynomials import GiveUp
from ..prove import differing_cells, shared
from .side import Side


class Equality:
    """The algebra of one question, with its assumptions as facts."""

    def __init__(self, sides: tuple[Side, Side]) -> None:
        self.sides = sides
        self._bounds = sides[1].bounds | sides[0].bounds
        self._plain = Algebra(self._bounds)

    def same(self, left: Node, right: Node) -> bool:
        """Whether two expressions without branches are one polynomial."""
        if left is right:
            return True
        try:
            return self._plain.poly(ir.sub(left, right), ()) == {}
        except (Split, GiveUp):
            return False

    def equal(self, *pairs: tuple[Node, Node]) -> bool:
        """Whether both of every pair are proved equal under the assumptions."""
        return all(left is right or self._equal(left, right) for left, right in pairs)

    def _equal(self, left: Node, right: Node) -> bool:
        # What stands on both sides may be anything; that takes far fewer cells to see, and often suffices.
        for opaque in (shared((left,), (right,)), ()):
            try:
                if not self._differ(left, right, opaque):
                    return True
            except GiveUp:
                continue
        return False

    def _differ(self, left: Node, right: Node, opaque: tuple[Node, ...]) -> bool:
        algebra = Algebra(self._bounds, opaque)
        A = self.sides[0].A
        return any(True for start in self._starts(algebra) for _ in differing_cells(algebra, A, left, right, start))

    def _starts(self, algebra: Algebra) -> list[tuple[Fact, ...]]:
        """The assumptions as facts; each way of meeting `<=` is a start of its own."""
        options: list[list[Fact]] = []
        for condition in self.sides[0].conditions:
            left, right = condition.args
            signs = {"lt": (-1,), "le": (-1, 0), "eq": (0,)}[condition.op]
            try:
                facts = [algebra.fact(left, right, sign) for sign in signs]
            except Split:
                continue  # one assumption less proves less, never too much
            options.append([fact for fact in facts if fact is not None])
        return [facts for facts in product(*filter(None, options)) if algebra.feasible(facts)]
