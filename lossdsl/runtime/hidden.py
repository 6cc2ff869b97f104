"""From hidden states: logits exist a chunk at a time, and their gradient is written over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .compute import _before, _compute, _layout
from .inputs import _check_ids, _diagnose, _read_counts
from .logits import _row_inputs, _rows_backward, _rows_forward

# === body ===


class _Hidden:
    """Rows of hidden states, worked through in chunks of logits; gradients are ready when the loss is.

    Rows that cannot matter leave before the first product. A chunk is a product of its rows with the whole head, so
    that a row's normaliser is known at once; where a weight is a function of one token, or of the answer and the chunk
    holds whole answers, the gradient of its logits is formed then and there: three products in all. Else the log-probs
    of all rows come first, and the rows that have a gradient are multiplied again.
    """

    def __init__(
        self,
        loss: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float | Tensor,
        softcap: float | None,
        shift: bool,
        given: dict[str, Tensor],
        counts: Mapping[str, Any] | None,
        max_bytes: int,
    ) -> None:
        self.loss, self.given, self.counts, self.softcap = loss, given, counts, softcap
        self.shape, self.device, n = tokens.shape, hidden.device, tokens.numel()
        self.hidden, self.weight = hidden.detach().reshape(n, -1), weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        self.step = max(1, max_bytes // max(weight.shape[0] * hidden.dtype.itemsize, 1))
        self.params = loss._tensors_on(self.device, self.dtype)
        self.inputs = _row_inputs(loss, tokens, temperature, given, self.dtype, self.device)
        self.packed = "seq_ids" in given
        answers = torch.arange(tokens.shape[0], device=self.device)
        self.seq = (given["seq_ids"] if self.packed else answers[:, None].expand(self.shape)).reshape(n)
        self.rows = self._needed()
        self.source = self.rows - int(shift)  # the row of hidden states that scores each
        grad = torch.is_grad_enabled()
        self.d_hidden = torch.zeros_like(self.hidden) if hidden.requires_grad and grad else None
        self.d_weight = torch.zeros_like(weight, dtype=self.dtype) if weight.requires_grad and grad else None
        self.d_bias = None
        if bias is not None and bias.requires_grad and grad:
            self.d_bias = torch.zeros_like(bias, dtype=self.dtype)

    @property
    def wanted(self) -> bool:
        return any(x is not None for x in (self.d_hidden, self.d_weight, self.d_bias))

    def _needed(self) -> Tensor:
        """The rows to multiply, answer by answer: those that are live, and, where nothing else reads them, A is not 0."""
        live = self.given["mask"]
        A = self.given.get("advantages")
        # A token with A = 0 still counts in its answer's statistic, unless all of the answer's tokens have A = 0.
        per_answer = A is not None and A.shape != live.shape
        if A is not None and self.loss.SILENT and not self.loss.metrics and (per_answer or self.loss.CHUNK == "token"):
            live = live & (A if A.shape == live.shape else A[:, None].expand(live.shape)).ne(0)
        rows = live.reshape(-1).nonzero()[:, 0]
        return rows[self.seq[rows].argsort(stable=True)] if self.packed and self.loss.CHUNK != "token" else rows

    def run(self) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """(loss, metrics); the gradients stand in d_hidden, d_weight and d_bias."""
        chunks = self._chunks()
        return self._two_passes() if chunks is None else self._one_pass(chunks)

    # --- chunks ---------------------------------------------------------------------------------------------------------

    def _chunks(self) -> list[slice] | None:
        """Even pieces of rows, or pieces of whole answers; None where no piece may stand alone."""
        if self.loss.CHUNK == "batch":
            return None
        if self.loss.CHUNK == "token":
            return _even(len(self.rows), self.step)
        ids, sizes = torch.unique_consecutive(self.seq[self.rows], return_counts=True)
        ends, pieces, start = sizes.cumsum(0).tolist(), [], 0
        if ids.numel() and int(sizes.max()) > self.step:
            return None
        for i, end in enumerate(ends):
            if i + 1 == len(ends) or ends[i + 1] - start > self.step:
                pieces.append(slice(start, end))
                start = end
        return pieces

    def _logits(self, source: Tensor) -> Tensor:
        """The rows' logits; capped ones as cap * tanh(z / cap)."""
        z = torch.nn.functional.linear(self.hidden[source], self.weight, self.bias)
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def _forward(self, at: slice) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A chunk's rows with their logits, and what `_rows_forward` finds of them."""
        rows = {k: x[self.rows[at]] if x.dim() else x for k, x in self.inputs.items()}
        rows["logits"] = self._logits(self.source[at])
        found = self._run(_rows_forward, rows)
        rows["lse"] = found.pop("lse")
        return rows, found

    def _backward(self, rows: dict[str, Tensor], at: Tensor, gradients: Mapping[str, Tensor]) -> None:
        """Add a chunk's part of every gradient; rows without one are left out of the products where they are many."""
        given = {f"d:{k}": g for k, g in gradients.items() if k != "centre"}
        rows |= given | ({"centre": gradients["centre"]} if "centre" in gradients else {})
        moving = torch.zeros_like(rows["live"])
        for g in gradients.values():
            moving = moving | g.ne(0)
        keep = moving[:, 0].nonzero()[:, 0]
        if 10 * len(keep) < 9 * len(at):
            rows, at = {k: x[keep] if x.dim() else x for k, x in rows.items()}, at[keep]
        if not len(at):
            return
        rows["upstream"] = torch.ones((), dtype=self.dtype, device=self.device)
        z = rows["logits"]
        capped = None if self.softcap is None else 1 - (z / self.softcap) ** 2
        for places, values in self._run(_rows_backward_over, rows):
            z[torch.arange(len(places), device=places.device)[:, None], places] = values.to(z.dtype)
        dz = z if capped is None else z * capped
        if self.d_hidden is not None:
            self.d_hidden[at] = dz @ self.weight
        if self.d_weight is not None:
            self._add_weight(dz, self.hidden[at])
        if self.d_bias is not None:
            self.d_bias += dz.sum(0, dtype=self.dtype)

    def _add_weight(self, dz: Tensor, hidden: Tensor) -> None:
        """The product in the inputs' type, the sum over chunks in float32."""
        assert self.d_weight is not None
        if dz.dtype is self.d_weight.dtype:
            self.d_weight.addmm_(dz.T, hidden)
        else:
            self.d_weight += dz.T @ hidden

    def _run(self, function: Any, rows: dict[str, Tensor]) -> Any:
        with torch.no_grad():
            key = ("hidden", function, rows["logits"].dtype)
            return self.loss._compile(key, function)(rows, self.params)

    # --- one pass ---------------------------------------------------------------------------------------------------------

    def _one_pass(self, chunks: list[slice]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        loss, shared = self.loss, self._shared()
        checking = loss._checking(self.hidden)
        options = (loss.metrics, checking, loss.on_missing, True)
        kernel = loss._compile(("hidden", *options, self.dtype), lambda cls, *a: _compute(cls, options, *a))
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        metrics, logps = [], []
        for at in chunks or [slice(0, 0)]:
            rows, found = self._forward(at)
            tensors = {k: x[self.rows[at]] if x.dim() else x for k, x in shared.items()}
            tensors["mask"] = torch.ones_like(tensors["seq_ids"], dtype=torch.bool)
            start = torch.ones_like(tensors["mask"])
            start[1:] = tensors["seq_ids"][1:] != tensors["seq_ids"][:-1]
            tensors["seq_ids"] = start.long().cumsum(0) - 1
            logp, values = found.pop("logp")[:, 0], found.pop("centre", None)
            with torch.no_grad():
                part, gradients, watched, centre = kernel(
                    logp, tensors | {k: x[:, 0] for k, x in found.items()}, self.params
                )
            metrics.append(watched.pairs() if watched else {})
            logps.append(logp)
            gradients = {k: g.expand(logp.shape)[:, None].to(self.dtype) for k, g in gradients.items()}
            if centre is not None and values is not None:
                gradients["centre"] = centre.expand(logp.shape)[:, None].to(self.dtype)
                part = part + (gradients["centre"] * values).sum()
            total = total + part
            if self.wanted and len(logp):
                self._backward(rows, self.source[at], gradients)
        if checking and not bool(torch.isfinite(total)):
            self._explain(torch.cat(logps))
        return total, loss.merge(metrics)

    def _shared(self) -> dict[str, Tensor]:
        """What every chunk's weights read, one value per token of the batch: inputs, and what the whole batch decides."""
        given = {k: x.detach() for k, x in self.given.items() if not k.endswith(("_logprobs", "topk_ids", "groups"))}
        counts = {f"count:{k}": x for k, x in _read_counts(self.loss, self.counts, self.given["mask"]).items()}
        if self.loss._checking(self.hidden):
            _check_ids(self.given, self.given["mask"])
        with torch.no_grad():
            whole = given | {k: x for k, x in self.given.items() if k == "groups"} | counts
            ax = _layout(whole, self.packed, self.dtype)
            known = _before(type(self.loss), ax, self.packed, self.dtype, whole, self.params)
            first = torch.zeros(self.shape, dtype=torch.bool, device=self.device).reshape(-1)
            live = self.given["mask"].reshape(-1).nonzero()[:, 0]
            live = live[self.seq[live].argsort(stable=True)]
            first[live[torch.cat([live[:1] >= 0, self.seq[live].diff() != 0])]] = True
        found = {f"known:{k}": self._flat(x) for k, x in known.items()} | {"known:first": first}
        return found | {k: self._flat(x) for k, x in given.items() if k != "mask"} | {"seq_ids": self.seq}

    def _flat(self, x: Tensor) -> Tensor:
        """[B], [B, 1] or [B, T] -> one value per token of the batch; a number stays one."""
        if not x.dim():
            return x
        wide = x[:, None] if x.dim() == 1 and len(self.shape) == 2 else x
        return wide.expand(self.shape).reshape(-1)

    def _explain(self, logp: Tensor) -> None:
        """Name the input that made the loss NaN."""
        whole = torch.zeros(self.shape, dtype=logp.dtype, device=self.device)
        whole.view(-1)[self.rows] = logp
        tensors = {k: x for k, x in self.given.items() if not k.endswith(("_logprobs", "topk_ids"))}
        _diagnose(whole, tensors, self.loss.on_missing)

    # --- two passes -------------------------------------------------------------------------------------------------------

    def _two_passes(self) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        parts: dict[str, list[Tensor]] = {}
        pieces = _even(len(self.rows), self.step)
        for at in pieces or [slice(0, 0)]:
            for name, x in self._forward(at)[1].items():
                parts.setdefault(name, []).append(x)
        whole = {}
        for name, xs in parts.items():
            whole[name] = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            whole[name].view(-1)[self.rows] = torch.cat(xs)[:, 0]
        sums = {k: whole[k] for k in self.loss.SUMS}
        loss, found, metrics, centre = self.loss._evaluate(whole["logp"], self.given | sums, self.counts)
        if centre is not None:
            found["centre"] = centre
            loss = loss + (centre * whole["centre"]).sum()
        gradients = {k: g.expand(self.shape).reshape(-1, 1).to(self.dtype) for k, g in found.items()}
        if self.wanted:
            moving = torch.zeros(self.shape, dtype=torch.bool, device=self.device).reshape(-1, 1)
            for g in gradients.values():
                moving = moving | g.ne(0)
            kept = moving[self.rows, 0].nonzero()[:, 0]
            self.rows, self.source = self.rows[kept], self.source[kept]
            for at in _even(len(self.rows), self.step):
                rows, _ = self._forward(at)
                self._backward(rows, self.source[at], {k: g[self.rows[at]] for k, g in gradients.items()})
        return loss, metrics

    def gradients(self) -> list[Tensor | None]:
        """d loss / d hidden, head and bias in their own types; the head's is written out in slices."""
        found = self.d_weight
        if found is not None and found.dtype is not self.weight.dtype:
            written = torch.empty_like(self.weight)
            for i in range(0, len(written), 4096):
                written[i : i + 4096] = found[i : i + 4096]
            found = written
        bias = None if self.d_bias is None or self.bias is None else self.d_bias.to(self.bias.dtype)
        return [self.d_hidden, found, bias]


def _even(n: int, step: int) -> list[slice]:
    """n rows in as few pieces as `step` allows, all of one size or one less."""
    pieces = -(-n // step)
    return [slice(n * i // pieces, n * (i + 1) // pieces) for i in range(pieces)]


def _rows_backward_over(cls: Any, rows: dict[str, Tensor], params: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """`_rows_backward`, its dense part written over the logits."""
    dense, sparse = _rows_backward(cls, rows, params)
    rows["logits"].copy_(dense)
    return sparse
