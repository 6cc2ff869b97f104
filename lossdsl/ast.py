"""The syntax tree of one expression: what was written, before any name is looked up.

Nodes are immutable. `start` and `end` are offsets into the expression's own text, so that every later stage can
point at the exact place in the YAML file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Expr:
    """Any expression; `depth` is the height of the tree below it."""

    start: int
    end: int

    @property
    def children(self) -> tuple[Expr, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Number(Expr):
    value: Fraction
    text: str


@dataclass(frozen=True, slots=True)
class Name(Expr):
    id: str


@dataclass(frozen=True, slots=True)
class Index(Expr):
    """`pi[v]`: the quantity at every token of the vocabulary instead of the sampled one."""

    id: str
    axis: str


@dataclass(frozen=True, slots=True)
class Call(Expr):
    func: str
    args: tuple[Expr, ...]

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.args


@dataclass(frozen=True, slots=True)
class Unary(Expr):
    """`-x` (op "neg") or `not x` (op "not")."""

    op: str
    arg: Expr

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.arg,)


@dataclass(frozen=True, slots=True)
class Binary(Expr):
    """op is one of add sub mul div pow."""

    op: str
    left: Expr
    right: Expr

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.left, self.right)


@dataclass(frozen=True, slots=True)
class Compare(Expr):
    """A chain `a <= b < c`: len(ops) == len(operands) - 1."""

    ops: tuple[str, ...]
    operands: tuple[Expr, ...]

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.operands


@dataclass(frozen=True, slots=True)
class Between(Expr):
    """`x in [lo, hi)`: each end closed or open."""

    arg: Expr
    low: Expr
    high: Expr
    low_closed: bool
    high_closed: bool

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.arg, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Logic(Expr):
    """op is "and" or "or"."""

    op: str
    args: tuple[Expr, ...]

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.args


@dataclass(frozen=True, slots=True)
class Indicator(Expr):
    """`1[cond]`: 1 where the condition holds, else 0."""

    cond: Expr

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.cond,)


@dataclass(frozen=True, slots=True)
class Conditional(Expr):
    """`then if cond else other`."""

    cond: Expr
    then: Expr
    other: Expr

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.then, self.cond, self.other)


def walk(expr: Expr) -> Iterator[Expr]:
    """Every node of the tree, in reading order."""
    yield expr
    for child in expr.children:
        yield from walk(child)


def dump(expr: Expr) -> str:
    """The tree as one stable line of text, e.g. `(mul (call exp (name A)) 2)`."""
    match expr:
        case Number():
            return expr.text
        case Name():
            return expr.id
        case Index():
            return f"{expr.id}[{expr.axis}]"
        case Call():
            return f"({' '.join([expr.func, *map(dump, expr.args)])})"
        case Unary():
            return f"({expr.op} {dump(expr.arg)})"
        case Binary():
            return f"({expr.op} {dump(expr.left)} {dump(expr.right)})"
        case Compare():
            head = dump(expr.operands[0])
            return f"(compare {head} {' '.join(f'{o} {dump(x)}' for o, x in zip(expr.ops, expr.operands[1:], strict=True))})"
        case Between():
            ends = ("[" if expr.low_closed else "(") + ("]" if expr.high_closed else ")")
            return f"(in{ends} {dump(expr.arg)} {dump(expr.low)} {dump(expr.high)})"
        case Logic():
            return f"({expr.op} {' '.join(map(dump, expr.args))})"
        case Indicator():
            return f"(indicator {dump(expr.cond)})"
        case Conditional():
            return f"(if {dump(expr.cond)} {dump(expr.then)} {dump(expr.other)})"
    raise TypeError(type(expr).__name__)
