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
        variable = max(p, default=0)
        if variable == 0:
            if p:
                return False
            continue
        pivot = p[variable]
        pending = [add(r, p, divide(-r[variable], pivot)) if variable in r else r for r in pending]
        rows = [(add(r, p, divide(-r[variable], pivot)), s) if variable in r else (r, s) for r, s in rows]
    while True:
        rest: dict[object, tuple[Row, bool]] = {}
        for p, strict in rows:
            if any(p):  # a variable besides the number one
                scale = magnitude(p[max(p)])
                p = {v: divide(c, scale) for v, c in p.items()} if scale != 1 else p
                rest[(tuple(sorted(p.items())), strict)] = (p, strict)
            elif p.get(0, 0) < 0 or (strict and not p):
                return False
        if not rest:
            return True
        above_below: dict[int, list[int]] = {}
        for p, _ in rest.values():
            for v, c in p.items():
                if v:
                    above_below.setdefault(v, [0, 0])[c < 0] += 1
        variable = min(above_below, key=lambda v: (above_below[v][0] * above_below[v][1], v))
        above = [(p, s) for p, s in rest.values() if p.get(variable, 0) > 0]
        below = [(p, s) for p, s in rest.values() if p.get(variable, 0) < 0]
        rows = [(p, s) for p, s in rest.values() if variable not in p]
        if len(rows) + len(above) * len(below) > MAX_CONSTRAINTS:
            return True
        rows += [(add(p, q, divide(-p[variable], q[variable])), s or t) for p, s in above for q, t in below]
