"""What a call brings: presence, shapes, dtypes and, where that is free, values are checked here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# === body ===


_POLICY = {"prox_logp": "prox", "mu_logp": "mu", "ref_logp": "ref"}
_COUNTS = ("n_tokens", "n_seqs", "n_groups", "group_size", "group_tokens")
_TOPK = ("mu_topk_ids", "mu_topk_logprobs")
_IDS = ("groups", "seq_ids", "segment_ids", "mu_topk_ids")

# Every input that some loss reads, and what it has one value per; a loss ignores those that it does not need.
_INPUTS = {
    **dict.fromkeys(_POLICY, "token"),
    **dict.fromkeys(("entropy", "seq_ids", "segment_ids"), "token"),
    "groups": "sequence",
    **dict.fromkeys(("mu_logprobs", "prox_logprobs", "ref_logprobs", *_TOPK), "vocabulary"),
}


def _read_inputs(
    loss: Any, like: Tensor, what: str, mask: Tensor, advantages: Tensor | None, inputs: dict[str, Any]
) -> dict[str, Tensor]:
    """The inputs that this loss reads, checked for presence, shape, dtype and device.

    `like` has the tokens' shape; `what` ("logp" or "logits") is what the caller passed.
    """
    if not like.is_floating_point():
        raise ValueError(f"{what} must be floating point, not {like.dtype}")
    packed = inputs.get("seq_ids") is not None
    if like.dim() != (1 if packed else 2):
        raise ValueError(f"{what} has {like.dim()} token dimensions; it is [B, T], or [N] together with seq_ids")
    for key in inputs:
        if key not in _INPUTS and key not in loss.INPUTS:
            near = difflib.get_close_matches(key, [*_INPUTS, *loss.INPUTS, "advantages", "mask", "counts"], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{loss.name} does not know the input {key!r}{hint}")
    given = _present(loss, {"advantages": advantages, **inputs}, what)
    given["mask"] = mask
    for key, x in given.items():
        if not isinstance(x, Tensor):
            x = given[key] = torch.as_tensor(x, device=like.device)
        _check_shape(loss, key, x, like, what, packed)
        if x.device != like.device:
            raise ValueError(f"{key} is on {x.device}, {what} on {like.device}")
        if key in _IDS:
            if x.is_floating_point() or x.dtype is torch.bool:
                raise ValueError(f"{key} must be integers, not {x.dtype}")
            given[key] = x.long()
        elif key.endswith(("_logp", "_logprobs")) and not x.is_floating_point():
            raise ValueError(f"{key} must be floating point, not {x.dtype}")
    mask = given["mask"]
    if mask.dtype is not torch.bool:
        if loss._checking(mask) and not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError("mask must be bool or hold only 0 and 1: is something else passed in its place?")
        given["mask"] = mask != 0
    return given


def _present(loss: Any, inputs: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Those inputs that this loss needs; an error says which is missing, what it is and why this loss needs it."""
    wanted = {*loss.NEEDS, "seq_ids", *(_TOPK if "mu_logprobs" in loss.NEEDS else ())}
    if what == "logp" and "entropy" in loss.SUMS:
        wanted.add("entropy")
    given = {key: x for key, x in inputs.items() if x is not None and key in wanted}
    topk = all(key in given for key in _TOPK)
    for key, why in loss.NEEDS.items():
        if key not in given and not (key == "mu_logprobs" and topk):
            also = f", or {' and '.join(_TOPK)}" if key == "mu_logprobs" and loss.TOPK else ""
            raise TypeError(f"{loss.name} needs {key}{also}: {why}")
    if "entropy" in wanted and "entropy" not in given:
        raise TypeError(f"{loss.name} needs entropy (that of pi at each token, with its gradient), or call from_logits")
    if topk and "mu_logprobs" in given:
        raise TypeError("give mu_logprobs or its top k, not both")
    if topk and not loss.TOPK:
        raise TypeError(
            f"{loss.name} needs mu's full distribution: on the tail of a top-k one, mu(v) = gamma * pi(v), "
            "its sums over the vocabulary are not functions of the two tail masses"
        )
    return given


def _check_shape(loss: Any, key: str, x: Tensor, like: Tensor, what: str, packed: bool) -> None:
    tokens, answers = tuple(like.shape), (like.shape[0],)
    axis = {"mask": "token", "advantages": loss.ADVANTAGES, **_INPUTS, **loss.INPUTS}[key]
    if axis == "vocabulary":
        if tuple(x.shape[:-1]) != tokens:
            raise ValueError(f"{key} has shape {tuple(x.shape)}; it must be {tokens} and the vocabulary, as {what} is")
        return
    if axis == "batch":
        allowed: list[tuple[int, ...]] = [()]
    elif packed or axis in ("token", "segment"):
        allowed = [tokens]
    else:
        allowed = [answers, tokens] if axis == "either" else [answers]
    if tuple(x.shape) not in allowed:
        shapes = " or ".join(map(str, allowed))
        raise ValueError(f"{key} has shape {tuple(x.shape)}; with {what} for tokens {tokens} it must be {shapes}")


def _read_counts(loss: Any, counts: Mapping[str, Any] | None, like: Tensor) -> dict[str, Tensor]:
    """The global counts that this loss divides by, as far as they are given."""
    used = [name for name in _COUNTS if name in loss._arguments["weights"] + loss._arguments["before"]]
    found = {}
    for key, x in (counts or {}).items():
        if key not in _COUNTS:
            near = difflib.get_close_matches(key, _COUNTS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the counts are {', '.join(_COUNTS)}"
            raise TypeError(f"unknown count {key!r}; {hint}")
        if key not in used:
            continue
        if not isinstance(x, Tensor):  # a number is filled in, not copied over: no wait for the device
            x = torch.full((), float(x), dtype=torch.float64, device=like.device)
        if x.dim() and (key.startswith("n_") or x.shape != like.shape[:1]):
            allowed = "0-dim" if key.startswith("n_") else f"0-dim or ({like.shape[0]},)"
            raise ValueError(f"the count {key} has shape {tuple(x.shape)}; it must be {allowed}")
        found[key] = x.to(like.device)
    if counts and loss.LOCAL_STATISTICS:
        raise ValueError(f"{loss.name} cannot be split into micro-batches with counts: {loss.LOCAL_STATISTICS}")
    parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    missing = [name for name in used if name not in found]
    parallel = parallel and torch.distributed.get_world_size() > 1
    if parallel and loss.LOCAL_STATISTICS:
        raise ValueError(f"{loss.name} cannot be split over ranks: {loss.LOCAL_STATISTICS}")
    if missing and parallel:
        raise TypeError(
            f"{loss.name} divides by {', '.join(missing)}: with several ranks pass the global ones, "
            "counts={...}; the local ones would change the objective"
        )
    return found


def _check_ids(given: Mapping[str, Tensor], like: Tensor) -> None:
    """Ids index a buffer as long as the input; where they are negative on a masked token, it belongs to nothing."""
    packed = "seq_ids" in given
    for key in ("groups", "seq_ids", "segment_ids"):
        ids = given.get(key)
        if ids is None or not ids.numel():
            continue
        size = like.shape[-1] if key == "segment_ids" else like.shape[0]
        low = torch.where(given["mask"], ids, 0) if ids.shape == given["mask"].shape else ids
        if bool((low.min() < 0) | (ids.max() >= size)):
            extra = " (or negative at masked tokens)" if packed else ""
            raise ValueError(
                f"{key} must be from 0 to {size - 1}{extra}; torch.unique(..., return_inverse=True)[1] numbers any labels so"
            )


def _check_rows(
    given: Mapping[str, Tensor],
    vocab: int,
    tokens: Tensor,
    temperature: float | Tensor,
    shift: bool,
    values: bool,
) -> None:
    """What the entries from logits and hidden states read besides: always shapes and dtypes, and the values too where asked."""
    live = given["mask"]
    if tokens.is_floating_point() or tokens.dtype is torch.bool:
        raise ValueError(f"tokens must be integer ids, not {tokens.dtype}")
    t = temperature if isinstance(temperature, Tensor) else None
    if t is not None and t.dim() and t.shape not in (tokens.shape, tokens.shape[:1]):
        raise ValueError(
            f"temperature has shape {tuple(t.shape)}; it is a number, or one per answer or token of {tuple(tokens.shape)}"
        )
    if (
        not temperature > 0
        if t is None
        else values and bool((~(t > 0) & (live if t.shape == live.shape else True)).any())
    ):
        raise ValueError("temperature must be positive: at 0 a policy has no log-probs")
    ids, head = (given.get(key) for key in _TOPK)
    if ids is not None and head is not None and ids.shape != head.shape:
        raise ValueError(f"mu_topk_ids {tuple(ids.shape)} and mu_topk_logprobs {tuple(head.shape)} must agree")
    distributions = {k: x for k, x in given.items() if k.endswith("_logprobs")}
    for key, x in distributions.items():
        if x.shape[-1] != vocab and key != "mu_topk_logprobs":
            raise ValueError(f"{key} has {x.shape[-1]} columns, the vocabulary {vocab}")
    if not values or not live.any():
        return
    if shift:
        first = torch.ones_like(live)
        first[..., 1:] = given["seq_ids"][1:] != given["seq_ids"][:-1] if "seq_ids" in given else False
        if bool((first & live).any()):
            raise ValueError("with shift=True nothing scores an answer's first position, but one is live in the mask")
    for key, entries in (("tokens", tokens), ("mu_topk_ids", ids)):
        if entries is None:
            continue
        mine = entries[live]
        if bool(((mine < 0) | (mine >= vocab)).any()):
            raise ValueError(f"a live entry of {key} lies outside the vocabulary of {vocab}")
        if mine.dim() > 1 and bool((mine.sort(-1).values.diff() == 0).any()):
            raise ValueError(f"{key} names a token twice in a row: its probability would count twice")
    for key, x in distributions.items():
        if not bool((x.amax(-1)[live] <= 1e-4).all()):  # NaN is not
            raise ValueError(f"{key} has a live entry that is NaN or above 0: log-probs are wanted")


def _diagnose(logp: Tensor, tensors: Mapping[str, Tensor], on_missing: str) -> None:
    """Name the input with a bad live value, if there is one: the pass that saw something was only a sum."""
    mask = tensors["mask"]
    logps = {"logp": logp} | {key: tensors[key] for key in _POLICY if key in tensors}
    others = {
        k: x for k, x in tensors.items() if x.is_floating_point() and k not in logps and not k.startswith("count")
    }
    for key, x in (logps | others).items():
        if key == "mu_logp" and on_missing != "error":
            continue
        bad = int((~torch.isfinite(x) & mask if x.shape == mask.shape else ~torch.isfinite(x)).sum())
        if bad:
            where = "live tokens" if x.shape == mask.shape else "places"
            extra = '; on_missing="neutral" or "drop" says what it means' if key == "mu_logp" else ""
            raise ValueError(f"{key} is NaN or infinite at {bad} {where}: take them out of the mask{extra}")
    for key, x in logps.items():
        if bool((mask & (x > 1e-4)).any()):
            raise ValueError(
                f"{key} is above 0 at a live token: log-probs are wanted, not probabilities, losses or logits"
            )
