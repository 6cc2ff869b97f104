"""Every reduction of the runtime against plain Python, in all layouts that have it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lossdsl.runtime.layouts import Answers, Packed, Padded, div, exp, log, log_bound

NAN = math.nan

# Answers of 3, 1, 0 and 4 live tokens in groups 0, 0, 1, 1; two or three turns each; one value per token and per answer.
TOKENS = [[0.5, -2.0, 1.0], [3.0], [], [0.25, 0.25, -1.0, 4.0]]
TURNS = [[0, 0, 1], [0], [], [0, 1, 1, 2]]
GROUPS = [0, 0, 1, 1]
WIDTH = 5


def padded(fill: float = NAN) -> tuple[Padded, Tensor]:
    """The layout and the tokens' values, with `fill` in every masked slot."""
    x, mask = torch.full((4, WIDTH), fill, dtype=torch.float64), torch.zeros(4, WIDTH, dtype=torch.bool)
    turns = torch.zeros(4, WIDTH, dtype=torch.long)
    for i, row in enumerate(TOKENS):
        x[i, : len(row)], mask[i, : len(row)] = torch.tensor(row, dtype=torch.float64), True
        turns[i, : len(row)] = torch.tensor(TURNS[i], dtype=torch.long)
    return Padded(mask, torch.tensor(GROUPS), turns, torch.float64), x


def packed(fill: float = NAN) -> tuple[Packed, Tensor]:
    """The same in one row, the last answer first, with dead tokens of no answer between; the empty answer is not there."""
    values, owner, group, turn, mask = [fill], [-1], [-1], [-1], [False]
    for i in (3, 0, 1):
        for x, t in zip(TOKENS[i], TURNS[i], strict=True):
            values, owner, mask = [*values, x, fill], [*owner, i, -1], [*mask, True, False]
            group, turn = [*group, GROUPS[i], -1], [*turn, 3 * i + t, -1]
    ids = [torch.tensor(v) for v in (owner, group, turn)]
    return Packed(torch.tensor(mask), *ids, torch.float64), torch.tensor(values, dtype=torch.float64)


def std(x: Sequence[float], ddof: float = 1) -> float:
    mean = sum(x) / len(x)
    return math.sqrt(sum((v - mean) ** 2 for v in x) / (len(x) - ddof)) if len(x) > ddof else 0.0


def quantile(x: Sequence[float], q: float = 0.3) -> float:
    at = q * (len(x) - 1)
    ordered, low = sorted(x), math.floor(at)
    return ordered[low] + (at - low) * (ordered[math.ceil(at)] - ordered[low])


REDUCERS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum, "mean": statistics.fmean, "max": max, "min": min, "std": std, "quantile": quantile,
}  # fmt: skip


def extra(kind: str) -> tuple[float, ...]:
    return {"std": (1.0,), "quantile": (0.3,)}.get(kind, ())


def over(kind: str, values: Sequence[float]) -> float:
    """The reduction of a list; of an empty one 0."""
    return float(REDUCERS[kind](values)) if values else 0.0


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("kind", REDUCERS)
def test_over_an_answer_s_tokens(layout: Callable[[], tuple[Padded | Packed, Tensor]], kind: str) -> None:
    ax, x = layout()
    found = getattr(ax, f"{kind}_t")(x, *extra(kind)).expand(ax.mask.shape)
    for i, row in enumerate(TOKENS):
        at = ax.mask[i] if isinstance(ax, Padded) else ax.tokens.ids.eq(i) & ax.mask
        mine = found[i][at] if isinstance(ax, Padded) else found[at]
        assert mine.tolist() == pytest.approx([over(kind, row)] * len(row))
    if isinstance(ax, Padded) and kind != "quantile":
        assert getattr(ax, f"{kind}_t")(x, *extra(kind))[2].tolist() == [0.0]  # over nothing


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("kind", REDUCERS)
def test_over_a_turn(layout: Callable[[], tuple[Padded | Packed, Tensor]], kind: str) -> None:
    ax, x = layout()
    found = getattr(ax, f"{kind}_s")(x, *extra(kind))[ax.mask]
    order = [3, 0, 1] if isinstance(ax, Packed) else [0, 1, 2, 3]
    wanted = []
    for i in order:
        for t in TURNS[i]:
            wanted.append(over(kind, [v for v, s in zip(TOKENS[i], TURNS[i], strict=True) if s == t]))
    assert found.tolist() == pytest.approx(wanted)


PER_ANSWER = [2.0, -1.0, 7.0, 3.0]


@pytest.mark.parametrize("kind", [*REDUCERS, "loo"])
def test_over_a_group_an_empty_answer_is_a_member(kind: str) -> None:
    ax, _ = padded()
    x = torch.tensor(PER_ANSWER, dtype=torch.float64)[:, None]
    found = getattr(ax, f"{kind}_g")(x, *extra(kind))
    assert found.shape == (4, 1)
    members = [[2.0, -1.0], [2.0, -1.0], [7.0, 3.0], [7.0, 3.0]]
    if kind == "loo":
        wanted = [-1.0, 2.0, 3.0, 7.0]
    else:
        wanted = [over(kind, m) for m in members]
    assert found[:, 0].tolist() == pytest.approx(wanted)
    flat = Answers(torch.tensor(GROUPS))
    assert getattr(flat, f"{kind}_g")(x[:, 0], *extra(kind)).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("kind", REDUCERS)
def test_over_a_group_of_packed_answers_each_answer_counts_once(kind: str) -> None:
    ax, _ = packed()
    x = torch.tensor(PER_ANSWER, dtype=torch.float64)[ax.tokens.ids]
    found = getattr(ax, f"{kind}_g")(x, *extra(kind))
    for i, members in ((0, [2.0, -1.0]), (1, [2.0, -1.0]), (3, [3.0])):
        assert found[ax.mask & ax.tokens.ids.eq(i)].tolist() == pytest.approx([over(kind, members)] * len(TOKENS[i]))


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("kind", REDUCERS)
def test_over_the_batch_each_item_of_the_axis_counts_once(
    layout: Callable[[], tuple[Padded | Packed, Tensor]], kind: str
) -> None:
    ax, x = layout()
    turns = [[sum(v for v, s in zip(row, ids, strict=True) if s == t) for t in sorted(set(ids))]
             for row, ids in zip(TOKENS, TURNS, strict=True)]  # fmt: skip
    sums = [sum(row) for row in TOKENS if row or isinstance(ax, Padded)]  # packed, an empty answer has no place
    groups = [sum(TOKENS[0]) + sum(TOKENS[1]), sum(TOKENS[3])]
    wanted = {
        "token": (x, [v for row in TOKENS for v in row]),
        "segment": (ax.sum_s(x), [v for row in turns for v in row]),
        "sequence": (ax.sum_t(x), sums),
        "group": (ax.sum_g(ax.sum_t(x)), groups),
    }
    for axis, (values, items) in wanted.items():
        found = getattr(ax, f"{kind}_b")(values, *extra(kind), axis)
        assert float(found) == pytest.approx(over(kind, items)), axis


def test_a_group_whose_first_answer_is_empty_is_still_a_group() -> None:
    ax = Padded(torch.tensor([[False], [True], [True]]), torch.tensor([0, 0, 1]), None, torch.float64)
    assert float(ax.sum_b(torch.ones(3, 1), "group")) == 2.0


@pytest.mark.parametrize("layout", [padded, packed])
def test_any(layout: Callable[[], tuple[Padded | Packed, Tensor]]) -> None:
    ax, x = layout()
    assert bool((ax.any_t(x > 2)[ax.mask] if isinstance(ax, Packed) else ax.any_t(x > 2)[1]).any())
    assert bool(ax.any_b(x > 3.5, "token")) and not bool(ax.any_b(x > 4, "token"))
    assert ax.any_s(x > 3.5).expand(ax.mask.shape)[ax.mask].sum() == 1
    assert ax.any_g(ax.any_t(x > 3.5)).expand(ax.mask.shape)[ax.mask].sum() == 4


@pytest.mark.parametrize("value", [0.1, 0.7, -123.456])
@pytest.mark.parametrize("n", [3, 7, 33])
def test_equal_values_have_exactly_that_mean_and_no_spread(value: float, n: int) -> None:
    """In float32 a plain mean of seven 0.7 is off by one ulp, and an advantage divided by a tiny spread is not 0."""
    ax, x = Answers(torch.zeros(n, dtype=torch.long)), torch.full((n,), value)
    for mean in (ax.mean_g(x), ax.loo_g(x), ax.mean_b(x, "sequence").expand(n)):
        assert torch.equal(mean, x)
    assert not bool(ax.std_g(x).any()) and float(ax.std_b(x, 1, "sequence")) == 0.0


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_nothing_at_all(shape: tuple[int, int]) -> None:
    ax = Padded(torch.zeros(shape, dtype=torch.bool), torch.arange(shape[0]), None, torch.float64)
    x = torch.zeros(shape, dtype=torch.float64)
    for kind in REDUCERS:
        assert not bool(getattr(ax, f"{kind}_t")(x, *extra(kind)).any())
        assert float(getattr(ax, f"{kind}_b")(x, *extra(kind), "token")) == 0.0


def test_safe_arithmetic() -> None:
    assert exp(torch.tensor([1e9, 0.0, -1e9])).tolist() == pytest.approx([math.exp(20), 1.0, 0.0])
    assert torch.isfinite(log(torch.tensor([0.0, -1.0]))).all()
    assert div(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])).tolist() == [0.0, 0.0]
    assert float(div(1, torch.tensor(4.0))) == 0.25
    assert [log_bound(x) for x in (0.0, -1.0)] == [-math.inf] * 2
    assert log_bound(torch.tensor([0.0, 1.0])).tolist() == [-math.inf, 0.0]
