"""Linear constraints: what a point satisfies is satisfiable, what adds up to a contradiction is not."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from lossdsl.feasible import satisfiable
from lossdsl.polynomials import ONE, Exact, Poly, add, single

NUMBERS = st.integers(-3, 3)
FORMS = st.lists(NUMBERS, min_size=4, max_size=4)  # a constant and the coefficients of three variables


def form(numbers: list[int]) -> Poly:
    result: Poly = {ONE: numbers[0]} if numbers[0] else {}
    for atom, coefficient in enumerate(numbers[1:]):
        result = add(result, single(atom), coefficient)
    return result


def value(numbers: list[int], point: list[Fraction]) -> Exact:
    return numbers[0] + sum((c * x for c, x in zip(numbers[1:], point, strict=True)), Fraction(0))


@given(
    st.lists(st.tuples(FORMS, st.booleans()), max_size=7), st.lists(st.fractions(-4, 4, max_denominator=6), min_size=3, max_size=3)
)  # fmt: skip
def test_what_a_point_satisfies_is_satisfiable(forms: list[tuple[list[int], bool]], point: list[Fraction]) -> None:
    equalities, inequalities = [], []
    for numbers, strict in forms:
        here = value(numbers, point)
        if here == 0 and strict:
            equalities.append(form(numbers))
        else:
            up = numbers if here >= 0 else [-x for x in numbers]
            inequalities.append((form(up), strict))
    assert satisfiable(equalities, inequalities)


@given(
    st.lists(st.tuples(FORMS, st.integers(1, 3), st.booleans()), min_size=1, max_size=4), st.lists(st.tuples(FORMS, NUMBERS), max_size=2)
)  # fmt: skip
def test_what_adds_up_to_a_contradiction_is_not(
    forms: list[tuple[list[int], int, bool]], equal: list[tuple[list[int], int]]
) -> None:
    """p_i > 0 or >= 0, q_j = 0, and yet sum c_i p_i + sum d_j q_j <= 0, or < 0 where no p_i is strict."""
    total: Poly = {}
    for numbers, scale, _ in forms:
        total = add(total, form(numbers), scale)
    for numbers, scale in equal:
        total = add(total, form(numbers), scale)
    inequalities = [(form(numbers), strict) for numbers, _, strict in forms]
    against = ({m: -c for m, c in total.items()}, not any(strict for *_, strict in forms))
    assert not satisfiable([form(q) for q, _ in equal], [*inequalities, against])
