"""Every operation in one place: what it means, how it differentiates, what range it has, how it is emitted.

Adding an operation is one entry in PRIMITIVES (and a constructor in ir.py). For each:

    reference   its meaning on float64 numpy arrays: the oracle that generated code is held against
    partials    the derivative with respect to each argument, as new nodes, given the operation's own node; an entry
                is None where the operation is flat in that argument
    interval    the range of the result from the ranges of the arguments
    emit        the PyTorch text, from the arguments' texts; `level` is the precedence of that text
    script      the JavaScript text, from the arguments' names

All operations are total: on finite inputs no result is NaN (see docs/language.md, "Total semantics").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import ir
from .ir import Node

Array = np.ndarray[Any, Any]
Range = tuple[float, float]
Partials = Callable[[Node], tuple[Node | None, ...]]

LOG_FLOOR = 1e-37  # log(x) of anything smaller; a normal float32
EXP_CEILING = 20.0  # exp(x) of anything larger

# Precedence of the emitted Python text, loosest first.
OR, AND, COMPARE, SUM, PRODUCT, UNARY, POWER, ATOM = range(8)


@dataclass(frozen=True)
class Primitive:
    reference: Callable[..., Array]
    partials: Partials
    interval: Callable[..., Range]
    emit: str  # {0}, {1}, ... are the arguments' texts
    script: str
    level: int = ATOM  # precedence of the whole text
    inner: tuple[int, ...] = (OR, OR, OR)  # the loosest precedence each argument may have without brackets


def _flat(node: Node) -> tuple[Node | None, ...]:
    return (None,) * len(node.args)


def _products(a: Range, b: Range) -> Range:
    ends = [0.0 if 0.0 in (x, y) else x * y for x in a for y in b]
    return min(ends), max(ends)


def _quotient(a: Range, b: Range) -> Range:
    if b[0] <= 0 <= b[1]:  # x / 0 is 0, and tiny divisors give anything of the right sign
        same = (a[0] >= 0 and b[0] >= 0) or (a[1] <= 0 and b[1] <= 0)
        opposite = (a[1] <= 0 and b[0] >= 0) or (a[0] >= 0 and b[1] <= 0)
        return (0.0, math.inf) if same else (-math.inf, 0.0) if opposite else (-math.inf, math.inf)
    return _products(a, (0.0 if math.isinf(b[1]) else 1 / b[1], 0.0 if math.isinf(b[0]) else 1 / b[0]))


def _exp(x: float) -> float:
    return math.exp(min(x, EXP_CEILING))


def _power(a: Range, b: Range) -> Range:
    if b[0] == b[1] and a[0] >= 0 and b[0] >= 0:
        return _float_power(a[0], b[0]), _float_power(a[1], b[0])
    if b[0] == b[1] and b[0] % 2 == 0:
        return 0.0, math.inf
    return (0.0, math.inf) if a[0] >= 0 else (-math.inf, math.inf)


def _float_power(x: float, y: float) -> float:
    try:
        return float(x**y)
    except OverflowError:
        return math.inf


def _abs(a: Range) -> Range:
    low = 0.0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))
    return low, max(abs(a[0]), abs(a[1]))


def _sigmoid(x: float) -> float:
    return 0.0 if x < -700 else 1 / (1 + math.exp(-x))


def _log(x: float) -> float:
    return math.inf if math.isinf(x) else math.log(max(x, LOG_FLOOR))


def _div(a: Array, b: Array) -> Array:
    zero = b == 0
    return np.where(zero, 0.0, a / np.where(zero, 1.0, b))


def _pow(a: Array, b: Array) -> Array:
    whole = b == np.floor(b)
    base = np.where(whole, a, np.maximum(a, 0.0))
    return np.where((base == 0) & (b < 0), 0.0, np.power(np.where((base == 0) & (b < 0), 1.0, base), b))


def _tie(node: Node, takes_left: Node) -> tuple[Node | None, ...]:
    """min and max: at a tie the side that moves with pi keeps the gradient (the first where both do)."""
    left, right = node.args
    if not depends_on_pi(left):
        takes_left = ir.logical_and(takes_left, ir.logical_not(ir.compare("==", left, right)))
    return ir.where(takes_left, ir.ONE, ir.ZERO), ir.where(takes_left, ir.ZERO, ir.ONE)


def _clip_partials(node: Node) -> tuple[Node | None, ...]:
    x, low, high = node.args
    below, above = ir.compare("<", x, low), ir.compare(">", x, high)
    inside = ir.logical_and(ir.logical_not(below), ir.logical_not(above))
    return (
        ir.where(inside, ir.ONE, ir.ZERO),
        ir.where(ir.logical_and(below, ir.compare("<=", low, high)), ir.ONE, ir.ZERO),
        ir.where(ir.logical_or(above, ir.compare("<", high, low)), ir.ONE, ir.ZERO),
    )


def depends_on_pi(node: Node) -> bool:
    """Whether the value moves with pi along a path that gradients flow through."""
    return id(node) in active_set(node)


def active_set(*roots: Node) -> set[int]:
    """The ids of all nodes below the roots that gradients flow through."""
    active: set[int] = set()
    for node in ir.topological(*roots):
        if (node.op == "logp" and node.attr == "pi") or (node.op == "logratio" and node.attr in ("r", "rho")):
            active.add(id(node))
        elif node.op != "sg" and not node.is_bool:
            moving = node.args[1:] if node.op == "where" else node.args
            if any(id(a) in active for a in moving):
                active.add(id(node))
    return active


_TRUTH: Range = (0.0, 1.0)

PRIMITIVES: dict[str, Primitive] = {
    "add": Primitive(
        np.add,
        lambda n: (ir.ONE, ir.ONE),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        "{0} + {1}",
        "{0} + {1}",
        SUM,
        (SUM, PRODUCT),
    ),
    "sub": Primitive(
        np.subtract,
        lambda n: (ir.ONE, ir.const(-1)),
        lambda a, b: (a[0] - b[1], a[1] - b[0]),
        "{0} - {1}",
        "{0} - {1}",
        SUM,
        (SUM, PRODUCT),
    ),
    "mul": Primitive(
        np.multiply,
        lambda n: (n.args[1], n.args[0]),
        _products,
        "{0} * {1}",
        "{0} * {1}",
        PRODUCT,
        (PRODUCT, UNARY),
    ),
    "div": Primitive(
        _div,
        lambda n: (ir.div(ir.ONE, n.args[1]), ir.neg(ir.div(n, n.args[1]))),
        _quotient,
        "div({0}, {1})",
        "div({0}, {1})",
    ),
    "neg": Primitive(np.negative, lambda n: (ir.const(-1),), lambda a: (-a[1], -a[0]), "-{0}", "-{0}", UNARY, (UNARY,)),
    "pow": Primitive(
        _pow,
        lambda n: (
            ir.mul(n.args[1], ir.power(n.args[0], ir.sub(n.args[1], ir.ONE))),
            ir.mul(n, ir.log(n.args[0])),
        ),
        _power,
        "{0} ** {1}",
        "pow({0}, {1})",
        POWER,
        (ATOM, UNARY),
    ),
    "exp": Primitive(
        lambda a: np.exp(np.minimum(a, EXP_CEILING)),
        lambda n: (n,),
        lambda a: (_exp(a[0]), _exp(a[1])),
        "exp({0})",
        "exp({0})",
    ),
    "log": Primitive(
        lambda a: np.log(np.maximum(a, LOG_FLOOR)),
        lambda n: (ir.div(ir.ONE, n.args[0]),),
        lambda a: (_log(a[0]), _log(a[1])),
        "log({0})",
        "log({0})",
    ),
    # log(max(bound, 0)), -inf for a bound at or below 0: only ever compared with
    "log_bound": Primitive(
        lambda a: np.log(np.maximum(a, 0.0)),
        _flat,
        lambda a: (-math.inf if a[0] <= 0 else math.log(a[0]), -math.inf if a[1] <= 0 else math.log(a[1])),
        "log_bound({0})",
        "Math.log(Math.max({0}, 0))",
    ),
    "abs": Primitive(
        np.abs,
        lambda n: (
            ir.where(
                ir.compare("<", n.args[0], ir.ZERO),
                ir.const(-1),
                ir.where(ir.compare("==", n.args[0], ir.ZERO), ir.ZERO, ir.ONE),
            ),
        ),
        _abs,
        "torch.abs({0})",
        "Math.abs({0})",
    ),
    "sqrt": Primitive(
        lambda a: np.sqrt(np.maximum(a, 0.0)),
        lambda n: (ir.div(ir.ONE, ir.mul(ir.const(2), n)),),
        lambda a: (math.sqrt(max(a[0], 0.0)), math.sqrt(max(a[1], 0.0))),
        "torch.sqrt(torch.clamp({0}, min=0.0))",
        "Math.sqrt(Math.max({0}, 0))",
    ),
    "sigmoid": Primitive(
        lambda a: np.exp(-np.logaddexp(0.0, -a)),
        lambda n: (ir.mul(n, ir.sub(ir.ONE, n)),),
        lambda a: (_sigmoid(a[0]), _sigmoid(a[1])),
        "torch.sigmoid({0})",
        "1 / (1 + Math.exp(-{0}))",
    ),
    "tanh": Primitive(
        np.tanh,
        lambda n: (ir.sub(ir.ONE, ir.mul(n, n)),),
        lambda a: (math.tanh(a[0]), math.tanh(a[1])),
        "torch.tanh({0})",
        "Math.tanh({0})",
    ),
    "sg": Primitive(lambda a: a, _flat, lambda a: a, "{0}", "{0}"),
    "min": Primitive(
        np.minimum,
        lambda n: _tie(n, ir.compare("<=", *n.args)),
        lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
        "minimum({0}, {1})",
        "Math.min({0}, {1})",
    ),
    "max": Primitive(
        np.maximum,
        lambda n: _tie(n, ir.compare(">=", *n.args)),
        lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
        "maximum({0}, {1})",
        "Math.max({0}, {1})",
    ),
    "clip": Primitive(
        lambda x, low, high: np.minimum(np.maximum(x, low), high),
        _clip_partials,
        lambda x, low, high: (min(max(x[0], low[0]), high[0]), min(max(x[1], low[1]), high[1])),
        "clip({0}, {1}, {2})",
        "Math.min(Math.max({0}, {1}), {2})",
    ),
    "where": Primitive(
        np.where,
        lambda n: (None, ir.where(n.args[0], ir.ONE, ir.ZERO), ir.where(n.args[0], ir.ZERO, ir.ONE)),
        lambda c, a, b: (min(a[0], b[0]), max(a[1], b[1])),
        "torch.where({0}, {1}, {2})",
        "{0} ? {1} : {2}",
    ),
    "lt": Primitive(np.less, _flat, lambda a, b: _TRUTH, "{0} < {1}", "{0} < {1}", COMPARE, (SUM, SUM)),
    "le": Primitive(np.less_equal, _flat, lambda a, b: _TRUTH, "{0} <= {1}", "{0} <= {1}", COMPARE, (SUM, SUM)),
    "eq": Primitive(np.equal, _flat, lambda a, b: _TRUTH, "{0} == {1}", "{0} === {1}", COMPARE, (SUM, SUM)),
    "and": Primitive(np.logical_and, _flat, lambda a, b: _TRUTH, "{0} & {1}", "{0} && {1}", AND, (UNARY, UNARY)),
    "or": Primitive(np.logical_or, _flat, lambda a, b: _TRUTH, "{0} | {1}", "{0} || {1}", OR, (UNARY, UNARY)),
    "not": Primitive(np.logical_not, _flat, lambda a: _TRUTH, "~{0}", "!{0}", UNARY, (UNARY,)),
}


def interval(root: Node, ranges: Callable[[Node], Range | None] = lambda node: None) -> Range:
    """The range of a real expression from the ranges of its leaves.

    `ranges` may narrow any node (a parameter's bounds, an assumption); else a log-prob is at most 0, counts are at
    least 0 and other leaves are unbounded. A reduction has the range of what it reduces, a sum that of its sign.
    """
    known: dict[int, Range] = {}
    for node in ir.topological(root):
        given = ranges(node)
        known[id(node)] = given if given is not None else _range(node, [known[id(a)] for a in node.args])
    return known[id(root)]


def _range(node: Node, args: list[Range]) -> Range:
    match node.op:
        case "const":
            assert not isinstance(node.attr, str | tuple) and node.attr is not None
            return float(node.attr), float(node.attr)
        case "logp":
            return -math.inf, 0.0
        case "input" if node.attr in COUNTS:
            return 0.0, math.inf
        case "param" | "logratio" | "input":
            return -math.inf, math.inf
        case "true" | "false":
            return _TRUTH
        case "reduce":
            assert isinstance(node.attr, tuple)
            low, high = args[0]
            match node.attr[0]:
                case "sum":
                    return (0.0 if low >= 0 else -math.inf), (0.0 if high <= 0 else math.inf)
                case "std":
                    return 0.0, math.inf
                case "any":
                    return _TRUTH
            return min(low, 0.0), max(high, 0.0)  # an empty reduction is 0
    return PRIMITIVES[node.op].interval(*args)


# Inputs that count something: whole, never negative.
COUNTS = frozenset({"len", "n_tokens", "n_seqs", "n_groups", "group_size", "group_tokens"})
