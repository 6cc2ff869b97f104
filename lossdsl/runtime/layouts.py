"""Safe arithmetic, and reductions over answers, turns, groups and the batch, for padded and packed batches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# === body ===


def exp(x: Tensor) -> Tensor:
    """e ** min(x, 20): no ratio overflows."""
    return torch.exp(torch.clamp(x, max=20.0))


def log(x: Tensor) -> Tensor:
    """log of max(x, 1e-37)."""
    return torch.log(torch.clamp(x, min=1e-37))


def log_bound(bound: Any) -> Any:
    """log of a bound that log-ratios are compared with: -inf where the bound is 0 or less."""
    if isinstance(bound, Tensor):
        return torch.log(torch.clamp(bound, min=0.0))
    return math.log(bound) if bound > 0 else -math.inf


def div(a: Any, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0: an empty count or a zero spread contributes nothing."""
    zero = b == 0
    return torch.where(zero, 0.0, a / torch.where(zero, 1.0, b))


def _wide(x: Tensor) -> Tensor:
    """At least float32: indicators have torch's default dtype, which a trainer may have set to a 16-bit one."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _pad(x: Tensor, value: float) -> Tensor:
    """One more entry at the end, so that an empty axis has something to take the extreme of."""
    return torch.nn.functional.pad(x, (0, 1), value=value)


def _kept(x: Tensor) -> Tensor:
    """The same values, written down: a value per answer would else be computed anew for each of its tokens."""
    return x.as_strided(x.shape, x.stride())


def _least(x: Tensor, live: Tensor) -> Tensor:
    """The smallest live value; 0 where nothing is live."""
    least = _pad(torch.where(live, x, math.inf), math.inf).amin()
    return torch.where(live.any(), least, 0.0)


# --- layouts: reductions over answers, turns, groups and the batch -------------------------------------------------------


class Segments:
    """Items that belong to segments: item i to segment ids[i], 0 <= ids[i] < number of items; only items of `live` count.

    Every reduction is spread back to the items, so nothing depends on how many segments there are and nothing syncs.
    Over no live item: sum, mean, max, min, std and quantile 0, any False.
    """

    def __init__(self, ids: Tensor, live: Tensor) -> None:
        self.ids, self.live = ids, live

    def sum(self, x: Tensor) -> Tensor:
        x = torch.where(self.live, _wide(x), 0.0)
        return torch.zeros_like(x).index_add(0, self.ids, x)[self.ids]

    def count(self, like: Tensor) -> Tensor:
        return self.sum(torch.ones_like(like))

    def mean(self, x: Tensor) -> Tensor:
        # Shifted by the smallest value, so that equal values have exactly that mean.
        least = self.min(x)
        return least + div(self.sum(x - least), self.count(x))

    def _extreme(self, x: Tensor, how: str, start: float) -> Tensor:
        x = torch.where(self.live, x, start)
        found = torch.full_like(x, start).scatter_reduce(0, self.ids, x, how)[self.ids]
        return torch.where(found == start, 0.0, found)

    def max(self, x: Tensor) -> Tensor:
        return self._extreme(x, "amax", -math.inf)

    def min(self, x: Tensor) -> Tensor:
        return self._extreme(x, "amin", math.inf)

    def any(self, x: Tensor) -> Tensor:
        return self.sum(x.to(torch.float32)) > 0

    def std(self, x: Tensor, ddof: Any = 1) -> Tensor:
        square = self.sum((x - self.mean(x)) ** 2)
        return torch.sqrt(div(square, torch.clamp(self.count(x) - ddof, min=0.0)))

    def lead(self) -> Tensor:
        """The first live item of each segment: it stands for the segment where segments are counted."""
        n = self.ids.shape[0]
        place = torch.arange(n, device=self.ids.device)
        first = torch.full_like(place, n).scatter_reduce(0, self.ids, torch.where(self.live, place, n), "amin")
        return self.live & (first[self.ids] == place)

    def loo(self, x: Tensor) -> Tensor:
        """The mean of the segment's other items."""
        least = self.min(x)
        return least + div(self.sum(x - least) - (x - least), self.count(x) - 1)

    def quantile(self, x: Tensor, q: Any) -> Tensor:
        """Linear interpolation between order statistics."""
        order = torch.argsort(torch.where(self.live, x, math.inf), stable=True)
        order = order[torch.argsort(self.ids[order], stable=True)]
        ranked, n = x[order], torch.zeros_like(x).index_add(0, self.ids, torch.ones_like(x))
        start = (torch.cumsum(n, 0) - n)[self.ids]
        at = start + q * torch.clamp(self.count(x) - 1, min=0.0)
        low, high = at.floor(), at.ceil()
        last = x.shape[0] - 1
        a, b = (ranked[torch.clamp(i, max=last).long()] for i in (low, high))
        return torch.where(self.count(x) > 0, a + (at - low) * (b - a), 0.0)


class Layout:
    """The reductions that emitted code calls, for one batch; see Padded and Packed."""

    mask: Tensor
    length: Tensor  # live tokens of each answer
    every: Tensor  # one place per answer
    first: Tensor  # one place per answer that has live tokens
    answers: Segments  # answers as items of their groups
    turns: Segments | None

    def rows(self, x: Tensor | float, live: Tensor) -> Tensor:
        """The sum of the live values of each row (of all, where the batch is packed)."""
        return torch.where(live, x, 0.0).sum(-1, dtype=self.length.dtype)

    def total(self, x: Tensor | float, live: Tensor) -> Tensor:
        """The sum of the live values, row by row: what is summed over tokens shares one loop over rows."""
        return self.rows(x, live).sum()

    def sum_g(self, x: Tensor) -> Tensor:
        return self._grouped("sum", x)

    def mean_g(self, x: Tensor) -> Tensor:
        return self._grouped("mean", x)

    def max_g(self, x: Tensor) -> Tensor:
        return self._grouped("max", x)

    def min_g(self, x: Tensor) -> Tensor:
        return self._grouped("min", x)

    def any_g(self, x: Tensor) -> Tensor:
        return self._grouped("any", x)

    def std_g(self, x: Tensor, ddof: Any = 1) -> Tensor:
        return self._grouped("std", x, ddof)

    def quantile_g(self, x: Tensor, q: Any) -> Tensor:
        return self._grouped("quantile", x, q)

    def loo_g(self, x: Tensor) -> Tensor:
        return self._grouped("loo", x)

    def _grouped(self, kind: str, x: Tensor, *extra: Any) -> Tensor:
        raise NotImplementedError

    def _turned(self, kind: str, x: Tensor, *extra: Any) -> Tensor:
        assert self.turns is not None
        x = torch.where(self.mask, x, torch.zeros_like(x))
        found: Tensor = getattr(self.turns, kind)(x.reshape(-1), *extra)
        return found.reshape(self.mask.shape)

    def sum_s(self, x: Tensor) -> Tensor:
        return self._turned("sum", x)

    def mean_s(self, x: Tensor) -> Tensor:
        return self._turned("mean", x)

    def max_s(self, x: Tensor) -> Tensor:
        return self._turned("max", x)

    def min_s(self, x: Tensor) -> Tensor:
        return self._turned("min", x)

    def any_s(self, x: Tensor) -> Tensor:
        return self._turned("any", x)

    def std_s(self, x: Tensor, ddof: Any = 1) -> Tensor:
        return self._turned("std", x, ddof)

    def quantile_s(self, x: Tensor, q: Any) -> Tensor:
        return self._turned("quantile", x, q)

    def _batch(self, x: Tensor, axis: str) -> tuple[Tensor, Tensor]:
        """x flat, and which of its entries are the items of an axis."""
        live = self.items(axis)
        shape = (x + live).shape  # a value per answer or batch spreads to the items
        return _wide(x).expand(shape).reshape(-1), live.expand(shape).reshape(-1)

    def items(self, axis: str) -> Tensor:
        """One place per item of an axis: a live token, the first of each turn, an answer, the first answer of each group."""
        if axis == "token":
            return self.mask
        if axis == "segment":
            assert self.turns is not None
            return self.turns.lead().reshape(self.mask.shape)
        return self.every if axis == "sequence" else self.answers.lead().reshape(self.every.shape)

    def sum_b(self, x: Tensor, axis: str) -> Tensor:
        flat, live = self._batch(x, axis)
        return torch.where(live, flat, 0.0).sum()

    def mean_b(self, x: Tensor, axis: str) -> Tensor:
        flat, live = self._batch(x, axis)
        least = _least(flat, live)  # equal values have exactly that mean
        return least + div(torch.where(live, flat - least, 0.0).sum(), live.sum())

    def max_b(self, x: Tensor, axis: str) -> Tensor:
        flat, live = self._batch(x, axis)
        return -_least(-flat, live)

    def min_b(self, x: Tensor, axis: str) -> Tensor:
        return _least(*self._batch(x, axis))

    def any_b(self, x: Tensor, axis: str) -> Tensor:
        flat, live = self._batch(x, axis)
        return (flat & live).any()

    def std_b(self, x: Tensor, ddof: Any, axis: str) -> Tensor:
        flat, live = self._batch(x, axis)
        square = torch.where(live, (flat - self.mean_b(x, axis)) ** 2, 0.0).sum()
        return torch.sqrt(div(square, torch.clamp(live.sum() - ddof, min=0.0)))

    def quantile_b(self, x: Tensor, q: Any, axis: str) -> Tensor:
        flat, live = self._batch(x, axis)
        found = Segments(torch.zeros_like(flat, dtype=torch.long), live).quantile(flat, q)
        return _pad(found, 0.0)[0]  # one value, repeated


class Padded(Layout):
    """[B, T] with a mask; values per answer are [B, 1]."""

    def __init__(
        self,
        mask: Tensor,
        groups: Tensor | None,
        segment_ids: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.mask = mask
        self.length = mask.to(dtype).sum(-1, keepdim=True)
        self.first = self.length > 0
        self.every = torch.ones_like(self.first)
        rows = torch.arange(mask.shape[0], device=mask.device)
        self.answers = Segments(torch.zeros_like(rows) if groups is None else groups, self.every[:, 0])
        self.turns = None
        if segment_ids is not None:  # turns are numbered within their row
            ids = torch.clamp(segment_ids, 0, max(mask.shape[1] - 1, 0)) + rows[:, None] * mask.shape[1]
            self.turns = Segments(ids.reshape(-1), mask.reshape(-1))

    def _grouped(self, kind: str, x: Tensor, *extra: Any) -> Tensor:
        x = x.expand(self.mask.shape[0], 1)[:, 0]
        found: Tensor = getattr(self.answers, kind)(x, *extra)
        return found[:, None]

    def sum_t(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, _wide(x), 0.0).sum(-1, keepdim=True)

    def mean_t(self, x: Tensor) -> Tensor:
        return _kept(div(self.sum_t(x), self.length))

    def max_t(self, x: Tensor) -> Tensor:
        return torch.where(
            self.first, _pad(torch.where(self.mask, x, -math.inf), -math.inf).amax(-1, keepdim=True), 0.0
        )

    def min_t(self, x: Tensor) -> Tensor:
        return torch.where(self.first, _pad(torch.where(self.mask, x, math.inf), math.inf).amin(-1, keepdim=True), 0.0)

    def any_t(self, x: Tensor) -> Tensor:
        return (self.mask & x).any(-1, keepdim=True)

    def std_t(self, x: Tensor, ddof: Any = 1) -> Tensor:
        square = self.sum_t((x - self.mean_t(x)) ** 2)
        return torch.sqrt(div(square, torch.clamp(self.length - ddof, min=0.0)))

    def quantile_t(self, x: Tensor, q: Any) -> Tensor:
        if not self.mask.shape[1]:
            return torch.zeros_like(self.length)
        ranked = torch.where(self.mask, x, math.inf).sort(-1).values
        at = q * torch.clamp(self.length - 1, min=0.0)
        low, high = at.floor(), at.ceil()
        a, b = (ranked.gather(-1, i.long()) for i in (low, high))
        return torch.where(self.first, a + (at - low) * (b - a), 0.0)


class Packed(Layout):
    """[N] with the answer of each token; values per answer are repeated at its tokens.

    A masked token may belong to no answer, group or turn (a negative id). An answer without live tokens has no place
    here: it is known by the counts only.
    """

    def __init__(
        self,
        mask: Tensor,
        seq_ids: Tensor,
        groups: Tensor | None,
        segment_ids: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.mask = mask
        ids, groups, segment_ids = (
            None if x is None else torch.clamp(x, min=0) for x in (seq_ids, groups, segment_ids)
        )
        assert ids is not None
        self.tokens = Segments(ids, mask)
        self.length = self.tokens.count(torch.ones_like(ids, dtype=dtype))
        self.first = self.every = self.tokens.lead()
        self.answers = Segments(torch.zeros_like(ids) if groups is None else groups, self.every)
        self.turns = None if segment_ids is None else Segments(segment_ids, mask)

    def _grouped(self, kind: str, x: Tensor, *extra: Any) -> Tensor:
        found: Tensor = getattr(self.answers, kind)(x.expand(self.mask.shape), *extra)
        return found

    def sum_t(self, x: Tensor) -> Tensor:
        return self.tokens.sum(x.expand(self.mask.shape))

    def mean_t(self, x: Tensor) -> Tensor:
        return div(self.sum_t(x), self.length)

    def max_t(self, x: Tensor) -> Tensor:
        return self.tokens.max(x)

    def min_t(self, x: Tensor) -> Tensor:
        return self.tokens.min(x)

    def any_t(self, x: Tensor) -> Tensor:
        return self.tokens.any(x)

    def std_t(self, x: Tensor, ddof: Any = 1) -> Tensor:
        return self.tokens.std(x, ddof)

    def quantile_t(self, x: Tensor, q: Any) -> Tensor:
        return self.tokens.quantile(x, q)


class Answers(Layout):
    """The data side: [B] answers in groups, no tokens."""

    def __init__(self, groups: Tensor) -> None:
        self.mask = self.every = self.first = torch.ones_like(groups, dtype=torch.bool)
        self.length = torch.ones_like(groups, dtype=torch.float32)
        self.answers = Segments(groups, self.mask)
        self.turns = None

    def _grouped(self, kind: str, x: Tensor, *extra: Any) -> Tensor:
        if kind == "loo" and bool((self.answers.count(x) < 2).any()):
            raise ValueError("a leave-one-out baseline needs at least two answers per group; here a group has one")
        found: Tensor = getattr(self.answers, kind)(x, *extra)
        return found
