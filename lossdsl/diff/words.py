"""Regions, actions and verdicts in words: the one place, for the terminal, the page and JSON alike."""

from __future__ import annotations

from .. import ir
from ..ir import Node
from .branches import Decision
from .cases import Case
from .naming import spell
from .probes import constant
from .regions import Interval

_SIGN = {-1: "<", 0: "=", 1: ">"}
_CLOSED = {-1: "≤", 0: "=", 1: "≥"}


def number_text(x: float) -> str:
    """Four significant digits; small and large ones in a form that can be typed."""
    return f"{x:.4g}"


def sign_text(sign: int) -> str:
    return "A > 0" if sign > 0 else "A < 0"


def _edge(end: tuple[float, Node, bool]) -> str:
    """A bound as its number; as its expression where a parameter without a value is in it."""
    value, node, _ = end
    return spell(node, 40) if any(n.op == "param" for n in ir.leaves(node)) else f"{value:.6g}"


def interval_text(quantity: Node, interval: Interval) -> str:
    """`0.8 ≤ r ≤ 1.2`."""
    name, low, high = spell(quantity, 60), interval.low, interval.high
    if interval.is_point and low is not None:
        return f"{name} = {_edge(low)}"
    if low is not None and high is not None:
        left, right = "≤" if low[2] else "<", "≤" if high[2] else "<"
        return f"{_edge(low)} {left} {name} {right} {_edge(high)}"
    if low is not None:
        return f"{name} {'≥' if low[2] else '>'} {_edge(low)}"
    return f"{name} {'≤' if high[2] else '<'} {_edge(high)}" if high is not None else name


def decision_text(d: Decision) -> str:
    if d.tested.is_bool:
        return spell(d.tested, 60) if d.sign else f"not {spell(d.tested, 60)}"
    sign = (_CLOSED if d.closed else _SIGN)[d.sign]
    return f"{spell(d.tested, 60)} {sign} {spell(d.limit, 60)}"


def region_text(case: Case) -> str:
    """Where a case is, the sign of A apart; empty if everywhere."""
    parts = [interval_text(q, case.where[q]) for q in sorted(case.where, key=_rank)]
    return ", ".join([*parts, *sorted(map(decision_text, case.also))])


def _rank(quantity: Node) -> tuple[bool, str]:
    """Plain ratios first."""
    name = spell(quantity)
    return (name not in ir.RATIOS, name)


def weight_text(node: Node) -> str:
    """A weight along one branch: numbers short, the rest as written."""
    if constant(node) and node.op == "const":
        assert not isinstance(node.attr, str | tuple) and node.attr is not None
        return number_text(float(node.attr))
    return spell(node, 60)


def sample_text(case: Case) -> str:
    return ", ".join(f"{name} = {number_text(value)}" for name, value in case.sample)
