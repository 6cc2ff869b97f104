"""From logits: one pass forward, chunk by chunk, and one back that writes their gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .layouts import exp

# === body ===


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


class _Rows:
    """One pass over the logits, chunk by chunk, and the pass back that writes their gradient.

    The columns of a row are the vocabulary, or the k ids of a top-k sampler distribution and one bucket for the rest:
    there mu(v) is taken as gamma * pi(v), so that a sum over it is one term of the two masses.
    """

    def __init__(
        self,
        loss: Any,
        logits: Tensor,
        tokens: Tensor,
        temperature: float | Tensor,
        given: Mapping[str, Tensor],
        max_bytes: int,
    ) -> None:
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
                raise ValueError(
                    f"temperature has shape {tuple(t.shape)}; it is a number, or one per answer or token of {tuple(tokens.shape)}"
                )
        self.temperature = t.reshape(n, 1) if t.dim() else t
        self.step = max(1, max_bytes // max(vocab * (8 if self.dtype is torch.float64 else 4), 1))
        self.live = live
        parts = ("distribution", "d_distribution", "centre")
        read = {a for part in parts for a in loss._arguments[part]}
        self.extra: dict[str, Tensor] = {}
        for policy in ("mu", "prox", "ref"):
            x = given.get(f"{policy}_logprobs")
            if x is not None and f"log_{policy}" in read:
                self.extra[policy] = x.detach().reshape(n, x.shape[-1])
        for key, x in self.extra.items():
            if x.shape[1] != vocab:
                raise ValueError(f"{key}_logprobs has {x.shape[1]} columns, the logits {vocab}")
        self.ids = (
            given["mu_topk_ids"].detach().reshape(n, given["mu_topk_ids"].shape[-1]).long()
            if "mu_topk_ids" in given and "log_mu" in read
            else None
        )
        if self.ids is not None:
            self.extra["mu"] = given["mu_topk_logprobs"].detach().reshape(self.ids.shape)
        A = given.get("advantages")
        self.A = (
            None
            if A is None
            else (A if A.dim() == tokens.dim() else A[:, None].expand(tokens.shape))
            .detach()
            .reshape(n, 1)
            .to(self.dtype)
        )
        self.values = {
            k: given[k].detach().reshape(n, 1).to(self.dtype)
            for k in loss.INPUTS
            if k in read and given[k].shape == tokens.shape
        }

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
            log_pi = torch.where(
                self.live[at, None], log_pi.gather(1, torch.where(self.live[at, None], self.ids[at], 0)), -1.0
            )
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
        names = self.loss.SUMS
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
