"""Hand-written eager PyTorch for some methods: what a person would write from the review's formulas, for autograd.

Tokens are masked by multiplication, so the mask may have any dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Inputs = dict[str, Tensor]


def surrogate(ratio: Tensor, A: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * A, torch.clamp(ratio, low, high) * A)


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    return -(x * mask).sum() / mask.sum()


def seq_mean(x: Tensor, mask: Tensor) -> Tensor:
    return -((x * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def _r(d: Inputs) -> Tensor:
    return d["logp"] - d["prox_logp"]


def _c(d: Inputs) -> Tensor:
    return d["prox_logp"] - d["mu_logp"]


def _rho(d: Inputs) -> Tensor:
    return d["logp"] - d["mu_logp"]


def grpo(d: Inputs) -> Tensor:
    return seq_mean(surrogate(_r(d).exp(), d["A"][:, None], 0.8, 1.2), d["mask"])


def dapo(d: Inputs) -> Tensor:
    return token_mean(surrogate(_r(d).exp(), d["A"][:, None], 0.8, 1.28), d["mask"])


def cispo(d: Inputs) -> Tensor:
    weight = torch.clamp(_r(d).exp(), 0.8, 1.28).detach()
    return token_mean(weight * d["A"][:, None] * d["logp"], d["mask"])


def gspo(d: Inputs) -> Tensor:
    s = ((_r(d) * d["mask"]).sum(-1, keepdim=True) / d["mask"].sum(-1, keepdim=True).clamp(min=1)).exp()
    return seq_mean(surrogate(s, d["A"][:, None], 1 - 3e-4, 1 + 4e-4), d["mask"])


def token_tis(d: Inputs) -> Tensor:
    f = torch.clamp(_c(d).exp(), max=2.0)
    return seq_mean(f * surrogate(_r(d).exp(), d["A"][:, None], 0.8, 1.2), d["mask"])


def icepop(d: Inputs) -> Tensor:
    c = _c(d).exp()
    f = torch.where((c >= 0.5) & (c <= 5), c, 0.0)
    return seq_mean(f * surrogate(_r(d).exp(), d["A"][:, None], 0.8, 1.2), d["mask"])


def seq_tis(d: Inputs) -> Tensor:
    f = torch.clamp((_c(d) * d["mask"]).sum(-1, keepdim=True), max=20).exp().clamp(max=2.0)
    return seq_mean(f * surrogate(_r(d).exp(), d["A"][:, None], 0.8, 1.2), d["mask"])


def topr(d: Inputs) -> Tensor:
    A = d["A"][:, None]
    rho = torch.clamp((_rho(d).detach() * d["mask"]).sum(-1, keepdim=True), max=20).exp().clamp(max=1.0)
    weight = torch.where(A >= 0, torch.ones_like(rho), rho)
    return -(weight * A * d["logp"] * d["mask"]).sum() / d["logp"].shape[0]


def pipelinerl(d: Inputs) -> Tensor:
    weight = _rho(d).detach().exp().clamp(max=1.02)
    return -(weight * d["A"][:, None] * d["logp"] * d["mask"]).sum() / d["logp"].shape[0]


def reinforce(d: Inputs) -> Tensor:
    return -(d["A"][:, None] * d["logp"] * d["mask"]).sum() / d["logp"].shape[0]


METHODS: dict[str, Callable[[Inputs], Tensor]] = {
    f.__name__: f for f in (token_tis, seq_tis, gspo, grpo, dapo, cispo, icepop, topr, pipelinerl, reinforce)
}
