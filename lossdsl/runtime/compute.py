"""The loss as one function of tensors: what torch.compile sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .inputs import _COUNTS, _POLICY
from .layouts import Packed, Padded
from .metrics import Weights, _metrics

# === body ===


def _compute(
    cls: Any, options: tuple[bool, bool, str, bool], logp: Tensor, tensors: dict[str, Tensor], params: dict[str, Tensor]
) -> Any:
    """The whole loss, as one graph: layout, sanitising, weights, sum, gradient, metrics."""
    metrics, checking, on_missing, packed = options
    dtype = torch.float64 if logp.dtype is torch.float64 else torch.float32
    mask = tensors["mask"]
    groups, segments = tensors.get("groups"), tensors.get("segment_ids")
    ax: Any = (
        Packed(mask, tensors["seq_ids"], groups, segments, dtype) if packed else Padded(mask, groups, segments, dtype)
    )
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
    others = {
        k: clean(v)
        for k, v in tensors.items()
        if k not in raw and k not in ("mask", "groups", "seq_ids", "segment_ids") and not k.startswith("count:")
    }
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
        bad = {k: (mask & ~torch.isfinite(x)).sum() for k, x in logps.items()} | {
            k: (~torch.isfinite(x)).sum() for k, x in others.items()
        }
        bad["positive"] = torch.stack([(mask & (x > 1e-4)).sum() for x in logps.values()]).sum()
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
            found[name] = (
                torch.cat([tensors["seq_ids"], tensors["seq_ids"].new_full((1,), -1)]).amax() + 1
                if packed
                else torch.ones_like(ax.length).sum()
            ).to(dtype)
        elif name == "group_size":
            found[name] = ax.sum_g(torch.ones_like(ax.length))
        elif name == "group_tokens":
            found[name] = ax.sum_g(ax.length)
        else:
            found[name] = ax.sum_b(torch.ones_like(ax.length), "group")
    return found
