"""From hidden states: logits exist only as one buffer of rows, and each matmul is done once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .compute import _live
from .logits import _piece_bytes, _read, _row_inputs, _rows_forward, _run, _write

# === body ===

_SLICE = 16 << 20  # bytes of the weight gradient that are added up at a time: they stay in a CPU's cache
_PAYS = 0.9  # rows without a gradient leave before the backward matmuls where at most this share is left


def _default_bytes(device: torch.device) -> int:
    """Of the logits buffer: rows enough that the weight gradient's traffic is small beside the matmuls."""
    return 256 << 20 if device.type == "cpu" else 1 << 30


class _HiddenRows:
    """Live rows of hidden states, worked through in chunks of one logits buffer.

    A chunk's logits are computed (1), reduced to a few numbers per row, turned into their gradient in place, and
    multiplied with the head (2) and the hidden states (3). Between, the loss's own function gives the rows' weights: it
    is called on the whole batch, with the log-probs that are known so far, so that it is the function of the other
    entries. That is sound where a row's weight waits for no row outside the chunk (`LEVEL`); else a first pass over all
    chunks comes before.
    """

    def __init__(
        self,
        loss: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        given: dict[str, Tensor],
        numbers: dict[str, float],
        wanted: Sequence[bool],
        shift: bool,
        max_bytes: int,
    ) -> None:
        self.loss, self.shape, self.given = loss, tokens.shape, given
        self.hidden, self.weight, self.bias = hidden.reshape(-1, hidden.shape[-1]), weight, bias
        self.wanted, self.skip = wanted, int(shift)
        self.dtype = torch.float64 if weight.dtype is torch.float64 else torch.float32
        temperature = given.pop("temperature", 1.0)
        self.counts = {k.removeprefix("count:"): given.pop(k) for k in list(given) if k.startswith("count:")}
        self.rows = _row_inputs(loss, tokens, temperature, given, self.dtype)
        self.rows |= {k: torch.full((), x, dtype=self.dtype, device=hidden.device) for k, x in numbers.items()}
        vocab, n = weight.shape[0], tokens.numel()
        self.step = max(1, max_bytes // max(vocab * weight.element_size(), 1))
        dense = {k for k in _read(loss) if k.startswith("log_")} - ({"log_mu"} if "ids" in self.rows else set())
        self.small = max(1, _piece_bytes(hidden.device) // max(vocab * self.dtype.itemsize, 1))
        self.piece = self.step if loss.compiled and not dense else self.small
        names = ("logp", "lse", *loss.SUMS, *(("centre",) if loss.centre is not None else ()))
        self.found = {name: torch.zeros(n, 1, dtype=self.dtype, device=hidden.device) for name in names}
        unmasked = self.rows.pop("live")
        live = unmasked[:, 0]
        if loss.live is not None and not loss.metrics and loss.on_missing == "error":
            params = loss._tensors_on(hidden.device, self.dtype)
            live = live & _live(type(loss), "seq_ids" in given, self.dtype, given, params).reshape(-1)
            stand_in = given.get("prox_logp", given.get("mu_logp"))
            if stand_in is not None:  # what leaves has no weight, whatever its ratio; here it is 1
                self.found["logp"] = torch.where(unmasked, stand_in.reshape(-1, 1), 0.0).to(self.dtype)
        self.at = live.nonzero()[:, 0]
        if loss.LEVEL == "sequence" and "seq_ids" in given:
            self.at = self.at[given["seq_ids"].reshape(-1)[self.at].argsort(stable=True)]
        self.buffer = torch.empty(min(self.step, len(self.at)), vocab, dtype=weight.dtype, device=hidden.device)
        like_hidden, like_weight, like_bias = wanted
        self.d_hidden = torch.zeros_like(self.hidden) if like_hidden else None
        wide = self.dtype if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
        self.d_weight = torch.empty_like(weight, dtype=wide) if like_weight else None
        self.summed = 0  # whether a chunk's part is in there already: the first is written, not added
        self.d_bias = torch.zeros(vocab, dtype=self.dtype, device=hidden.device) if like_bias else None

    def run(self) -> None:
        """Fill `found` and the gradients."""
        chunks = self._whole() if any(self.wanted) else None
        if chunks is not None:
            for at in chunks:
                logits = self._scores(at)
                self._forward(at, logits)
                self._backward(at, logits, self._weigh(at))
            return
        for some in _even(len(self.at), self.step):
            self._forward(self.at[some], self._scores(self.at[some]))
        if any(self.wanted):
            weights = self._weigh(self.at)
            kept = _moving(weights).nonzero()[:, 0]
            self.at, weights = self.at[kept], {k: x[kept] for k, x in weights.items()}
            for some in _even(len(kept), self.step):
                self._backward(self.at[some], self._scores(self.at[some]), {k: x[some] for k, x in weights.items()})

    def _whole(self) -> list[Tensor] | None:
        """Chunks none of whose rows waits for a row of another chunk; None where there are none within the budget."""
        if self.loss.LEVEL == "token" or len(self.at) <= self.step:
            return [self.at[some] for some in _even(len(self.at), self.step)]
        if self.loss.LEVEL != "sequence":
            return None
        width = self.shape[-1]
        answer = self.given["seq_ids"][self.at] if "seq_ids" in self.given else self.at // width
        lengths = torch.unique_consecutive(answer, return_counts=True)[1].tolist()
        if max(lengths) > self.step:
            return None
        sizes = [0]
        for length in lengths:
            if sizes[-1] + length > self.step:
                sizes.append(0)
            sizes[-1] += length
        ends = list(accumulate(sizes, initial=0))
        return [self.at[a:b] for a, b in pairwise(ends)]

    def _scores(self, at: Tensor) -> Tensor:
        """The logits of some rows, in the buffer (1)."""
        z, h = _part(self.buffer, slice(0, len(at))), self._states(at)
        if self.bias is None:
            return torch.mm(h, self.weight.t(), out=z)
        return torch.addmm(self.bias, h, self.weight.t(), out=z)

    def _states(self, at: Tensor) -> Tensor:
        return self.hidden.index_select(0, (at - self.skip).clamp(min=0)).to(self.weight.dtype)

    def _rows(self, at: Tensor) -> dict[str, Tensor]:
        return {k: x[at] if x.dim() else x for k, x in self.rows.items()}

    def _forward(self, at: Tensor, logits: Tensor) -> None:
        for some in _even(len(at), self.piece):
            rows = self._rows(at[some]) | {"logits": _part(logits, some)}
            for name, x in _run(self.loss, _rows_forward, rows).items():
                self.found[name][at[some]] = x

    def _weigh(self, at: Tensor) -> dict[str, Tensor]:
        """d loss / d log pi, d loss / d each sum and the centring weight of some rows."""
        found = {k: self.found[k].reshape(self.shape) for k in ("logp", *self.loss.SUMS)}
        _, gradients, _, centre = self.loss._evaluate(found.pop("logp"), self.given | found, self.counts, final=False)
        weights = {f"d:{k}": g for k, g in gradients.items()} | ({} if centre is None else {"centre": centre})
        return {k: x.expand(self.shape).reshape(-1, 1)[at].to(self.dtype) for k, x in weights.items()}

    def _backward(self, at: Tensor, logits: Tensor, weights: dict[str, Tensor]) -> None:
        """The gradient of some rows, written over their logits; then the two matmuls that it is for (2, 3)."""
        kept = _moving(weights).nonzero()[:, 0]
        if len(kept) == 0:
            return
        fewer = len(kept) <= _PAYS * len(at)
        if fewer:
            at, weights = at[kept], {k: x[kept] for k, x in weights.items()}
        for some in _even(len(at), min(self.piece, self.small) if fewer else self.piece):
            into = _part(logits, some)
            # Rows move forward only, and a piece is read before it is written: no row is lost.
            z = logits.index_select(0, kept[some]) if fewer else into
            mine = {k: _part(x, some) for k, x in weights.items()} | {"lse": self.found["lse"][at[some]]}
            _write(self.loss, self._rows(at[some]) | mine | {"logits": z}, z)
            if fewer:
                into.copy_(z)
        self._multiply(at, logits[: len(at)])

    def _multiply(self, at: Tensor, dz: Tensor) -> None:
        if self.d_hidden is not None:
            place = at - self.skip
            self.d_hidden.index_copy_(0, place, torch.mm(dz, self.weight).to(self.d_hidden.dtype))
        if self.d_bias is not None:
            self.d_bias += dz.sum(0, dtype=self.dtype)
        if self.d_weight is None:
            return
        h, more, self.summed = self._states(at), self.summed, 1
        if self.d_weight.dtype is dz.dtype:
            self.d_weight.addmm_(dz.t(), h, beta=more)
            return
        step = max(1, _SLICE // max(h.shape[1] * h.element_size(), 1))
        for a in range(0, dz.shape[1], step):  # a 16-bit product, added up in float32
            part, product = self.d_weight[a : a + step], torch.mm(dz[:, a : a + step].t(), h)
            part.add_(product) if more else part.copy_(product)

    def weight_gradient(self, weight: Tensor) -> Tensor:
        """In the head's own dtype, with nothing for padded columns."""
        assert self.d_weight is not None
        if not self.summed:
            self.d_weight.zero_()
        if self.d_weight.dtype is weight.dtype and self.d_weight.shape == weight.shape:
            return self.d_weight
        whole = torch.empty_like(weight, memory_format=torch.contiguous_format)
        n, step = len(self.d_weight), max(1, _SLICE // max(weight.shape[1] * weight.element_size(), 1))
        for a in range(0, n, step):
            whole[a : min(a + step, n)] = self.d_weight[a : a + step]
        whole[n:] = 0
        return whole


def _part(x: Tensor, at: slice) -> Tensor:
    """Rows of a tensor as a tensor of its own: a compiled program shall not look at what they are a part of."""
    place = x.storage_offset() + at.start * x.stride(0)
    return x.new_empty(0).set_(x.untyped_storage(), place, (at.stop - at.start, x.shape[1]), x.stride())


def _even(n: int, step: int) -> list[slice]:
    """Pieces of at most `step` rows, of one length but for one row."""
    pieces = -(-n // step)
    return [slice(n * i // pieces, n * (i + 1) // pieces) for i in range(pieces)]


def _moving(weights: dict[str, Tensor]) -> Tensor:
    """Whether a row has a gradient at all."""
    moving = torch.zeros_like(next(iter(weights.values()))[:, 0], dtype=torch.bool)
    for x in weights.values():
        moving |= x[:, 0] != 0
    return moving


def _hidden_op(cls: Any) -> Any:
    """The pass over hidden states as an operator of its own: to an outer torch.compile it is one opaque call.

    It returns the numbers per token ([names, n]) and the gradients that are wanted; the loss's value is then computed
    from those numbers as the other entries do.
    """
    name = re.sub(r"\W", "_", f"{cls.__module__}_{cls.__qualname__}_{cls.spec_hash}")

    def pass_over(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        tensors: list[Tensor],
        names: str,
        params: list[float],
        numbers: list[float],
        number_names: str,
        options: str,
        wanted: list[bool],
        shift: bool,
        vocab: int,
        max_bytes: int,
    ) -> list[Tensor]:
        compiled, metrics, on_missing = options.split()
        loss = cls(
            compile=compiled == "True", metrics=metrics == "True", on_missing=on_missing,
            **dict(zip(cls.PARAMS, params, strict=True)),
        )  # fmt: skip
        given = dict(zip(names.split(), tensors, strict=True))
        figures = dict(zip(number_names.split(), numbers, strict=True))
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            work = _HiddenRows(
                loss, hidden, weight[:vocab], None if bias is None else bias[:vocab], tokens, given, figures, wanted, shift, max_bytes
            )  # fmt: skip
            work.run()
            found = [torch.stack([x[:, 0] for name, x in work.found.items() if name != "lse"])]
            if work.d_hidden is not None:
                found.append(work.d_hidden.reshape(hidden.shape))
            if work.d_weight is not None:
                del work.buffer
                found.append(work.weight_gradient(weight))
            if work.d_bias is not None:
                assert bias is not None
                padded = torch.nn.functional.pad(work.d_bias, (0, len(bias) - vocab))
                found.append(padded.to(bias.dtype))
            return found

    op = torch.library.custom_op(f"lossdsl::{name}", pass_over, mutates_args=())

    @op.register_fake
    def _(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, tensors: list[Tensor], names: str,
        params: list[float], numbers: list[float], number_names: str, options: str, wanted: list[bool],
        shift: bool, vocab: int, max_bytes: int,
    ) -> list[Tensor]:  # fmt: skip
        dtype = torch.float64 if weight.dtype is torch.float64 else torch.float32
        width = 1 + len(cls.SUMS) + (cls.centre is not None)
        found = [hidden.new_empty(width, tokens.numel(), dtype=dtype)]
        for x, needed in zip((hidden, weight, bias), wanted, strict=True):
            if needed:
                assert x is not None
                found.append(torch.empty_like(x, memory_format=torch.contiguous_format))
        return found

    def run(*args: Any) -> list[Tensor]:  # called as it is, it shares its compiled programs with the other entries
        found: list[Tensor] = op(*args) if torch.compiler.is_compiling() else pass_over(*args)
        return found

    return staticmethod(run)


def _check_head(
    hidden: Tensor,
    head: dict[str, Tensor],
    tokens: Tensor,
    vocab_size: int | None,
    logit_scale: float,
    softcap: float | None,
    max_bytes: int | None,
) -> int:
    """Shapes and dtypes of hidden states and head, and the numbers that belong to them; returns how many rows are tokens."""
    weight, bias = head["lm_head_weight"], head.get("bias")
    if hasattr(weight, "full_tensor"):
        raise TypeError(
            "lm_head_weight is sharded (a DTensor): call from_hidden inside the forward of the module that owns it, "
            "or pass lm_head_weight.full_tensor()"
        )
    if hidden.dim() != tokens.dim() + 1 or hidden.shape[:-1] != tokens.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} must be tokens' shape {tuple(tokens.shape)} and the width of the model"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"lm_head_weight {tuple(weight.shape)} must be [vocabulary, {hidden.shape[-1]}], as hidden {tuple(hidden.shape)} is"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must be ({weight.shape[0]},), as lm_head_weight has rows")
    for name, x in head.items():
        if x.device != hidden.device:
            raise ValueError(f"{name} is on {x.device}, hidden on {hidden.device}")
        if not x.is_floating_point() or torch.promote_types(x.dtype, hidden.dtype) is not x.dtype:
            raise ValueError(
                f"{name} is {x.dtype}, hidden {hidden.dtype}: the head must have hidden's dtype or a wider one"
            )
    if bias is not None and bias.dtype is not weight.dtype:
        raise ValueError(f"bias is {bias.dtype}, lm_head_weight {weight.dtype}: they must agree")
    vocab = weight.shape[0] if vocab_size is None else vocab_size
    if not 0 < vocab <= weight.shape[0]:
        raise ValueError(f"vocab_size={vocab} must be from 1 to {weight.shape[0]}, the rows of lm_head_weight")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be positive; None for a model that has none")
    if not (logit_scale > 0 or logit_scale < 0):
        raise ValueError(f"logit_scale={logit_scale} must be a number other than 0")
    if max_bytes is not None and max_bytes <= 0:
        raise ValueError(f"max_logits_bytes={max_bytes} must be positive")
    return vocab


def _diagnose_head(mask: Tensor, hidden: Tensor, head: dict[str, Tensor], shift: bool) -> None:
    """Name what is not finite: a live hidden state, or the head."""
    live = mask.reshape(-1).roll(-1) if shift else mask.reshape(-1)
    bad = int((~torch.isfinite(hidden.detach()).all(-1).reshape(-1) & live).sum())
    if bad:
        raise ValueError(f"hidden is NaN or infinite at {bad} live tokens: take them out of the mask")
    for name, x in head.items():
        if not bool(torch.isfinite(x.detach()).all()):
            raise ValueError(f"{name} is NaN or infinite at {int((~torch.isfinite(x.detach())).sum())} places")
