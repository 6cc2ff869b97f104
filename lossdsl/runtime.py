"""What is the same in every generated module: pasted below the method's own part, word for word.

A module's own part gives `weights` (and, where it reads the next-token distribution, `distribution`,
`d_distribution` and `centre`; and its data side). This part turns them into a torch.nn.Module: it lays out padded and
packed batches, checks inputs, compiles, and hands autograd the closed-form gradient.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, ClassVar, NamedTuple

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


def _pad(x: Tensor, value: float) -> Tensor:
    """One more entry at the end, so that an empty axis has something to take the extreme of."""
    return torch.nn.functional.pad(x, (0, 1), value=value)


class Weights(NamedTuple):
    """What a method's `weights` returns; every tensor broadcasts to the tokens."""

    value: Tensor  # lambda * objective + terms
    coef: Tensor  # d value / d log pi of the sampled token
    W: Tensor | None
    T: Tensor | None
    f: Tensor | None
    ratios: dict[str, tuple[Tensor, str]]  # name -> (log of the ratio, "token" or "sequence")
    limits: dict[str, Tensor]  # where a mask, cap or floor binds
    outside: dict[str, Tensor]  # where a ratio is beyond a bound
    grads: dict[str, Tensor]  # d value / d (sum over the vocabulary)
    centre: Tensor | None  # lambda * A * kappa


class Output(NamedTuple):
    """loss: 0-dim. metrics: name -> (sum, count), 0-dim each: add them up over micro-batches and ranks, then divide."""

    loss: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]


class Prepared(NamedTuple):
    """The data side, [B] each: advantages, whether an answer enters the batch, shaped rewards."""

    advantages: Tensor
    keep: Tensor
    rewards: Tensor


# --- layouts: reductions over answers, turns, groups and the batch -------------------------------------------------------


class Segments:
    """Items that belong to segments: item i to segment ids[i], 0 <= ids[i] < number of items; only items of `live` count.

    Every reduction is spread back to the items, so nothing depends on how many segments there are and nothing syncs.
    Over no live item: sum, mean, max, min, std and quantile 0, any False.
    """

    def __init__(self, ids: Tensor, live: Tensor) -> None:
        self.ids, self.live = ids, live

    def sum(self, x: Tensor) -> Tensor:
        x = torch.where(self.live, x, 0.0)
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
    first: Tensor  # one live item per non-empty answer
    answers: Segments  # answers as items of their groups
    turns: Segments | None

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

    def items(self, axis: str) -> Tensor:
        """The mask of what counts as one item of an axis: live tokens, or one place per non-empty answer."""
        return self.mask if axis == "token" else self.first

    def _batch(self, x: Tensor, axis: str) -> tuple[Tensor, Tensor]:
        """x flat, and which of its entries are items of the axis."""
        live = self.items(axis)
        x, live = torch.broadcast_tensors(x, live)
        if axis == "group":  # one answer stands for its group
            rank = torch.arange(live.numel(), device=live.device, dtype=x.dtype)
            lead = self._grouped("min", rank.reshape(live.shape))
            live = live & (lead == rank.reshape(live.shape))
        return x.reshape(-1), live.reshape(-1)

    def _over_batch(self, kind: str, x: Tensor, axis: str, *extra: Any) -> Tensor:
        flat, live = self._batch(x, axis)
        found: Tensor = getattr(Segments(torch.zeros_like(flat, dtype=torch.long), live), kind)(flat, *extra)
        return found.max()  # one value, repeated

    def sum_b(self, x: Tensor, axis: str) -> Tensor:
        flat, live = self._batch(x, axis)
        return torch.where(live, flat, 0.0).sum()

    def mean_b(self, x: Tensor, axis: str) -> Tensor:
        flat, live = self._batch(x, axis)
        return div(torch.where(live, flat, 0.0).sum(), live.sum())

    def max_b(self, x: Tensor, axis: str) -> Tensor:
        return self._over_batch("max", x, axis)

    def min_b(self, x: Tensor, axis: str) -> Tensor:
        return self._over_batch("min", x, axis)

    def any_b(self, x: Tensor, axis: str) -> Tensor:
        flat, live = self._batch(x, axis)
        return (flat & live).any()

    def std_b(self, x: Tensor, ddof: Any, axis: str) -> Tensor:
        return self._over_batch("std", x, axis, ddof)

    def quantile_b(self, x: Tensor, q: Any, axis: str) -> Tensor:
        return self._over_batch("quantile", x, axis, q)


class Padded(Layout):
    """[B, T] with a mask; values per answer are [B, 1]."""

    def __init__(self, mask: Tensor, groups: Tensor | None, segment_ids: Tensor | None, dtype: torch.dtype) -> None:
        self.mask = mask
        self.length = mask.sum(-1, keepdim=True).to(dtype)
        self.first = self.length > 0
        rows = torch.arange(mask.shape[0], device=mask.device)
        self.answers = Segments(torch.zeros_like(rows) if groups is None else groups, torch.ones_like(rows, dtype=torch.bool))
        self.turns = None
        if segment_ids is not None:  # turns are numbered within their row
            ids = torch.clamp(segment_ids, 0, max(mask.shape[1] - 1, 0)) + rows[:, None] * mask.shape[1]
            self.turns = Segments(ids.reshape(-1), mask.reshape(-1))

    def _grouped(self, kind: str, x: Tensor, *extra: Any) -> Tensor:
        x = x.expand(self.mask.shape[0], 1)[:, 0]
        found: Tensor = getattr(self.answers, kind)(x, *extra)
        return found[:, None]

    def sum_t(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, x, 0.0).sum(-1, keepdim=True)

    def mean_t(self, x: Tensor) -> Tensor:
        return div(self.sum_t(x), self.length)

    def max_t(self, x: Tensor) -> Tensor:
        return torch.where(self.first, _pad(torch.where(self.mask, x, -math.inf), -math.inf).amax(-1, keepdim=True), 0.0)

    def min_t(self, x: Tensor) -> Tensor:
        return torch.where(self.first, _pad(torch.where(self.mask, x, math.inf), math.inf).amin(-1, keepdim=True), 0.0)

    def any_t(self, x: Tensor) -> Tensor:
        return (self.mask & x).any(-1, keepdim=True)

    def std_t(self, x: Tensor, ddof: Any = 1) -> Tensor:
        square = self.sum_t((x - self.mean_t(x)) ** 2)
        return torch.sqrt(div(square, torch.clamp(self.length - ddof, min=0.0)))

    def quantile_t(self, x: Tensor, q: Any) -> Tensor:
        rows = torch.arange(self.mask.shape[0], device=x.device)[:, None].expand(self.mask.shape)
        by_row = Segments(rows.reshape(-1) * self.mask.shape[1], self.mask.reshape(-1))
        return by_row.quantile(x.expand(self.mask.shape).reshape(-1), q).reshape(self.mask.shape)


class Packed(Layout):
    """[N] with the answer of each token; values per answer are repeated at its tokens."""

    def __init__(self, mask: Tensor, seq_ids: Tensor, groups: Tensor | None, segment_ids: Tensor | None, dtype: torch.dtype) -> None:
        self.mask = mask
        self.tokens = Segments(seq_ids, mask)
        self.length = self.tokens.sum(torch.ones_like(seq_ids, dtype=dtype))
        place = torch.arange(mask.shape[0], device=mask.device)
        first = torch.full_like(place, mask.shape[0]).scatter_reduce(0, seq_ids, torch.where(mask, place, mask.shape[0]), "amin")
        self.first = mask & (first[seq_ids] == place)
        self.answers = Segments(torch.zeros_like(seq_ids) if groups is None else groups, self.first)
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
        self.mask = self.first = torch.ones_like(groups, dtype=torch.bool)
        self.answers = Segments(groups, self.mask)
        self.turns = None

    def _grouped(self, kind: str, x: Tensor, *extra: Any) -> Tensor:
        if kind == "loo" and bool((self.answers.count(x) < 2).any()):
            raise ValueError("a leave-one-out baseline needs at least two answers per group; here a group has one")
        found: Tensor = getattr(self.answers, kind)(x, *extra)
        return found


# --- metrics ----------------------------------------------------------------------------------------------------------------


def _metrics(ax: Layout, w: Weights, logps: Mapping[str, Tensor], A: Tensor | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Everything worth watching, as sums and counts over live tokens (or non-empty answers)."""
    mask = ax.mask
    n = mask.sum()
    found: dict[str, tuple[Tensor, Tensor]] = {"tokens": (n, torch.ones_like(n)), "answers": (ax.first.sum(), torch.ones_like(n))}

    def mean(name: str, x: Tensor, live: Tensor = mask, count: Tensor = n) -> None:
        found[name] = (torch.where(live, x, 0.0).sum(), count)

    for name, (log_ratio, axis) in w.ratios.items():
        live = ax.items(axis)
        count, ratio = live.sum(), exp(log_ratio)
        mean(f"{name}/mean", ratio, live, count)
        mean(f"{name}/mean_sq", ratio * ratio, live, count)
        found[f"{name}/max"] = (_largest(ratio, live), torch.ones_like(n))
        found[f"{name}/abs_log_max"] = (_largest(log_ratio.abs(), live), torch.ones_like(n))
    for name, beyond in w.outside.items():
        live = ax.items(w.ratios[name][1])
        mean(f"{name}/outside", torch.where(beyond, 1.0, 0.0), live, live.sum())
    for name, binds in w.limits.items():
        signs = {"": torch.ones_like(mask)} if A is None else {"_pos": A > 0, "_neg": A < 0}
        for suffix, side in signs.items():
            mean(f"{name}{suffix}", torch.where(binds & side, 1.0, 0.0))
    for name, weight in (("T", w.T), ("f", w.f), ("W", w.W)):
        if weight is not None:
            mean(f"{name}/mean", weight)
    mean("W/mean_abs" if w.W is not None else "coef/mean_abs", (w.W if w.W is not None else w.coef).abs())
    for p, q in (("prox", "pi"), ("mu", "pi"), ("mu", "prox"), ("ref", "pi")):
        if p in logps and q in logps:
            d = logps[q] - logps[p]
            mean(f"kl({p}|{q})/k1", -d)
            mean(f"kl({p}|{q})/k3", exp(d) - 1 - d)
    return found


def _largest(x: Tensor, live: Tensor) -> Tensor:
    """The largest live value of something that is not negative; 0 where nothing is live."""
    return _pad(torch.where(live, x, 0.0).reshape(-1), 0.0).amax()


# --- the loss ---------------------------------------------------------------------------------------------------------------


class _Known(torch.autograd.Function):
    """A scalar whose gradient is known: backward only scales it by what comes from above."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, n: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[n:])  # the first n are the inputs, the rest their gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        gradients = ctx.saved_tensors
        return (None, None, *(upstream[0] * g for g in gradients), *(None for _ in gradients))


class _FromRows(torch.autograd.Function):
    """The loss as a function of logits: the gradient is written chunk by chunk, in backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor, write: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.write = write
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return None, ctx.write(upstream[0]), None


_POLICY = {"prox_logp": "prox", "mu_logp": "mu", "ref_logp": "ref"}
_KNOWN_INPUTS = ("prox_logp", "mu_logp", "ref_logp", "entropy", "groups", "seq_ids", "segment_ids", "mu_logprobs", "mu_topk_ids",
                 "mu_topk_logprobs", "prox_logprobs", "ref_logprobs")  # fmt: skip
_COUNTS = ("n_tokens", "n_seqs", "n_groups", "group_size", "group_tokens")


class PolicyLoss(torch.nn.Module):
    """A policy-gradient loss from a spec.

        loss = - sum over live tokens of (lambda * objective + terms)

    lambda divides by counts (`n_tokens`, `n_seqs`, ...): those of this batch, or, given as `counts`, those of the whole
    optimiser step. The loss is a plain sum divided by them, so micro-batches and ranks add up to the whole, and nobody
    divides again (`rescale` is False).

    Args of the constructor:
        compile: use torch.compile (fullgraph, dynamic shapes); False runs the same code eagerly.
        debug: check values on any device; otherwise only where that costs no synchronisation (CPU).
        metrics: also compute metrics.
        on_missing: what a live NaN or infinite sampler log-prob means: "error"; "neutral", mu := prox (pi where the loss
            reads no prox); "drop", the token contributes nothing but is still counted.
        params: the loss's own parameters, also settable later as attributes.
    """

    name: ClassVar[str]
    spec_hash: ClassVar[str]
    PARAMS: ClassVar[dict[str, tuple[float | None, float | None, float | None, str]]]
    NEEDS: ClassVar[dict[str, str]]
    INPUTS: ClassVar[dict[str, str]]
    ADVANTAGES: ClassVar[str]
    TOPK: ClassVar[bool]
    LOCAL_STATISTICS: ClassVar[str | None]
    weights: ClassVar[Callable[..., Weights]]
    distribution: ClassVar[Callable[..., dict[str, Tensor]] | None] = None
    d_distribution: ClassVar[Callable[..., Tensor] | None] = None
    centre: ClassVar[Callable[..., Tensor] | None] = None
    advantage: ClassVar[Callable[..., Tensor] | None] = None
    reward: ClassVar[Callable[..., Tensor] | None] = None
    kept: ClassVar[Callable[..., Tensor] | None] = None

    rescale: ClassVar[bool] = False
    _arguments: ClassVar[dict[str, tuple[str, ...]]]
    _compiled: ClassVar[dict[Any, Callable[..., Any]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._compiled = {}
        cls._arguments = {}
        for part in ("weights", "distribution", "d_distribution", "centre", "advantage", "reward", "kept"):
            function = getattr(cls, part, None)
            cls._arguments[part] = tuple(signature(function).parameters) if function is not None else ()

    def __init__(self, *, compile: bool = True, debug: bool = False, metrics: bool = True, on_missing: str = "error", **params: float) -> None:
        super().__init__()
        self.compiled, self.debug, self.metrics = compile, debug, metrics
        if on_missing not in ("error", "neutral", "drop"):
            raise ValueError(f'on_missing must be "error", "neutral" or "drop", not {on_missing!r}')
        self.on_missing = on_missing
        self._values: dict[str, float] = {}
        self._tensors: dict[Any, dict[str, Tensor]] = {}
        for key in params:
            if key not in self.PARAMS:
                near = difflib.get_close_matches(key, self.PARAMS, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self.PARAMS) or 'none'}"
                raise TypeError(f"{self.name} has no parameter {key!r}; {hint}")
        for key, (default, _, _, doc) in self.PARAMS.items():
            if default is None and key not in params:
                raise TypeError(f"{self.name} needs the parameter {key!r}, which has no published default{f': {doc}' if doc else ''}")
            setattr(self, key, params.get(key, default))

    def __setattr__(self, key: str, value: Any) -> None:
        if key not in self.PARAMS:
            super().__setattr__(key, value)
            return
        _, low, high, _ = self.PARAMS[key]
        number = float(value)
        if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
            raise ValueError(f"{key}={number:g} is outside [{-math.inf if low is None else low:g}, {math.inf if high is None else high:g}]")
        self._values[key] = number
        self._tensors.clear()

    def __getattr__(self, key: str) -> Any:
        if key in type(self).PARAMS and "_values" in self.__dict__:
            return self._values[key]
        return super().__getattr__(key)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tensors": {}}

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v:g}" for k, v in self._values.items())

    @property
    def needs(self) -> tuple[str, ...]:
        """The keyword inputs that a call must give, besides `mask`."""
        return tuple(self.NEEDS)

    # --- from log-probs ----------------------------------------------------------------------------------------------------

    def forward(self, logp: Tensor, *, mask: Tensor, advantages: Tensor | None = None, counts: Mapping[str, Any] | None = None, **inputs: Any) -> Output:
        """The loss from the sampled tokens' log-probs.

        Args:
            logp: [B, T], or [N] packed with `seq_ids`: log pi of each sampled token; its gradient is exact.
            mask: the same shape, bool or 0/1: which tokens are live.
            advantages: [B] or [B, T] (packed: [N]).
            counts: global counts of the optimiser step that lambda divides by, e.g. {"n_tokens": ...}.
            inputs: prox_logp, mu_logp, ref_logp like logp; entropy like logp; groups [B] (packed: [N]), ids below B (N);
                seq_ids, segment_ids; and what the spec declares. What this loss does not need is ignored.

        Raises:
            TypeError: an input that is missing or unknown. ValueError: shapes, dtypes or values that do not fit.
        """
        if self.distribution is not None or self.centre is not None:
            wanted = [n for n in self.NEEDS if n.endswith("_logprobs")]
            if wanted or self._sums() != ("entropy",):
                raise TypeError(f"{self.name} reads the whole next-token distribution ({', '.join([*wanted, 'logits'])}): call from_logits")
        given = self._inputs(logp, "logp", mask, advantages, inputs, logits=False)
        loss, gradients, metrics, _ = self._evaluate(logp, given, counts)
        tracked = [(x, gradients[k]) for k, x in (("logp", logp), ("entropy", given.get("entropy"))) if x is not None and k in gradients and x.requires_grad]
        if tracked and torch.is_grad_enabled():
            xs, gs = zip(*tracked, strict=True)
            loss = _Known.apply(loss, len(xs), *xs, *gs)
        return Output(loss, metrics)

    # --- from logits -------------------------------------------------------------------------------------------------------

    def from_logits(self, logits: Tensor, tokens: Tensor, *, mask: Tensor, advantages: Tensor | None = None, counts: Mapping[str, Any] | None = None,
                    temperature: float | Tensor = 1.0, shift: bool = False, max_chunk_bytes: int = 64 << 20, **inputs: Any) -> Output:  # fmt: skip
        """The loss from logits.

        The gradient is closed: with D(v) = d value / d log pi(v), d loss / dz = -(D - pi * sum_v D(v)) / temperature.

        Args:
            logits: [B, T, V], or [N, V] packed with `seq_ids`; those at t score tokens at t (at t + 1 with `shift`).
            tokens: [B, T] or [N]: the sampled ids.
            temperature: that of the sampler: a number, or one per row (like `tokens`).
            shift: logits[t] scores tokens[t + 1]; every other input is aligned with `tokens`, and the first position,
                which nothing scores, must not be live.
            max_chunk_bytes: bound on each float32 temporary.
            inputs: as `forward`; the sampler's distribution as mu_logprobs [..., V], or as its top k:
                mu_topk_ids and mu_topk_logprobs [..., k], the rest being taken as mu(v) = gamma pi(v).

        Raises:
            TypeError, ValueError: as `forward`.
        """
        if logits.dim() != tokens.dim() + 1 or logits.shape[:-1] != tokens.shape:
            raise ValueError(f"logits {tuple(logits.shape)} must be tokens' shape {tuple(tokens.shape)} and the vocabulary")
        if tokens.is_floating_point() or tokens.dtype is torch.bool:
            raise ValueError(f"tokens must be integer ids, not {tokens.dtype}")
        if not isinstance(temperature, Tensor) and not temperature > 0:
            raise ValueError(f"temperature must be positive, not {temperature}: at 0 a policy has no log-probs")
        if shift:
            if tokens.dim() == 1:
                logits = torch.cat([logits[:1] * 0, logits[:-1]])
            else:
                logits = torch.cat([logits[:, :1] * 0, logits[:, :-1]], 1)
            if self._checking(logits) and bool((mask[0] if mask.dim() == 1 else mask[:, 0]).any()):
                raise ValueError("with shift=True nothing scores the first position, but it is live in the mask")
        given = self._inputs(logits[..., 0], "logits", mask, advantages, inputs, logits=True)
        if self._checking(logits):
            live = tokens[given["mask"]]
            if bool(((live < 0) | (live >= logits.shape[-1])).any()):
                raise ValueError(f"a live token id lies outside the vocabulary of {logits.shape[-1]}")
            if isinstance(temperature, Tensor) and bool((temperature <= 0).any()):
                raise ValueError("temperature must be positive everywhere: at 0 a policy has no log-probs")
        rows = _Rows(self, logits, tokens, temperature, given, max_chunk_bytes)
        logp, sums = rows.forward()
        loss, gradients, metrics, centre = self._evaluate(logp, given | sums, counts)
        if centre is not None:
            loss = loss + (centre * rows.centre_value).sum()
        if logits.requires_grad and torch.is_grad_enabled():
            loss = _FromRows.apply(loss, logits, lambda upstream: rows.backward(upstream, gradients, centre))
        return Output(loss, metrics)

    # --- the data side -----------------------------------------------------------------------------------------------------

    def prepare(self, rewards: Tensor, groups: Tensor, *, lengths: Tensor | None = None, mask: Tensor | None = None, **inputs: Any) -> Prepared:
        """Shaped rewards, advantages from them, and which answers to keep, [B] each.

        Args:
            rewards: [B] raw rewards. groups: [B] the prompt of each answer, any integers.
            lengths: [B] live tokens per answer (or give `mask`), where the spec reads `len`.

        Raises:
            ValueError: shapes, NaN rewards, a leave-one-out baseline over a single answer.
            TypeError: the spec states no advantage, or reads an input that is not given.
        """
        given = {"lengths": lengths, "mask": mask, **inputs}
        shaped = self.shape(rewards, groups, **given)
        return Prepared(self._data("advantage", shaped, groups, given), self.keep(rewards, groups, **given), shaped)

    def advantages(self, rewards: Tensor, groups: Tensor, **inputs: Any) -> Tensor:
        """A of each answer, [B], from raw rewards (shaped first where the spec says so)."""
        return self._data("advantage", self.shape(rewards, groups, **inputs), groups, inputs)

    def shape(self, rewards: Tensor, groups: Tensor, **inputs: Any) -> Tensor:
        """The shaped reward of each answer, [B]."""
        return rewards if self.reward is None else self._data("reward", rewards, groups, inputs)

    def keep(self, rewards: Tensor, groups: Tensor, **inputs: Any) -> Tensor:
        """Whether each answer enters the batch, [B] bool."""
        return torch.ones_like(rewards, dtype=torch.bool) if self.kept is None else self._data("kept", rewards, groups, inputs)

    def _data(self, part: str, rewards: Tensor, groups: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        function = getattr(self, part)
        if function is None:
            raise TypeError(f"{self.name} states no {part}: its advantages come from you")
        if rewards.dim() != 1 or groups.shape != rewards.shape:
            raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must both be [B]")
        R = rewards.to(torch.float64 if rewards.dtype is torch.float64 else torch.float32)
        if bool(torch.isnan(R).any()):
            raise ValueError("a reward is NaN: drop the answer or give it a reward")
        ax = Answers(torch.unique(groups, return_inverse=True)[1])
        size = ax.answers.count(R)
        if part == "advantage" and "ax" in self._arguments[part] and bool((size == 1).any()) and self._pools(part):
            warnings.warn(f"{self.name}: a group has one answer; a baseline over it is the answer's own reward, and its advantage 0", stacklevel=3)
        mask, length = inputs.get("mask"), inputs.get("lengths")
        if length is None and mask is not None:
            length = mask.sum(-1)
        known: dict[str, Any] = {"ax": ax, "R": R, "group_size": size, "n_seqs": torch.tensor(float(R.numel())), "length": length,
                                 "n_groups": div(torch.ones_like(size), size).sum()} | self._tensors_on(R.device, R.dtype)  # fmt: skip
        known |= {k: v for k, v in inputs.items() if k in self.INPUTS}
        missing = [a for a in self._arguments[part] if known.get(a) is None]
        if missing:
            raise TypeError(f"{self.name} reads {', '.join('lengths' if m == 'length' else m for m in missing)} for its {part}")
        found: Tensor = function(**{a: known[a].to(R) if a in ("length", *self.INPUTS) else known[a] for a in self._arguments[part]})
        return found.expand(R.shape)

    def _pools(self, part: str) -> bool:
        return any("_g" in name for name in getattr(self, part).__code__.co_names)

    # --- metrics -----------------------------------------------------------------------------------------------------------

    @staticmethod
    def merge(metrics: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, tuple[Tensor, Tensor]]:
        """The metrics of several micro-batches or ranks as one: sums and counts added, the largest of each "max"."""
        merged: dict[str, tuple[Tensor, Tensor]] = {}
        for found in metrics:
            for key, (total, count) in found.items():
                if key not in merged:
                    merged[key] = (total, count)
                elif key.endswith("max"):
                    merged[key] = (torch.maximum(merged[key][0], total), count)
                elif key in ("tokens", "answers"):
                    merged[key] = (merged[key][0] + total, count)
                else:
                    merged[key] = (merged[key][0] + total, merged[key][1] + count)
        return merged

    @staticmethod
    def summary(metrics: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Plain numbers, sum / count; adds X/ess, the effective sample size as a share, mean^2 / mean of squares."""
        found = {key: float(total) / float(count) if float(count) else 0.0 for key, (total, count) in metrics.items()}
        for key in [k for k in found if k.endswith("/mean_sq")]:
            mean, square = found[key.removesuffix("_sq")], found.pop(key)
            found[key.removesuffix("mean_sq") + "ess"] = mean * mean / square if square else 0.0
        return found

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _sums(self) -> tuple[str, ...]:
        """Names of the sums over the vocabulary that `weights` reads."""
        known = {"ax", "logp", "A", "length", *_POLICY, *_COUNTS, *self.PARAMS, *self.INPUTS}
        return tuple(a for a in self._arguments["weights"] if a not in known)

    def _tensors_on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parameters as 0-dim tensors: a changed value is new data, not a new program."""
        key = (device, dtype)
        if key not in self._tensors:
            self._tensors[key] = {k: torch.tensor(v, dtype=dtype, device=device) for k, v in self._values.items()}
        return self._tensors[key]

    def _checking(self, x: Tensor) -> bool:
        return (self.debug or x.device.type == "cpu") and not torch.compiler.is_compiling()

    def _inputs(self, like: Tensor, what: str, mask: Tensor, advantages: Tensor | None, inputs: dict[str, Any], logits: bool) -> dict[str, Tensor]:
        """The inputs this loss reads, checked for presence, shape and dtype."""
        shape, packed = like.shape, inputs.get("seq_ids") is not None
        if not like.is_floating_point():
            raise ValueError(f"{what} must be floating point, not {like.dtype}")
        if like.dim() != (1 if packed else 2):
            raise ValueError(f"{what} has {like.dim()} token dimensions; it is [B, T], or [N] together with seq_ids")
        for key in inputs:
            if key not in _KNOWN_INPUTS and key not in self.INPUTS:
                near = difflib.get_close_matches(key, [*_KNOWN_INPUTS, *self.INPUTS, "advantages", "mask", "counts"], 1)
                raise TypeError(f"{self.name} does not know the input {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        given: dict[str, Any] = {k: v for k, v in inputs.items() if v is not None and (k in self.NEEDS or k in ("seq_ids", "mu_topk_ids", "mu_topk_logprobs"))}
        if inputs.get("entropy") is not None and "entropy" in self._sums() and not logits:
            given["entropy"] = inputs["entropy"]
        if advantages is not None and "advantages" in self.NEEDS:
            given["advantages"] = advantages
        for key, why in self.NEEDS.items():
            topk = key == "mu_logprobs" and "mu_topk_ids" in given and "mu_topk_logprobs" in given
            if key not in given and not topk:
                also = ", or mu_topk_ids and mu_topk_logprobs" if key == "mu_logprobs" and self.TOPK else ""
                raise TypeError(f"{self.name} needs {key}{also}: {why}")
        if "entropy" in self._sums() and not logits and "entropy" not in given:
            raise TypeError(f"{self.name} needs entropy: that of pi at each token, with its gradient; or call from_logits")
        if "mu_topk_ids" in given and "mu_logprobs" in self.NEEDS:
            if "mu_logprobs" in given:
                raise TypeError("give mu_logprobs or its top k, not both")
            if not self.TOPK:
                raise TypeError(f"{self.name} needs the sampler's full distribution: its weights are not a function of the ratio alone on the tail of a top-k one")
        given["mask"] = mask
        spans = {"mask": "token", "advantages": "either", "groups": "sequence", "entropy": "token", "seq_ids": "token", "segment_ids": "token",
                 **dict.fromkeys(_POLICY, "token"), **self.INPUTS}  # fmt: skip
        for key, x in given.items():
            if not isinstance(x, Tensor):
                x = given[key] = torch.as_tensor(x, device=like.device)
            axis = "vocabulary" if key.endswith(("_logprobs", "topk_ids")) else spans[key]
            allowed = self._shapes(axis, shape, packed) if key != "advantages" else self._advantage_shapes(shape, packed)
            if axis == "vocabulary":
                if x.shape[:-1] != shape:
                    raise ValueError(f"{key} has shape {tuple(x.shape)}; its leading dimensions must be those of the tokens, {tuple(shape)}")
            elif tuple(x.shape) not in allowed:
                raise ValueError(f"{key} has shape {tuple(x.shape)}; with {what} for tokens {tuple(shape)} it must be {' or '.join(map(str, allowed))}")
            if x.device != like.device:
                raise ValueError(f"{key} is on {x.device}, {what} on {like.device}")
        if mask.dtype is not torch.bool:
            if self._checking(mask) and not bool(((mask == 0) | (mask == 1)).all()):
                raise ValueError("mask must be bool or hold only 0 and 1: is something else passed in its place?")
            given["mask"] = mask != 0
        return given

    def _shapes(self, axis: str, shape: torch.Size, packed: bool) -> list[tuple[int, ...]]:
        if axis == "batch":
            return [()]
        return [tuple(shape)] if packed or axis in ("token", "segment") else [(shape[0],)]

    def _advantage_shapes(self, shape: torch.Size, packed: bool) -> list[tuple[int, ...]]:
        if packed:
            return [tuple(shape)]
        return {"token": [tuple(shape)], "sequence": [(shape[0],)]}.get(self.ADVANTAGES, [(shape[0],), tuple(shape)])

    def _evaluate(self, logp: Tensor, given: Mapping[str, Tensor], counts: Mapping[str, Any] | None) -> tuple[Tensor, dict[str, Tensor], Any, Tensor | None]:
        """(loss, d loss / d each of logp and the sums over the vocabulary, metrics, centring coefficient per token)."""
        checking = self._checking(logp)
        dtype = torch.float64 if logp.dtype is torch.float64 else torch.float32
        tensors = {k: v.detach() for k, v in given.items() if not k.endswith(("_logprobs", "topk_ids"))}
        tensors |= {f"count:{k}": v for k, v in self._global_counts(counts, logp).items()}
        options = (self.metrics, checking, self.on_missing, "seq_ids" in given)
        if checking:
            self._check_ids(given, logp)
        kernel = self._kernel(options)
        loss, gradients, keys, sums, ns, health, centre = kernel(logp.detach(), tensors, self._tensors_on(logp.device, dtype))
        if checking:
            self._report(dict(zip(*health, strict=True)) if health is not None else {})
        metrics = dict(zip(keys, zip(sums.unbind(), ns.unbind(), strict=True), strict=True)) if keys else {}
        return loss, gradients, metrics, centre

    def _kernel(self, options: tuple[Any, ...]) -> Callable[..., Any]:
        """The weight computation for one layout and set of options, compiled once per class."""
        if not self.compiled:
            return lambda *args: _compute(type(self), *options, *args)
        cls = type(self)
        if options not in cls._compiled:
            def kernel(logp: Tensor, tensors: dict[str, Tensor], params: dict[str, Tensor]) -> Any:
                return _compute(cls, *options, logp, tensors, params)

            cls._compiled[options] = torch.compile(kernel, fullgraph=True, dynamic=True)
        return cls._compiled[options]

    def _global_counts(self, counts: Mapping[str, Any] | None, like: Tensor) -> dict[str, Tensor]:
        used = [name for name in _COUNTS if name in self._arguments["weights"]]
        found = {}
        for key, x in (counts or {}).items():
            if key not in _COUNTS:
                raise TypeError(f"unknown count {key!r}; the counts are {', '.join(_COUNTS)}")
            if key in used:
                found[key] = torch.as_tensor(x, device=like.device)
        if counts and self.LOCAL_STATISTICS:
            raise ValueError(f"{self.name} cannot be split into micro-batches with counts: {self.LOCAL_STATISTICS}")
        spread = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        missing = [name for name in used if name.startswith("n_") and name not in found]
        if spread and missing:
            raise TypeError(f"{self.name} divides by {', '.join(missing)}: with several ranks, pass the global ones as counts={{...}} (the local ones would change the objective)")
        return found

    def _check_ids(self, given: Mapping[str, Tensor], like: Tensor) -> None:
        for key in ("groups", "seq_ids"):
            ids = given.get(key)
            if ids is not None and ids.numel() and (ids.is_floating_point() or bool((ids.min() < 0) | (ids.max() >= like.shape[0]))):
                raise ValueError(f"{key} must be integers from 0 to {like.shape[0] - 1}: number them, e.g. by torch.unique(..., return_inverse=True)")

    def _report(self, health: Mapping[str, Tensor]) -> None:
        """Turn counts of bad live values into an error."""
        for key, bad in health.items():
            if float(bad):
                if key == "positive":
                    raise ValueError("a live log-prob is above 0: log-probs are wanted, not probabilities, losses or logits")
                extra = '; on_missing="neutral" or "drop" says what it means' if key == "mu_logp" else ""
                raise ValueError(f"{key} is NaN or infinite at {int(bad)} live tokens: take them out of the mask{extra}")


def _compute(cls: Any, metrics: bool, checking: bool, on_missing: str, packed: bool, logp: Tensor, tensors: dict[str, Tensor], params: dict[str, Tensor]) -> Any:
    """The whole loss, as one graph: layout, sanitising, weights, sum, gradient, metrics."""
    dtype = torch.float64 if logp.dtype is torch.float64 else torch.float32
    mask = tensors["mask"]
    groups, segments = tensors.get("groups"), tensors.get("segment_ids")
    ax: Any = Packed(mask, tensors["seq_ids"], groups, segments, dtype) if packed else Padded(mask, groups, segments, dtype)
    live = mask

    def clean(x: Tensor) -> Tensor:
        """Float, and 0 where masked: nothing masked reaches any arithmetic."""
        x = x.to(dtype)
        return torch.where(mask if x.shape == mask.shape else ax.first[:, 0], x, 0.0) if x.dim() else x

    raw = {"logp": logp} | {k: tensors[k] for k in _POLICY if k in tensors}
    logps = {k: clean(x) for k, x in raw.items()}
    if on_missing != "error" and "mu_logp" in logps:
        missing = ~torch.isfinite(logps["mu_logp"])
        logps["mu_logp"] = torch.where(missing, logps.get("prox_logp", logps["logp"]), logps["mu_logp"])
        live = mask & ~missing if on_missing == "drop" else mask
    others = {k: clean(v) for k, v in tensors.items() if k not in raw and k not in ("mask", "groups", "seq_ids", "segment_ids") and not k.startswith("count:")}
    values: dict[str, Any] = {k: x[:, None] if x.dim() == 1 and not packed else x for k, x in others.items()}
    values["A"] = values.pop("advantages", None)
    values |= {"ax": ax, "length": ax.length} | logps | params | _counts(cls, ax, tensors, packed, dtype)
    w: Weights = cls.weights(**{k: values[k] for k in cls._arguments["weights"]})
    loss = -torch.where(live, w.value, 0.0).sum()
    gradients = {"logp": torch.where(live, -w.coef, 0.0).to(logp.dtype)}
    gradients |= {k: torch.where(live, -g, 0.0).to(tensors[k].dtype) for k, g in w.grads.items()}
    centre = None if w.centre is None else torch.where(live, w.centre, 0.0)
    found = _metrics(ax, w, {_POLICY.get(k, "pi"): x for k, x in logps.items()}, values["A"]) if metrics else {}
    keys = list(found)
    sums = torch.stack([s.to(dtype) for s, _ in found.values()]) if found else None
    ns = torch.stack([n.to(dtype) for _, n in found.values()]) if found else None
    health = None
    if checking:
        bad = {k: (mask & ~torch.isfinite(x)).sum() for k, x in logps.items()} | {k: (~torch.isfinite(x)).sum() for k, x in others.items()}
        bad["positive"] = sum((mask & (x > 1e-4)).sum() for x in logps.values())
        health = (list(bad), torch.stack(list(bad.values())))
    return loss, gradients, keys, sums, ns, health, centre


def _counts(cls: Any, ax: Any, tensors: dict[str, Tensor], packed: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The counts that the weights read: the global ones where given, else those of this batch."""
    found: dict[str, Tensor] = {}
    for name in _COUNTS:
        if name not in cls._arguments["weights"]:
            continue
        given = tensors.get(f"count:{name}")
        if given is not None:
            found[name] = given.to(dtype)[:, None] if given.dim() == 1 and not packed else given.to(dtype)
        elif name == "n_tokens":
            found[name] = ax.mask.sum().to(dtype)
        elif name == "n_seqs":
            found[name] = (torch.cat([tensors["seq_ids"], tensors["seq_ids"].new_full((1,), -1)]).amax() + 1 if packed else torch.ones_like(ax.length).sum()).to(dtype)
        elif name == "group_size":
            found[name] = ax.sum_g(torch.ones_like(ax.length))
        elif name == "group_tokens":
            found[name] = ax.sum_g(ax.length)
        else:
            found[name] = ax.sum_b(torch.ones_like(ax.length), "group")
    return found


class _Rows:
    """One pass over the logits, chunk by chunk, and the pass back that writes their gradient.

    The columns of a row are the vocabulary, or the k ids of a top-k sampler distribution and one bucket for the rest:
    there mu(v) is taken as gamma * pi(v), so that a sum over it is one term of the two masses.
    """

    def __init__(self, loss: PolicyLoss, logits: Tensor, tokens: Tensor, temperature: float | Tensor, given: Mapping[str, Tensor], max_bytes: int) -> None:
        self.loss, self.shape, self.logits = loss, logits.shape, logits.detach()
        self.dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
        n, vocab = tokens.numel(), logits.shape[-1]
        self.flat = self.logits.reshape(n, vocab)
        live = given["mask"].reshape(n)
        self.tokens = torch.where(live, tokens.reshape(n), 0).long()
        t = torch.as_tensor(temperature, dtype=self.dtype, device=logits.device)
        if t.dim() and t.shape != tokens.shape:
            t = t[:, None].expand(tokens.shape) if t.shape == tokens.shape[:1] else t
            if t.shape != tokens.shape:
                raise ValueError(f"temperature has shape {tuple(t.shape)}; it is a number, or one per answer or token of {tuple(tokens.shape)}")
        self.temperature = t.reshape(n, 1) if t.dim() else t
        self.step = max(1, max_bytes // max(vocab * (8 if self.dtype is torch.float64 else 4), 1))
        self.live = live
        parts = ("distribution", "d_distribution", "centre")
        read = {a for part in parts for a in loss._arguments[part]}
        self.extra = {k.removesuffix("_logprobs"): given[k].detach().reshape(n, given[k].shape[-1]) for k in ("mu_logprobs", "ref_logprobs", "prox_logprobs")
                      if k in given and f"log_{k.removesuffix('_logprobs')}" in read}  # fmt: skip
        for key, x in self.extra.items():
            if x.shape[1] != vocab:
                raise ValueError(f"{key}_logprobs has {x.shape[1]} columns, the logits {vocab}")
        self.ids = given["mu_topk_ids"].detach().reshape(n, given["mu_topk_ids"].shape[-1]).long() if "mu_topk_ids" in given and "log_mu" in read else None
        if self.ids is not None:
            self.extra["mu"] = given["mu_topk_logprobs"].detach().reshape(self.ids.shape)
        A = given.get("advantages")
        self.A = None if A is None else (A if A.dim() == tokens.dim() else A[:, None].expand(tokens.shape)).detach().reshape(n, 1).to(self.dtype)
        self.values = {k: given[k].detach().reshape(n, 1).to(self.dtype) for k in loss.INPUTS if k in read and given[k].shape == tokens.shape}

    def _chunks(self) -> list[slice]:
        n = self.flat.shape[0]
        pieces = max(1, -(-n // self.step))
        return [slice(n * i // pieces, n * (i + 1) // pieces) for i in range(pieces)] if n else []

    def _log_pi(self, at: slice) -> tuple[Tensor, Tensor]:
        """(log pi of the whole vocabulary, log-normaliser) of some rows; rows that are not live count as uniform."""
        z = torch.where(self.live[at, None], self.flat[at].to(self.dtype), 0.0)
        t = self.temperature[at] if self.temperature.dim() else self.temperature
        z = z / t
        lse = torch.logsumexp(z, -1, keepdim=True)
        return z - lse, lse

    def _columns(self, log_pi: Tensor, at: slice) -> dict[str, Tensor]:
        """The arguments of the vocabulary functions for some rows."""
        columns = {k: torch.where(self.live[at, None], x[at].to(self.dtype), 0.0) for k, x in self.extra.items()}
        if self.ids is not None:
            log_pi = torch.where(self.live[at, None], log_pi.gather(1, torch.where(self.live[at, None], self.ids[at], 0)), -1.0)
            rest_pi = torch.clamp(1 - log_pi.exp().sum(-1, keepdim=True), min=1e-6)
            rest_mu = torch.clamp(1 - columns["mu"].exp().sum(-1, keepdim=True), min=0.0)
            log_pi = torch.cat([log_pi, rest_pi.log()], -1)
            columns["mu"] = torch.cat([columns["mu"], rest_mu.log()], -1)
        columns["pi"] = log_pi
        found = {f"log_{k}": torch.clamp(x, -1e4, 0.0) for k, x in columns.items()}
        found |= {k: x[at] for k, x in self.values.items()} | self.loss._tensors_on(self.flat.device, self.dtype)
        if self.A is not None:
            found["A"] = torch.where(self.live[at, None], self.A[at], 0.0)
        return found

    def _call(self, part: str, columns: Mapping[str, Any]) -> Any:
        return getattr(self.loss, part)(**{k: columns[k] for k in self.loss._arguments[part]})

    def _head(self, d: Tensor, log_pi: Tensor) -> Tensor:
        """Columns with a tail bucket -> the k ids: since sum_v pi(v) s_v = 0, the tail's share moves onto the head."""
        if self.ids is None:
            return d
        return d[:, :-1] - d[:, -1:] * exp(log_pi[:, :-1] - log_pi[:, -1:])

    def forward(self) -> tuple[Tensor, dict[str, Tensor]]:
        """log pi of the sampled tokens and the sums over the vocabulary, in the tokens' shape."""
        n = self.flat.shape[0]
        logp = torch.zeros(n, dtype=self.dtype, device=self.flat.device)
        names = self.loss._sums()
        sums = {k: torch.zeros_like(logp) for k in names}
        self.centre_value = torch.zeros_like(logp)
        for at in self._chunks():
            log_pi, _ = self._log_pi(at)
            logp[at] = log_pi.gather(1, self.tokens[at, None])[:, 0]
            if self.loss.distribution is not None or self.loss.centre is not None:
                columns = self._columns(log_pi, at)
                if self.loss.distribution is not None:
                    for k, x in self._call("distribution", columns).items():
                        sums[k][at] = x.to(self.dtype)
                if self.loss.centre is not None:
                    d = self._head(self._call("centre", columns), columns["log_pi"])
                    head = columns["log_pi"][:, : d.shape[1]]
                    self.centre_value[at] = (d * head).sum(-1)
        shape = self.shape[:-1]
        self.centre_value = torch.where(self.live, self.centre_value, 0.0).reshape(shape)
        return logp.reshape(shape), {k: x.reshape(shape) for k, x in sums.items()}

    def backward(self, upstream: Tensor, gradients: Mapping[str, Tensor], centre: Tensor | None) -> Tensor:
        """d loss / d logits, in their dtype."""
        n = self.flat.shape[0]
        result = torch.empty_like(self.flat)
        coef = gradients["logp"].reshape(n, 1)
        grads = {k: g.reshape(n, 1) for k, g in gradients.items() if k != "logp"}
        weight = None if centre is None else centre.expand(self.shape[:-1]).reshape(n, 1)
        for at in self._chunks():
            log_pi, _ = self._log_pi(at)
            d: Tensor | None = None
            if grads or weight is not None:
                columns = self._columns(log_pi, at)
                if grads:
                    d = self._call("d_distribution", columns | {"grads": {k: g[at] for k, g in grads.items()}})
                if weight is not None:
                    centred = weight[at] * self._call("centre", columns)
                    d = centred if d is None else d + centred
                assert d is not None
                d = self._head(d, columns["log_pi"])
            total = coef[at] if d is None else coef[at] + d.sum(-1, keepdim=True)
            dz = -log_pi.exp() * total
            if d is not None and self.ids is None:
                dz = dz + d
            elif d is not None and self.ids is not None:
                dz.scatter_add_(1, torch.where(self.live[at, None], self.ids[at], 0), d)
            dz.scatter_add_(1, self.tokens[at, None], coef[at])
            t = self.temperature[at] if self.temperature.dim() else self.temperature
            result[at] = torch.where(self.live[at, None], dz * (upstream / t), 0.0).to(result.dtype)
        return result.reshape(self.shape)
