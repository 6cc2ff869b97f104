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


def _metrics(
    ax: Layout, w: Weights, logps: Mapping[str, Tensor], A: Tensor | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Everything worth watching, as sums and counts over live tokens (or answers: one without tokens has no ratio)."""
    mask, ones = ax.mask, torch.ones_like(ax.length)
    n, answers = ax.total(ones, mask), ax.total(ones, ax.first)
    items = {"token": (mask, n), "sequence": (ax.first, answers)}
    found: dict[str, tuple[Tensor, Tensor]] = {
        "tokens": (n, torch.ones_like(n)),
        "answers": (answers, torch.ones_like(n)),
    }

    def mean(name: str, x: Tensor, live: Tensor = mask, count: Tensor = n) -> None:
        found[name] = (ax.total(x, live), count)

    for name, (log_ratio, axis) in w.ratios.items():
        (live, count), ratio = items[axis], exp(log_ratio)
        mean(f"{name}/mean", ratio, live, count)
        mean(f"{name}/mean_sq", ratio * ratio, live, count)
        found[f"{name}/max"] = (_largest(ratio, live), torch.ones_like(n))
        found[f"{name}/abs_log_max"] = (_largest(log_ratio.abs(), live), torch.ones_like(n))
    for name, beyond in w.outside.items():
        mean(f"{name}/outside", torch.where(beyond, 1.0, 0.0), *items[w.ratios[name][1]])
    for name, binds in w.limits.items():
        signs = {"": torch.ones_like(mask)} if A is None else {"_pos": A > 0, "_neg": A < 0}
        for suffix, side in signs.items():
            mean(f"{name}{suffix}", torch.where(binds & side, 1.0, 0.0))
    for name, weight in (("T", w.T), ("f", w.f), ("W", w.W)):
        if weight is not None:
            mean(f"{name}/mean", weight)
    if w.W is not None:
        mean("W/zero", torch.where(w.W == 0, 1.0, 0.0))
    mean("W/mean_abs" if w.W is not None else "coef/mean_abs", (w.W if w.W is not None else w.coef).abs())
    for p, q in (("prox", "pi"), ("mu", "pi"), ("mu", "prox"), ("ref", "pi")):
        if p in logps and q in logps:
            d = logps[q] - logps[p]
            mean(f"kl({p}|{q})/k1", -d)
            mean(f"kl({p}|{q})/k3", exp(d) - 1 - d)
    return found


def _largest(x: Tensor, live: Tensor) -> Tensor:
    """The largest live value of something that is not negative; 0 where nothing is live."""
    x = torch.where(live, x, 0.0)
    return x.amax(-1).amax() if x.numel() else x.sum()
