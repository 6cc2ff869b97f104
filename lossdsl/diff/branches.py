"""The branches that a weight takes at a point, and the smooth expression that it is along them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from .. import ir
from ..axes import Axis
from ..ir import Node
from ..reference import Array, Batch, evaluate_all
from .naming import spell
from .probes import constant

TOLERANCE = 1e-9  # two sides of a comparison this close are equal
BRANCHING = ("lt", "le", "eq", "min", "max", "clip", "abs")


@dataclass(frozen=True)
class Decision:
    """The sign (-1, 0, 1) of tested - limit on the branch taken; `closed` if the branch is also taken where they are equal.

    `limit` is free of policies whenever one of the two is.
    """

    tested: Node
    limit: Node
    sign: int
    closed: bool


class Branches:
    """One weight, all its comparisons decided at every probe."""

    def __init__(self, weight: Node, batch: Batch, params: Mapping[str, float]) -> None:
        self.weight = weight
        self.nodes = [n for n in outside_reductions(weight) if n.op in BRANCHING]
        known = evaluate_all((weight,), batch, params)
        self.values = np.asarray(batch.spread(known[id(weight)], weight.axis, Axis.TOKEN), dtype=np.float64)
        self.pairs: list[tuple[Node, Node]] = []
        for n in self.nodes:
            a = n.args
            if n.op == "clip":
                self.pairs += [(a[0], a[1]), (a[0], a[2]), (a[1], a[2])]
            else:
                self.pairs.append((a[0], ir.ZERO) if n.op == "abs" else (a[0], a[1]))
        flags = [n for n in outside_reductions(weight) if n.is_bool and n.op == "reduce"]
        self.flags = {id(n): len(self.pairs) + i for i, n in enumerate(flags)}
        columns = []
        with np.errstate(invalid="ignore", over="ignore"):
            for left, right in self.pairs:
                x, y = (
                    np.asarray(batch.spread(known[id(s)], s.axis, Axis.TOKEN), dtype=np.float64)
                    if id(s) in known
                    else np.zeros(1)
                    for s in (left, right)
                )
                gap = x - y
                scale = np.maximum(1.0, np.maximum(np.abs(x), np.abs(y)))
                columns.append(np.where(np.abs(gap) <= TOLERANCE * scale, 0, np.sign(gap)))
        for n in flags:
            columns.append(np.asarray(batch.spread(known[id(n)], n.axis, Axis.TOKEN), dtype=np.float64))
        n_tokens = len(batch.seq)
        self.signs = (
            np.stack([np.broadcast_to(c, (n_tokens,)) for c in columns], 1).astype(np.int8)
            if columns
            else np.zeros((n_tokens, 0), np.int8)
        )
        self.index = {(id(x), id(y)): i for i, (x, y) in enumerate(self.pairs)}
        self._known: dict[bytes, tuple[Node, tuple[Decision, ...]]] = {}

    def piece(self, token: int) -> tuple[Node, tuple[Decision, ...]]:
        """The smooth expression of the weight at this probe, and the comparisons that lead to it."""
        row = self.signs[token]
        key = row.tobytes()
        if key not in self._known:
            taken: dict[Decision, None] = {}
            node = _follow(self.weight, row, self.index, self.flags, taken, {})
            self._known[key] = node, tuple(taken)
        return self._known[key]

    def nominal(self, distance: Array) -> Node:
        """The weight as it reads where nothing binds: at the probe of least `distance` from ratios of 1 that says anything."""
        order = np.argsort(distance, kind="stable")
        for token in order[:40]:
            node = self.piece(int(token))[0]
            if node is not ir.ZERO and not constant(node):
                return node
        return self.piece(int(order[0]))[0]


def outside_reductions(root: Node) -> list[Node]:
    """The nodes that a token's weight branches on; what a reduction does inside is its own."""
    order: list[Node] = []
    seen: set[int] = set()

    def visit(node: Node) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if node.op != "reduce":
            for a in node.args:
                visit(a)
        order.append(node)

    visit(root)
    return order


def _follow(
    node: Node,
    row: Array,
    index: Mapping[tuple[int, int], int],
    flags: Mapping[int, int],
    taken: dict[Decision, None],
    memo: dict[int, Node],
) -> Node:
    """The expression along the branches that the signs in `row` choose; decisions on the way are noted in `taken`."""
    if id(node) in memo:
        return memo[id(node)]

    def go(n: Node) -> Node:
        return _follow(n, row, index, flags, taken, memo)

    def take(x: Node, y: Node, below: bool) -> bool:
        """Whether x < y (`below`), or x <= y, and a note of it."""
        sign = int(row[index[id(x), id(y)]])
        answer = sign < 0 if below else sign <= 0
        # `abs` stays whole where it is compared: a distance has a bound, its two sides do not
        left, right = (s if s.op == "abs" else go(s) for s in (x, y))
        decision = decide(left, right, -1 if answer else 1, answer is not below)
        if decision is not None:
            taken[decision] = None
        return answer

    a = node.args
    match node.op:
        case "reduce" if node.is_bool:
            found = int(row[flags[id(node)]])
            taken[Decision(node, ir.ZERO, found, False)] = None
            result = ir.TRUE if found else ir.FALSE
        case "reduce":
            result = node
        case "where":
            result = go(a[1]) if go(a[0]) is ir.TRUE else go(a[2])
        case "lt" | "le":
            result = ir.TRUE if take(a[0], a[1], node.op == "lt") else ir.FALSE
        case "eq":
            sign = int(row[index[id(a[0]), id(a[1])]])
            decision = decide(go(a[0]), go(a[1]), sign, False)
            if decision is not None:
                taken[decision] = None
            result = ir.TRUE if sign == 0 else ir.FALSE
        case "and":
            result = ir.FALSE if go(a[0]) is ir.FALSE else go(a[1])
        case "or":
            result = ir.TRUE if go(a[0]) is ir.TRUE else go(a[1])
        case "min":
            result = go(a[0] if take(a[0], a[1], False) else a[1])
        case "max":
            result = go(a[1] if take(a[0], a[1], True) else a[0])
        case "clip":
            x, low, high = a
            if take(x, low, True):
                result = go(low if take(low, high, False) else high)
            else:
                result = go(x if take(x, high, False) else high)
        case "abs":
            result = ir.neg(go(a[0])) if take(a[0], ir.ZERO, True) else go(a[0])
        case _:
            result = ir.rebuild(node, tuple(go(x) for x in a)) if a else node
    memo[id(node)] = result
    return result


def decide(left: Node, right: Node, sign: int, closed: bool) -> Decision | None:
    """The comparison in one form: limit on the right, common signs and factors out; None if it is between numbers."""
    if constant(left) and constant(right):
        return None
    if constant(left):
        left, right, sign = right, left, -sign
    while constant(right):
        if left.op == "neg":
            left, right, sign = left.args[0], ir.neg(right), -sign
        elif left.op == "mul" and left.args[0].op == "const" and left.args[0] is not ir.ZERO:
            factor = left.args[0]
            assert isinstance(factor.attr, Fraction)
            left, right, sign = left.args[1], ir.div(right, factor), sign if factor.attr > 0 else -sign
        elif left.op == "sub" and constant(left.args[1]):
            left, right = left.args[0], ir.add(right, left.args[1])
        elif left.op == "add" and constant(left.args[1]):
            left, right = left.args[0], ir.sub(right, left.args[1])
        elif left.op == "sub" and right is ir.ZERO:
            return decide(left.args[0], left.args[1], sign, closed)
        elif is_log(left):
            left, right = ir.exp(left), ir.exp(right)  # people read ratios, not their logs
        else:
            return Decision(left, right, sign, closed)
    if spell(left) > spell(right):  # between two moving values, one order
        left, right, sign = right, left, -sign
    return Decision(left, right, sign, closed)


def is_log(node: Node) -> bool:
    """A log of a ratio or of a product or mean of ratios."""
    if node.op in ("logratio", "logp"):
        return True
    if node.op == "reduce":
        return node.attr in (("sum", "t"), ("mean", "t"), ("sum", "s"), ("mean", "s")) and is_log(node.args[0])
    return node.op in ("neg", "sub", "add") and all(is_log(a) for a in node.args)
