"""Exact algebra on IR expressions, one cell at a time.

An expression with conditions is smooth inside a *cell*: a region where every comparison it makes has a known sign.
`cells` walks through all cells that can be told apart; inside one, an expression is a Laurent polynomial with
rational coefficients over *atoms* (probabilities, the advantage, parameters, counts, opaque functions), so two
expressions are equal there iff their polynomials are.

Probabilities are atoms exp(log p) > 0 and ratios are their quotients: r * c = rho needs no rule of its own.
Comparisons are decided by linear arithmetic (Fourier-Motzkin) over the monomials, each taken as a variable whose
sign is known. That is sound: a cell called infeasible is empty. It is not complete: a cell may be kept although no
real numbers satisfy it, so a difference found in it must be confirmed by numbers (`prove` does).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from . import ir
from .axes import Axis
from .feasible import satisfiable
from .ir import Node
from .polynomials import (
    MAX_TERMS,
    ONE,
    Exact,
    Frozen,
    GiveUp,
    Monomial,
    Poly,
    add,
    divide,
    frozen,
    magnitude,
    mul,
    single,
    sub,
    whole,
)
from .primitives import COUNTS, Range, interval

MAX_CELLS = 4000


@dataclass(frozen=True, eq=False)
class Fact:
    """The sign (-1, 0, 1) of left - right, whose polynomial is `poly`."""

    poly: Frozen
    sign: int
    left: Node
    right: Node


class Split(Exception):
    """The sign of left - right is not known in this cell."""

    def __init__(self, poly: Poly, left: Node, right: Node) -> None:
        super().__init__()
        self.poly, self.left, self.right = poly, left, right


@dataclass(frozen=True)
class _Atom:
    positive: bool  # > 0
    low: Exact | None  # a lower and an upper bound, if any
    high: Exact | None
    axis: Axis
    node: Node | None  # what it stands for, where that is one node


_Found = tuple[Poly, frozenset[Fact]]


class Algebra:
    """The atoms of one proof.

    `bounds` gives a parameter's (min, max). `opaque` nodes are atoms as a whole: what is equal for every value of
    them is equal for the value they have.
    """

    def __init__(self, bounds: Mapping[str, tuple[float | None, float | None]], opaque: tuple[Node, ...] = ()) -> None:
        self._bounds = bounds
        self._opaque_nodes = opaque
        self._atoms: list[_Atom] = []
        self._index: dict[Any, int] = {}
        self._signs: dict[object, tuple[int, ...]] = {}
        self._found: dict[int, list[_Found]] = {}  # node -> its polynomials, each with the facts that it rests on
        self._resting: list[set[Fact]] = []  # the facts that the nodes being expanded rest on, outermost first

    # --- atoms ----------------------------------------------------------------------------------------------------

    def _atom(
        self,
        key: object,
        positive: bool,
        axis: Axis,
        node: Node | None = None,
        low: Exact | None = None,
        high: Exact | None = None,
    ) -> Poly:
        if key not in self._index:
            self._index[key] = len(self._atoms)
            self._atoms.append(_Atom(positive, low, high, axis, node))
        return {((self._index[key], 1),): 1}

    def _opaque(self, node: Node, key: object = None) -> Poly:
        """A value taken as a whole; its range is what interval arithmetic says of it."""
        if node.is_bool:
            low, high = 0.0, 1.0
        else:
            low, high = interval(node, self._range)
        below = None if math.isinf(low) else Fraction(low).limit_denominator(10**9)
        above = None if math.isinf(high) else Fraction(high).limit_denominator(10**9)
        return self._atom(key or ("node", id(node)), low > 0, node.axis, node, below, above)

    def _range(self, node: Node) -> Range | None:
        if node.op != "param":
            return None
        low, high = self._bounds.get(str(node.attr), (None, None))
        return (-math.inf if low is None else low, math.inf if high is None else high)

    def _leaf(self, node: Node) -> Poly:
        match node.op:
            case "param":
                low, high = self._bounds.get(str(node.attr), (None, None))
                return self._atom(
                    ("leaf", id(node)),
                    low is not None and low > 0,
                    Axis.CONSTANT,
                    node,
                    None if low is None else Fraction(str(low)),
                    None if high is None else Fraction(str(high)),
                )
            case "logratio":
                above, below = ir.RATIOS[str(node.attr)]
                return sub(self._leaf(ir.logp(above, node.axis)), self._leaf(ir.logp(below, node.axis)))
            case "input" if node.attr in COUNTS:  # a live token has a live answer: counts are at least one
                return self._atom(("leaf", id(node)), True, node.axis, node, low=1)
        return self._atom(("leaf", id(node)), False, node.axis, node)

    def _exp(self, power: Poly) -> Poly:
        """e ** power as one monomial: each term c * m becomes the positive atom e ** m to the power c."""
        result: dict[int, Exact] = {}
        for monomial, coefficient in power.items():
            axis = max((self._atoms[a].axis for a, _ in monomial), default=Axis.CONSTANT)
            (((made, _),),) = self._atom(("exp", monomial), True, axis)
            result[made] = whole(coefficient)
        return {tuple(sorted(result.items())): 1}

    def _log(self, p: Poly) -> Poly | None:
        if len(p) != 1:
            return None
        ((monomial, coefficient),) = p.items()
        keys = {index: key for key, index in self._index.items()}
        if coefficient != 1 or any(not (isinstance(keys[a], tuple) and keys[a][0] == "exp") for a, _ in monomial):
            return None
        result: Poly = {}
        for atom, exponent in monomial:
            key = keys[atom]
            assert isinstance(key, tuple)
            result = add(result, {key[1]: exponent})
        return result

    def _invert(self, p: Poly) -> Poly:
        if not p:
            return {}  # x / 0 is 0
        if len(p) == 1:
            ((monomial, coefficient),) = p.items()
            return {tuple((a, -e) for a, e in monomial): divide(1, coefficient)}
        content, primitive, scale = self._primitive(p)
        axis = max(self._atoms[a].axis for m in primitive for a, _ in m)
        inverse = self._atom(("inverse", frozen(primitive)), False, axis)
        return mul(inverse, {tuple((a, -e) for a, e in content): divide(1, scale)})

    def _primitive(self, p: Poly) -> tuple[Monomial, Poly, Exact]:
        """p = scale * content * primitive: the common monomial taken out, the first coefficient made +1 or -1."""
        common: dict[int, Exact] = {}
        atoms = {a for m in p for a, _ in m}
        for atom in sorted(atoms):
            least = min(dict(m).get(atom, 0) for m in p)
            if least:
                common[atom] = least
        content = tuple(sorted(common.items()))
        divisor: Poly = {tuple((a, -e) for a, e in content): 1}
        rest = mul(p, divisor)
        scale: Exact = magnitude(rest[min(rest)])
        return content, ({m: divide(c, scale) for m, c in rest.items()} if scale != 1 else rest), scale

    # --- expressions ------------------------------------------------------------------------------------------------

    def poly(self, node: Node, facts: tuple[Fact, ...]) -> Poly:
        """The polynomial of a real expression in the cell that the facts describe.

        Raises:
            Split: a comparison in it is not decided by the facts.
            GiveUp: the polynomial is too large.
        """
        return self._poly(node, facts, {})

    def _poly(self, node: Node, facts: tuple[Fact, ...], memo: dict[int, _Found]) -> Poly:
        known = memo.get(id(node))
        if known is None:
            known = memo[id(node)] = self._remembered(node, facts) or self._fresh(node, facts, memo)
        if self._resting and known[1]:
            self._resting[-1] |= known[1]
        return known[0]

    def _remembered(self, node: Node, facts: tuple[Fact, ...]) -> _Found | None:
        """What was found in another cell still holds where the facts that it rests on hold."""
        return next((found for found in self._found.get(id(node), ()) if found[1].issubset(facts)), None)

    def _fresh(self, node: Node, facts: tuple[Fact, ...], memo: dict[int, _Found]) -> _Found:
        self._resting.append(set())
        try:
            poly = self._expand(node, facts, memo)
        finally:
            resting = self._resting.pop()
        if len(poly) > MAX_TERMS:
            raise GiveUp
        found = poly, frozenset(resting)
        self._found.setdefault(id(node), []).append(found)
        return found

    def _expand(self, node: Node, facts: tuple[Fact, ...], memo: dict[int, _Found]) -> Poly:
        if node.args and node in self._opaque_nodes:
            return self._opaque(node)
        match node.op:
            case "const":
                assert isinstance(node.attr, Fraction)
                return {ONE: whole(node.attr)} if node.attr else {}
            case "param" | "logp" | "logratio" | "input":
                return self._leaf(node)
            case "where":  # only the branch that is taken may split the cell further
                return self._poly(node.args[1] if self.truth(node.args[0], facts, memo) else node.args[2], facts, memo)
            case "reduce":
                return self._reduce(node, facts)
        args = [self._poly(a, facts, memo) for a in node.args]
        match node.op:
            case "add":
                return add(args[0], args[1])
            case "sub":
                return sub(args[0], args[1])
            case "neg":
                return sub({}, args[0])
            case "mul":
                return mul(*args)
            case "div":
                if len(args[1]) > 1 and self.sign(args[1], facts) == 0:
                    return {}
                return mul(args[0], self._invert(args[1]))
            case "pow":
                exponent = args[1].get(ONE) if set(args[1]) <= {ONE} else None
                if exponent is not None and exponent.denominator == 1 and magnitude(exponent) <= 6:
                    base = args[0] if exponent > 0 else self._invert(args[0])
                    result: Poly = {ONE: 1}
                    for _ in range(int(magnitude(exponent))):
                        result = mul(result, base)
                    return result
            case "exp":
                return self._exp(args[0])
            case "log":
                lifted = self._log(args[0])
                if lifted is not None:
                    return lifted
            case "sg":
                return args[0]
            case "abs":
                return args[0] if self._sign_or_split(args[0], node.args[0], ir.ZERO, facts) >= 0 else sub({}, args[0])
            case "min" | "max":
                sign = self._sign_or_split(sub(*args), node.args[0], node.args[1], facts)
                return args[0] if (sign <= 0) == (node.op == "min") else args[1]
            case "clip":
                x, low, high = args
                if self._sign_or_split(sub(x, low), node.args[0], node.args[1], facts) < 0:
                    x = low
                    return x if self._sign_or_split(sub(low, high), node.args[1], node.args[2], facts) <= 0 else high
                return x if self._sign_or_split(sub(x, high), node.args[0], node.args[2], facts) <= 0 else high
            case "sqrt" if not args[0]:
                return {}
        return self._opaque(node, (node.op, tuple(map(frozen, args))))

    def _reduce(self, node: Node, facts: tuple[Fact, ...]) -> Poly:
        """A sum or mean over tokens is linear; other reductions are opaque.

        What is known of one token is not known of its neighbours, so only facts about coarser values enter.
        """
        assert isinstance(node.attr, tuple)
        kind, suffix = node.attr
        if suffix != "t" or kind not in ("sum", "mean"):
            return self._opaque(node)
        coarse = tuple(f for f in facts if all(self._atoms[a].axis <= Axis.SEQUENCE for m, _ in f.poly for a, _ in m))
        try:
            inside = self.poly(node.args[0], coarse)
        except Split as split:
            if all(self._atoms[a].axis <= Axis.SEQUENCE for m in split.poly for a, _ in m):
                raise
            return self._opaque(node)
        length = self._leaf(ir.value("len", Axis.SEQUENCE))
        total: Poly = {}
        for monomial, coefficient in inside.items():
            fine = tuple((a, e) for a, e in monomial if self._atoms[a].axis > Axis.SEQUENCE)
            outside: Poly = {tuple(x for x in monomial if x not in fine): coefficient}
            summed = self._atom(("sum_t", fine), False, Axis.SEQUENCE) if fine else length
            total = add(total, mul(outside, summed))
        return total if kind == "sum" else mul(total, self._invert(length))

    # --- signs --------------------------------------------------------------------------------------------------------

    def truth(self, node: Node, facts: tuple[Fact, ...], memo: dict[int, _Found]) -> bool:
        match "opaque" if node in self._opaque_nodes else node.op:
            case "true" | "false":
                return node.op == "true"
            case "not":
                return not self.truth(node.args[0], facts, memo)
            case "and":
                return self.truth(node.args[0], facts, memo) and self.truth(node.args[1], facts, memo)
            case "or":
                return self.truth(node.args[0], facts, memo) or self.truth(node.args[1], facts, memo)
            case "lt" | "le" | "eq":
                left, right = (self._poly(a, facts, memo) for a in node.args)
                sign = self._sign_or_split(sub(left, right), node.args[0], node.args[1], facts)
                return sign < 0 if node.op == "lt" else sign <= 0 if node.op == "le" else sign == 0
        flag = self._opaque(node)  # any_t(...): true or false as a whole
        half: Poly = {ONE: Fraction(1, 2)}
        return (
            self._sign_or_split(sub(flag, half), ir.where(node, ir.ONE, ir.ZERO), ir.const(Fraction(1, 2)), facts) > 0
        )

    def _sign_or_split(self, p: Poly, left: Node, right: Node, facts: tuple[Fact, ...]) -> int:
        sign = self.sign(p, facts)
        if sign is not None:
            return sign
        content, primitive, _ = self._primitive(p)
        for atom, _ in content:  # first the factors (the advantage), then what is left
            here = self._atoms[atom]
            if not here.positive and self.sign(single(atom), facts) is None:
                raise Split(single(atom), here.node or left, ir.ZERO if here.node else right)
        raise Split(
            primitive if self._content_sign(content, facts) > 0 else {m: -c for m, c in primitive.items()}, left, right
        )

    def fact(self, left: Node, right: Node, sign: int) -> Fact | None:
        """left - right has this sign, in the form in which facts are compared; None for what has no such form.

        Raises:
            Split: a side of it branches.
        """
        p = self.poly(ir.sub(left, right), ())
        if not p:
            return None
        content, primitive, _ = self._primitive(p)
        mixed = [a for a, _ in content if not self._atoms[a].positive]
        if not mixed:
            return Fact(frozen(primitive), sign, left, right)
        if len(mixed) == 1 and dict(content)[mixed[0]] == 1 and set(primitive) == {ONE}:
            return Fact(frozen(single(mixed[0])), sign if primitive[ONE] > 0 else -sign, left, right)
        return None

    def _content_sign(self, content: Monomial, facts: tuple[Fact, ...]) -> int:
        result = 1
        for atom, exponent in content:
            if not self._atoms[atom].positive and exponent.denominator == 1 and int(exponent) % 2:
                result *= self.sign(single(atom), facts) or 0
        return result

    def sign(self, p: Poly, facts: tuple[Fact, ...]) -> int | None:
        """The sign of a polynomial everywhere in the cell: -1, 0 or 1; None where it varies or is not known."""
        if not p:
            return 0
        content, primitive, _ = self._primitive(p)
        outer = 1
        for atom, exponent in content:
            if self._atoms[atom].positive:
                continue
            sign = self._linear_sign(single(atom), facts)
            if sign == 0:
                return 0
            if sign is None or exponent.denominator != 1:
                outer = 0
            elif int(exponent) % 2:
                outer *= sign
        inner = self._linear_sign(primitive, facts)
        if inner == 0:
            return 0
        return None if inner is None or outer == 0 else inner * outer

    def _linear_sign(self, p: Poly, facts: tuple[Fact, ...]) -> int | None:
        if set(p) <= {ONE}:
            c = p.get(ONE, 0)
            return (c > 0) - (c < 0)
        key = frozen(p)
        facts = _relevant(facts, key)
        signs = self._possible(key, facts)
        if self._resting:
            self._resting[-1].update(facts)
        return signs[0] if len(signs) == 1 else None

    def _possible(self, p: Frozen, facts: tuple[Fact, ...]) -> tuple[int, ...]:
        """The signs that these facts leave p."""
        asked = (tuple((f.poly, f.sign) for f in facts), p)
        if asked not in self._signs:
            below, above = (self.feasible((*facts, Fact(p, s, ir.ZERO, ir.ZERO))) for s in (-1, 1))
            # What linear constraints leave is convex: between a point with p < 0 and one with p > 0 lies one with p = 0.
            on = (below and above) or self.feasible((*facts, Fact(p, 0, ir.ZERO, ir.ZERO)))
            self._signs[asked] = tuple(s for s, there in ((-1, below), (0, on), (1, above)) if there)
        return self._signs[asked]

    def feasible(self, facts: tuple[Fact, ...]) -> bool:
        """Whether linear arithmetic over the monomials leaves room for these facts."""
        equalities: list[Poly] = []
        inequalities: list[tuple[Poly, bool]] = []  # p > 0 (strict) or p >= 0
        for fact in facts:
            p = dict(fact.poly)
            if fact.sign == 0:
                equalities.append(p)
            else:
                inequalities.append((p if fact.sign > 0 else {m: -c for m, c in p.items()}, True))
        inequalities += self._known({m for f in facts for m, _ in f.poly})
        return satisfiable(equalities, inequalities)

    def _known(self, monomials: set[Monomial]) -> list[tuple[Poly, bool]]:
        """What holds of these monomials in every cell: signs of products of positive atoms, parameters' bounds."""
        known: list[tuple[Poly, bool]] = []
        for monomial in sorted(monomials):
            odd = [(a, e) for a, e in monomial if not self._atoms[a].positive]
            if not odd and monomial:
                known.append(({monomial: 1}, True))
            if monomial and all(e.denominator == 1 and int(e) % 2 == 0 for _, e in odd):
                known.append(({monomial: 1}, False))
            for atom, exponent in monomial:
                rest = tuple((a, e) for a, e in monomial if a != atom)
                here = self._atoms[atom]
                if exponent != 1 or any(not self._atoms[a].positive for a, _ in rest):
                    continue
                for bound, side in ((here.low, 1), (here.high, -1)):
                    if bound is not None:
                        known.append((add({monomial: Fraction(side)}, {rest: -side * bound}), False))
                        known += [({rest: 1}, True)] if rest else []
        return known

    def cells(
        self, evaluate: Callable[[tuple[Fact, ...]], object], start: tuple[Fact, ...] = ()
    ) -> Iterator[tuple[Fact, ...]]:
        """Every cell in which `evaluate` can do without a Split, depth first; positive sides first."""
        stack, seen = [start], 0
        while stack:
            facts = stack.pop()
            seen += 1
            if seen > MAX_CELLS:
                raise GiveUp
            try:
                evaluate(facts)
            except Split as split:
                p = frozen(split.poly)
                stack.extend(
                    (*facts, Fact(p, s, split.left, split.right)) for s in self._possible(p, _relevant(facts, p))
                )
            else:
                yield facts


def _relevant(facts: tuple[Fact, ...], poly: Frozen) -> tuple[Fact, ...]:
    """The facts that share a monomial with poly, directly or through others: no other fact can bear on its sign."""
    reached = {m for m, _ in poly if m}
    chosen: set[int] = set()
    grown = True
    while grown:
        grown = False
        for i, fact in enumerate(facts):
            if i not in chosen and any(m in reached for m, _ in fact.poly):
                chosen.add(i)
                reached |= {m for m, _ in fact.poly if m}
                grown = True
    return tuple(fact for i, fact in enumerate(facts) if i in chosen)
