"""Whether linear constraints over the rationals leave room, by Fourier-Motzkin elimination."""

from __future__ import annotations

from .polynomials import ONE, Exact, Monomial, Poly, add, divide, magnitude

MAX_CONSTRAINTS = 300

Row = dict[int, Exact]  # a linear form: variable -> coefficient; variable 0 is the number one


def satisfiable(equalities: list[Poly], inequalities: list[tuple[Poly, bool]]) -> bool:
    """Whether each p = 0 of `equalities` and each p > 0 (strict) or p >= 0 of `inequalities` can hold at once.

    Every monomial but 1 counts as a free variable. True also where elimination grows too large to decide.
    """
    numbers: dict[Monomial, int] = {ONE: 0}

    def row(p: Poly) -> Row:
        return {numbers.setdefault(m, len(numbers)): c for m, c in p.items()}

    pending = [row(p) for p in equalities]
    rows = [(row(p), strict) for p, strict in inequalities]
    while pending:
        p = pending.pop()
        last = max(p, default=0)
        if last == 0:
            if p:
                return False
            continue
        pending = [add(r, p, divide(-r[last], p[last])) if last in r else r for r in pending]
        rows = [(add(r, p, divide(-r[last], p[last])), s) if last in r else (r, s) for r, s in rows]
    kept: dict[object, tuple[Row, bool]] = {}  # by what they say: each constraint once
    while True:
        for p, strict in rows:
            if any(p):  # a variable besides the number one
                scale = magnitude(p[max(p)])
                p = {v: divide(c, scale) for v, c in p.items()} if scale != 1 else p
                kept[(frozenset(p.items()), strict)] = (p, strict)
            elif p.get(0, 0) < 0 or (strict and not p):
                return False
        variable = _next_variable(kept)
        if variable is None:
            return True
        above = [(p, s) for p, s in kept.values() if p.get(variable, 0) > 0]
        below = [(p, s) for p, s in kept.values() if p.get(variable, 0) < 0]
        kept = {key: (p, s) for key, (p, s) in kept.items() if variable not in p}
        if len(kept) + len(above) * len(below) > MAX_CONSTRAINTS:
            return True
        rows = [(add(p, q, divide(-p[variable], q[variable])), s or t) for p, s in above for q, t in below]


def _next_variable(kept: dict[object, tuple[Row, bool]]) -> int | None:
    """The variable that is cheapest to eliminate. Takes out of `kept` what bounds a variable from one side only."""
    while True:
        sides: dict[int, list[int]] = {}
        for p, _ in kept.values():
            for v, c in p.items():
                if v:
                    sides.setdefault(v, [0, 0])[c < 0] += 1
        free = {v for v, (above, below) in sides.items() if not above or not below}
        if not free:
            return min(sides, key=lambda v: (sides[v][0] * sides[v][1], v), default=None)
        for key in [key for key, (p, _) in kept.items() if not free.isdisjoint(p)]:
            del kept[key]
