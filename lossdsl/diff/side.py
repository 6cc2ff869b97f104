"""One side of a comparison: a method with every number filled in, under the assumptions of the question.

Two methods are compared by what multiplies what: the weight W of the score of the sampled token, the weight of the
scores of the whole vocabulary (the centring term, penalties on distributions), the normaliser, further terms, and the
data side. All are IR over the same leaves, so equal ones are often the same object.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from .. import ir
from ..autodiff import Gradient, differentiate
from ..axes import Axis
from ..ir import Node
from ..method import Method, advantage_of
from ..prove import knobs_gradient, per_entry
from ..simplify import erase
from .assume import Assumption

# What stands for a parameter that has no default where a number is needed: the first inside its bounds. None is 0 or 1,
# at which expressions fall together that are not the same.
FREE_VALUES = (0.3, 1.7, 13.0)


@dataclass(frozen=True)
class Side:
    """A method at given parameter values.

    Attributes:
        label: how the report calls it.
        token_A: the advantage is taken per token (true for both sides if it is for one).
    """

    label: str
    method: Method
    assumption: Assumption
    token_A: bool

    # --- numbers ---------------------------------------------------------------------------------------------------

    @cached_property
    def free(self) -> tuple[str, ...]:
        """Parameters without a value: they stay symbols, and a name that both sides use is one symbol."""
        return tuple(name for name, value in self.method.defaults.items() if value is None)

    @cached_property
    def values(self) -> dict[str, float]:
        """A number for each free parameter, inside its bounds: for sample points only."""
        chosen = {}
        for p in self.method.params:
            if p.default is None:
                low, high = p.min.value if p.min else -math.inf, p.max.value if p.max else math.inf
                inside = [x for x in FREE_VALUES if low <= x <= high]
                chosen[p.name.value] = inside[0] if inside else low if math.isfinite(low) else high
        return chosen

    @cached_property
    def bounds(self) -> dict[str, tuple[float | None, float | None]]:
        return {
            p.name.value: (p.min.value if p.min else None, p.max.value if p.max else None) for p in self.method.params
        }

    def resolve(self, node: Node) -> Node:
        """An expression of the spec with parameters as exact numbers, policies merged as assumed, one kind of advantage."""
        values = {n: Fraction(repr(v)) for n, v in self.method.defaults.items() if v is not None}

        def leaf(n: Node) -> Node | None:
            if n.op == "param" and n.attr in values:
                return ir.const(values[str(n.attr)])
            if n.op == "input" and n.attr == "A":
                return self.A
            return _without_logs(n) if n.is_bool else self.assumption.leaf(n)

        return ir.rewrite(ir.rewrite(node, erase), leaf)

    @cached_property
    def A(self) -> Node:
        return ir.value("A", Axis.TOKEN if self.token_A else Axis.SEQUENCE)

    # --- what is compared ---------------------------------------------------------------------------------------------

    @cached_property
    def _main(self) -> Gradient:
        """The gradient of the main part without its normaliser: A * W for the sampled token, and the vocabulary's part."""
        m = self.method
        if m.W is None:
            return differentiate(((ir.ONE, m.objective),))
        return knobs_gradient(m, normaliser=ir.ONE)

    @property
    def main(self) -> Node:
        """A * W as the spec has it, parameters and all."""
        return self._main.coef

    @cached_property
    def weighted(self) -> Node:
        """A * W: what multiplies lambda * s_y in the main part."""
        return self.resolve(self.main)

    @cached_property
    def entry(self) -> Node:
        """What multiplies lambda * grad log pi(v) for every v of the vocabulary in the main part."""
        return self.resolve(per_entry(self._main))

    def weight(self, sign: int) -> Node:
        return self.weights[0] if sign > 0 else self.weights[1]

    def _weight(self, sign: int) -> Node:
        """W for an advantage of this sign (+1 or -1); of size 1 where W depends on the size."""
        if self.method.W is not None:
            return self.at(self.resolve(self.method.W), sign)
        return self.at(self.weighted if sign > 0 else ir.neg(self.weighted), sign)

    @cached_property
    def weights(self) -> tuple[Node, Node]:
        """W for A > 0 and for A < 0."""
        return self._weight(1), self._weight(-1)

    def at(self, node: Node, sign: int) -> Node:
        """The expression at A = +1 or -1."""
        return ir.rewrite(node, lambda n: ir.const(sign) if n is self.A else None)

    @cached_property
    def kappa(self) -> Node:
        return self.resolve(self.method.kappa)

    @cached_property
    def normaliser(self) -> Node:
        return self.resolve(self.method.normaliser)

    @cached_property
    def terms(self) -> dict[str, tuple[Node, Node]]:
        """name -> (normaliser, term)."""
        return {t.name: (self.resolve(t.normaliser), self.resolve(t.add)) for t in self.method.terms}

    @cached_property
    def _terms(self) -> Gradient:
        return differentiate(tuple((t.normaliser, t.add) for t in self.method.terms))

    @cached_property
    def coef(self) -> Node:
        """dJ / d log pi of the sampled token, everything included."""
        return ir.add(ir.mul(self.normaliser, self.weighted), self.terms_coef)

    @cached_property
    def whole_entry(self) -> Node:
        """dJ / d log pi(v) beyond that, everything included."""
        return ir.add(ir.mul(self.normaliser, self.entry), self.terms_entry)

    @cached_property
    def terms_coef(self) -> Node:
        """The further terms' part of `coef`."""
        return self.resolve(self._terms.coef)

    @cached_property
    def terms_entry(self) -> Node:
        """The further terms' part of `whole_entry`."""
        return self.resolve(per_entry(self._terms))

    @cached_property
    def data(self) -> dict[str, Node | None]:
        """The data side: advantage, reward, keep."""
        m = self.method
        found = {"advantage": m.advantage, "reward": m.reward, "keep": m.keep}
        return {key: None if node is None else self.resolve(node) for key, node in found.items()}

    @cached_property
    def conditions(self) -> tuple[Node, ...]:
        """What is assumed besides merged policies."""
        return tuple(self.resolve(c) for c in self.assumption.conditions)


def _without_logs(comparison: Node) -> Node | None:
    """log x < log(1.2) -> x < 1.2, so that a bound is the same however it is written."""
    if comparison.op not in ("lt", "le"):
        return None
    sides = [_exponential(side) for side in comparison.args]
    if None in sides or all(side.op == "exp" for side in sides if side is not None):
        return None
    left, right = sides
    assert left is not None and right is not None
    return ir.compare("<" if comparison.op == "lt" else "<=", left, right)


def _exponential(node: Node) -> Node | None:
    """The x > 0 of which a node is the log, where it is plain to see."""
    if node.op in ("log", "log_bound") and isinstance(node.args[0].attr, Fraction) and node.args[0].attr > 0:
        return node.args[0]
    return ir.exp(node) if node.op in ("logratio", "logp", "sub", "reduce") else None


def sides(a: Method, b: Method, assumption: Assumption, labels: tuple[str, str] | None = None) -> tuple[Side, Side]:
    """Both sides of one question; `labels` are what the report calls them (default: the methods' names)."""
    token_A = any(advantage_of(m).axis is Axis.TOKEN for m in (a, b))
    first, second = labels or (a.name, b.name)
    if first == second:
        first, second = f"{first} (a)", f"{second} (b)"
    return Side(first, a, assumption, token_A), Side(second, b, assumption, token_A)
