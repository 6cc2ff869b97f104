"""Rewrites that keep the meaning and make the emitted code safe and short. Each is a pure function Node -> Node."""

from __future__ import annotations

from collections.abc import MutableMapping

from . import ir
from .axes import Axis
from .ir import Node
from .primitives import interval


def erase(node: Node) -> Node | None:
    """After differentiation a stop-gradient is its value."""
    return node.args[0] if node.op == "sg" else None


def decide(node: Node) -> Node | None:
    """A comparison of numbers is true or false."""
    if node.op not in ("lt", "le", "eq") or any(leaf.op != "const" for leaf in ir.leaves(node)):
        return None
    (a, low), (b, high) = (interval(arg) for arg in node.args)
    if a != low or b != high:
        return None
    return ir.TRUE if (a < b if node.op == "lt" else a <= b if node.op == "le" else a == b) else ir.FALSE


def is_indicator(node: Node) -> bool:
    return node.op == "where" and node.args[1] is ir.ONE and node.args[2] is ir.ZERO


def select(node: Node) -> Node | None:
    """1[cond] * x -> x if cond else 0: what is rejected is selected away, never multiplied by zero."""
    if node.op == "mul":
        for one, other in (node.args, node.args[::-1]):
            if is_indicator(one):
                return ir.where(one.args[0], other, ir.ZERO)
            if one.op == "where" and one.args[1] is ir.ZERO and one.args[2] is ir.ONE:
                return ir.where(one.args[0], ir.ZERO, other)
    if node.op == "add" and all(a.op == "where" and a.args[2] is ir.ZERO for a in node.args):
        (c, x, _), (d, y, _) = (a.args for a in node.args)
        if c is d:
            return ir.where(c, ir.add(x, y), ir.ZERO)
    return None


def compare_logs(node: Node) -> Node | None:
    """exp(x) < bound -> x < log(bound): exact at the bound, and no ratio overflows on its way to a comparison."""
    if node.op not in ("lt", "le"):
        return None
    left, right = node.args
    if left.op == "exp" and right.op == "exp":
        return ir.compare("<" if node.op == "lt" else "<=", left.args[0], right.args[0])
    if left.op == "exp" and right.axis <= Axis.BATCH:
        return ir.compare("<" if node.op == "lt" else "<=", left.args[0], log_bound(right))
    if right.op == "exp" and left.axis <= Axis.BATCH:
        return ir.compare("<" if node.op == "lt" else "<=", log_bound(left), right.args[0])
    return None


def log_bound(node: Node) -> Node:
    return ir.ZERO if node is ir.ONE else ir.unary("log_bound", node)


# Applied in this order, each bottom-up over the whole graph.
REWRITES = (erase, decide, select, compare_logs)


def simplify(
    roots: tuple[Node, ...], hints: MutableMapping[int, str], origin: MutableMapping[int, tuple[str, int]]
) -> tuple[Node, ...]:
    """All rewrites on all roots at once; names and spec lines follow the values they belong to."""
    for rule in REWRITES:
        memo: dict[int, Node] = {}
        fresh = tuple(ir.rewrite(root, rule, memo) for root in roots)
        for old in ir.topological(*roots):
            new = memo[id(old)]
            if id(old) in origin:
                origin.setdefault(id(new), origin[id(old)])
            name = hints.get(id(old))
            if name is not None and new.args:
                # An indicator that becomes a selection leaves its name to its condition.
                hints.setdefault(id(new.args[0] if is_indicator(new) and name not in ("T", "f", "W") else new), name)
        roots = fresh
    return roots
