"""The loss as one function of tensors: what torch.compile sees."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .inputs import _COUNTS, _POLICY
from .layouts import Packed, Padded, _kept
from .metrics import Weights, _metrics

# === body ===


def _layout(tensors: dict[str, Tensor], packed: bool, dtype: torch.dtype) -> Any:
    mask, groups, segments = tensors["mask"], tensors.get("groups"), tensors.get("segment_ids")
    if mask.dtype is torch.uint8:  # a bool seen as bytes: compiled for a CPU, loading bools is slower than the loss
        mask = mask.to(torch.float32) != 0
    if packed:
        return Packed(mask, tensors["seq_ids"], groups, segments, dtype)
    return Padded(mask, groups, segments, dtype)


def _before(
    cls: Any, ax: Any, packed: bool, dtype: torch.dtype, tensors: dict[str, Tensor], params: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What no log-prob is read for: lengths, counts (the global ones where given), lambda."""
    found = {"length": ax.length}
    for name in _COUNTS:
        given = tensors.get(f"count:{name}")
        if name not in cls._arguments["weights"] and name not in cls._arguments["before"]:
            continue
        if given is not None:
            found[name] = given.to(dtype)[:, None] if given.dim() == 1 and not packed else given.to(dtype)
        elif name == "n_tokens":
            found[name] = ax.total(1.0, ax.mask)
        elif name == "n_seqs":
            found[name] = _answers(ax, tensors, packed).to(dtype)
        elif name == "group_size":
            found[name] = ax.sum_g(torch.ones_like(ax.length))
        elif name == "group_tokens":
            found[name] = ax.sum_g(ax.length)
        else:
            found[name] = ax.sum_b(torch.ones_like(ax.length), "group")
    if cls.before is not None:
        inputs = {k: tensors[k].to(dtype) for k in cls.INPUTS if k in cls._arguments["before"]}
        values: dict[str, Any] = {k: x[:, None] if x.dim() == 1 and not packed else x for k, x in inputs.items()}
        values |= {"ax": ax} | found | params
        found |= cls.before(**{k: values[k] for k in cls._arguments["before"]})
    return {name: _kept(x) for name, x in found.items()}


def _answers(ax: Any, tensors: dict[str, Tensor], packed: bool) -> Tensor:
    """How many answers there are, empty ones included as far as the layout shows them."""
    if not packed:
        return torch.full((), ax.mask.shape[0], device=ax.mask.device)
    ids = tensors["seq_ids"]
    return torch.cat([ids, ids.new_full((1,), -1)]).amax() + 1


def _live(cls: Any, packed: bool, dtype: torch.dtype, tensors: dict[str, Tensor], params: dict[str, Tensor]) -> Tensor:
    """Which tokens can have a value or a gradient, as far as is known before the forward; in the tokens' shape."""
    ax = _layout(tensors, packed, dtype)
    read = ("advantages", *cls.INPUTS, *_POLICY)
    values: dict[str, Any] = {"ax": ax, "length": ax.length} | params
    for key in read:
        if key in tensors:
            x = tensors[key].to(dtype)
            values["A" if key == "advantages" else key] = x[:, None] if x.dim() == 1 and not packed else x
    found: Tensor = cls.live(**{k: values[k] for k in cls._arguments["live"]})
    return found.expand(tensors["mask"].shape)


def _compute(
    cls: Any,
    options: tuple[bool, bool, str, bool],
    logp: Tensor,
    tensors: dict[str, Tensor],
    params: dict[str, Tensor],
) -> Any:
    """The loss, its gradient and the metrics, as one graph: on a CPU one loop over rows.

    What stands in masked slots may be anything, NaN included: no gradient is taken through these lines, every
    reduction selects live items, and what leaves is selected by the mask.
    """
    metrics, checking, on_missing, packed = options
    dtype = torch.float64 if logp.dtype is torch.float64 else torch.float32
    ax = _layout(tensors, packed, dtype)
    mask = ax.mask
    logps = {"logp": logp.to(dtype)} | {k: tensors[k].to(dtype) for k in _POLICY if k in tensors}
    plain = ("advantages", "entropy", *cls.SUMS, *cls.INPUTS)
    others = {k: tensors[k].to(dtype) for k in plain if k in tensors}
    if not packed and (metrics or others.get("advantages", mask).shape == mask.shape):
        # Every value then belongs to a row, and all that is read off it stays in one loop over rows.
        logps = {k: torch.where(ax.length > 0, x, 0.0) for k, x in logps.items()}
    live = mask
    if on_missing != "error" and "mu_logp" in logps:
        missing = ~torch.isfinite(logps["mu_logp"])
        logps["mu_logp"] = torch.where(missing, logps.get("prox_logp", logps["logp"]), logps["mu_logp"])
        live = mask & ~missing if on_missing == "drop" else mask
    values: dict[str, Any] = {k: x[:, None] if x.dim() == 1 and not packed else x for k, x in others.items()}
    values["A"] = values.pop("advantages", None)
    values |= {"ax": ax} | _before(cls, ax, packed, dtype, tensors, params) | logps | params
    w: Weights = cls.weights(**{k: values[k] for k in cls._arguments["weights"]})
    read = [values["A" if k == "advantages" else k] for k in others]
    sound = _poison(list(logps.values()), read) if checking else 0.0
    loss = 0.0 - ax.total(w.value + sound, live)  # not -total: nothing is 0, not -0
    kinds = {"logp": logp.dtype} | {k: tensors[k].dtype for k in w.grads}
    gradients = {k: torch.where(live, -g, 0.0).to(kinds[k]) for k, g in ({"logp": w.coef} | w.grads).items()}
    centre = None if w.centre is None else torch.where(live, w.centre, 0.0)
    found = _metrics(ax, w, {_POLICY.get(k, "pi"): x for k, x in logps.items()}, values["A"]) if metrics else None
    return loss, gradients, found, centre


def _poison(logps: list[Tensor], others: list[Tensor]) -> Tensor:
    """0 at each token whose inputs are sound, NaN where one is not finite or a log-prob is above 0.

    Added to the value it makes the loss NaN, in the sum that is taken anyway; `_diagnose` then finds the culprit.
    """
    highest = total = logps[0]
    for x in logps[1:]:
        total, highest = total + x, torch.maximum(highest, x)
    for x in others:
        total = total + x
    return torch.where(highest > 1e-4, math.nan, total * 0.0)
