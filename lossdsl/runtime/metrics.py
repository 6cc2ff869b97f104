"""What a method's `weights` returns, and the metrics that are read off it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .layouts import Layout, exp

# === body ===


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


class _Metrics(NamedTuple):
    """Every metric's sum, and the number of tokens, of answers and of anything else (1) to divide it by."""

    names: list[tuple[str, int, str]]  # name, its place in `values`, what it is counted in
    values: Tensor
    counts: dict[str, Tensor]

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """name -> (sum, count), each a tensor of its own."""
        values = self.values.unbind()
        counts = torch.stack([self.counts[item] for _, _, item in self.names]).unbind()
        return {name: (values[at], n) for (name, at, _), n in zip(self.names, counts, strict=True)}


def _metrics(ax: Layout, w: Weights, logps: Mapping[str, Tensor], A: Tensor | None) -> _Metrics:
    """Everything worth watching, over live tokens (or answers: one without tokens has no ratio).

    What is summed is summed in each row first and then, for all metrics at once, over the rows: so they share the
    loss's own loop over rows.
    """
    live = {"token": ax.mask, "sequence": ax.first}
    rows = {item: ax.rows(1.0, where) for item, where in live.items()}
    found = {"tokens": (rows["token"], "batch"), "answers": (rows["sequence"], "batch")}
    largest = set()

    def mean(name: str, x: Tensor, item: str = "token") -> None:
        found[name] = (ax.rows(x, live[item]), item)

    def share(name: str, x: Tensor, item: str = "token") -> None:
        found[name] = (ax.rows(1.0, live[item] & x), item)

    def top(name: str, x: Tensor, item: str) -> None:
        """The largest of what is not negative; 0 where nothing is live."""
        x = torch.where(live[item], x, 0.0)
        found[name] = (x.amax(-1) if x.shape[-1] else x.sum(-1), "batch")
        largest.add(name)

    for name, (log_ratio, item) in w.ratios.items():
        ratio = exp(log_ratio)
        mean(f"{name}/mean", ratio, item)
        mean(f"{name}/mean_sq", ratio * ratio, item)
        top(f"{name}/max", ratio, item)
        top(f"{name}/abs_log_max", log_ratio.abs(), item)
    for name, beyond in w.outside.items():
        share(f"{name}/outside", beyond, w.ratios[name][1])
    for name, binds in w.limits.items():
        if A is None:
            share(name, binds)
        else:
            share(f"{name}_pos", binds & (A > 0))
            share(f"{name}_neg", binds & (A < 0))
    for name, weight in (("T", w.T), ("f", w.f), ("W", w.W)):
        if weight is not None:
            mean(f"{name}/mean", weight)
    if w.W is not None:
        share("W/zero", w.W == 0)
    mean("W/mean_abs" if w.W is not None else "coef/mean_abs", (w.W if w.W is not None else w.coef).abs())
    for p, q in (("prox", "pi"), ("mu", "pi"), ("mu", "prox"), ("ref", "pi")):
        if p in logps and q in logps:
            d = logps[q] - logps[p]
            mean(f"kl({p}|{q})/k1", -d)
            mean(f"kl({p}|{q})/k3", exp(d) - 1 - d)

    order = sorted(found, key=lambda name: name in largest)  # sums first
    split = len(found) - len(largest)
    sums = torch.stack([found[name][0].to(ax.length.dtype) for name in order[:split]])
    values = sums.sum(-1) if sums.dim() == 2 else sums
    if largest:
        tops = torch.stack([found[name][0] for name in order[split:]])
        tops = tops if tops.dim() == 1 else tops.amax(-1) if tops.shape[-1] else tops.sum(-1)
        values = torch.cat([values, tops.to(values.dtype)])
    counts = {item: x.sum() for item, x in rows.items()} | {"batch": torch.ones_like(values[0])}
    return _Metrics([(name, order.index(name), found[name][1]) for name in found], values, counts)
