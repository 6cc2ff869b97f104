"""Laurent polynomials with rational coefficients: sums, products, and the form in which two are compared."""

from __future__ import annotations

from fractions import Fraction
from typing import TypeVar

Exact = int | Fraction  # an int wherever it is whole: ints are much faster
Monomial = tuple[tuple[int, Exact], ...]  # (atom, exponent), by atom
Poly = dict[Monomial, Exact]
Frozen = tuple[tuple[Monomial, Exact], ...]
Key = TypeVar("Key")

ONE: Monomial = ()
MAX_TERMS = 200


class GiveUp(Exception):
    """The expressions are too large for exact algebra."""


def whole(x: Exact) -> Exact:
    return int(x) if x.denominator == 1 else x


def magnitude(x: Exact) -> Exact:
    return -x if x < 0 else x


def divide(a: Exact, b: Exact) -> Exact:
    return a if b == 1 else whole(Fraction(a) / b)


def single(atom: int) -> Poly:
    """The atom itself."""
    return {((atom, 1),): 1}


def frozen(p: Poly) -> Frozen:
    """Its terms in order: hashable, and the same for equal polynomials."""
    return tuple(sorted(p.items()))


def add(p: dict[Key, Exact], q: dict[Key, Exact], scale: Exact = 1) -> dict[Key, Exact]:
    """p + scale * q, of polynomials or of any linear forms."""
    result = dict(p)
    for monomial, coefficient in q.items():
        total = result.get(monomial, 0) + scale * coefficient
        if total:
            result[monomial] = total
        else:
            result.pop(monomial, None)
    return result


def sub(p: Poly, q: Poly) -> Poly:
    return add(p, q, -1)


def mul(p: Poly, q: Poly) -> Poly:
    if len(p) * len(q) > MAX_TERMS**2:
        raise GiveUp
    result: Poly = {}
    for m, a in p.items():
        for n, b in q.items():
            exponents = dict(m)
            for atom, e in n:
                exponents[atom] = whole(exponents.get(atom, 0) + e)
            monomial = tuple(sorted((atom, e) for atom, e in exponents.items() if e))
            result = add(result, {monomial: a * b})
    return result
