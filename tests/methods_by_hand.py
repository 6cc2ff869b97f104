"""Method parts written by hand in the emitted style, and for each the plain objective that it claims to be.

The objective is what a person would write from the paper, differentiated by autograd: it shares nothing with the
language, its derivatives or its reference, so it checks the runtime alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lossdsl.runtime.layouts import div, exp, log_bound
from lossdsl.runtime.loss import PolicyLoss
from lossdsl.runtime.metrics import Weights

# mypy: disable-error-code="no-untyped-def"

Batch = dict[str, Any]
PLAIN: dict[type[PolicyLoss], Callable[[Batch], Tensor]] = {}


def plain(loss: type[PolicyLoss]) -> Callable[[Callable[[Batch], Tensor]], Callable[[Batch], Tensor]]:
    """Register the objective J of a batch with logp [B, T] (and log_pi [B, T, V]) that carries a gradient."""

    def register(objective: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        PLAIN[loss] = objective
        return objective

    return register


class Hand(PolicyLoss):
    """Defaults that most methods here share."""

    name = "by_hand"
    spec_hash = "0"
    PARAMS = {}
    NEEDS = {"advantages": "A weighs every token", "prox_logp": "r = pi/prox is bounded"}
    INPUTS = {}
    ADVANTAGES = "either"
    SUMS = ()
    TOPK = False
    LOCAL_STATISTICS = None


def mean_of_answers(x: Tensor, mask: Tensor) -> Tensor:
    return (torch.where(mask, x, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


# --- PPO's clip, per token ------------------------------------------------------------------------------------------------


def clip_weights(ax, logp, prox_logp, A, length, n_seqs, eps):
    log_r = logp - prox_logp
    r_above, r_below = log_r > log_bound(1 + eps), log_r < log_bound(1 - eps)
    kept = ~((A > 0) & r_above) & ~((A < 0) & r_below)
    r = exp(log_r)
    lam = div(1, n_seqs * length)
    W = torch.where(kept, r, 0.0)
    return Weights(
        value=lam * torch.minimum(r * A, torch.clamp(r, 1 - eps, 1 + eps) * A), coef=lam * A * W, W=W, T=W, f=torch.ones_like(r),
        ratios={"r": (log_r, "token")}, limits={"T/mask": ~kept}, outside={"r": r_above | r_below}, grads={}, centre=None,
    )  # fmt: skip


class Clip(Hand):
    name = "clip"
    PARAMS = {"eps": (0.2, 0.0, 1.0, "half width")}
    weights = staticmethod(clip_weights)


@plain(Clip)
def _(b: Batch) -> Tensor:
    r, A = (b["logp"] - b["prox_logp"]).exp(), b["advantages"][:, None]
    return mean_of_answers(torch.minimum(r * A, r.clamp(0.8, 1.2) * A), b["mask"])


# --- the geometric mean of an answer's ratios -----------------------------------------------------------------------------


def geometric_weights(ax, logp, prox_logp, A, length, n_seqs, low, high):
    log_s = ax.mean_t(logp - prox_logp)
    kept = ~((A > 0) & (log_s > log_bound(high))) & ~((A < 0) & (log_s < log_bound(low)))
    s = exp(log_s)
    lam = div(1, n_seqs * length)
    W = torch.where(kept, s, 0.0)
    return Weights(
        value=lam * torch.minimum(s * A, torch.clamp(s, low, high) * A), coef=lam * A * W, W=W, T=W, f=torch.ones_like(s),
        ratios={"s": (log_s, "sequence")}, limits={"T/mask": ~kept}, outside={}, grads={}, centre=None,
    )  # fmt: skip


class Geometric(Hand):
    name = "geometric"
    PARAMS = {"low": (0.9, 0.0, 1.0, "lower end"), "high": (1.1, 1.0, None, "upper end")}
    ADVANTAGES = "sequence"
    weights = staticmethod(geometric_weights)


@plain(Geometric)
def _(b: Batch) -> Tensor:
    mask, A = b["mask"], b["advantages"]
    s = (torch.where(mask, b["logp"] - b["prox_logp"], 0.0).sum(-1) / mask.sum(-1).clamp(min=1)).exp()
    return (torch.minimum(s * A, s.clamp(0.9, 1.1) * A) * mask.any(-1)).mean()


# --- the product over an answer, capped -----------------------------------------------------------------------------------


def product_weights(ax, logp, prox_logp, mu_logp, A, n_tokens, C):
    log_r, log_c = logp - prox_logp, ax.sum_t(prox_logp - mu_logp)
    f, T = torch.clamp(exp(log_c), max=C), exp(log_r)
    lam = div(1, n_tokens)
    return Weights(
        value=lam * f * T * A, coef=lam * A * f * T, W=f * T, T=T, f=f, ratios={"r": (log_r, "token"), "prod c": (log_c, "sequence")},
        limits={"f/cap": log_c > log_bound(C)}, outside={}, grads={}, centre=None,
    )  # fmt: skip


class Product(Hand):
    name = "product"
    PARAMS = {"C": (2.0, 0.0, None, "cap")}
    NEEDS = Hand.NEEDS | {"mu_logp": "c = prox/mu corrects the sampler"}
    weights = staticmethod(product_weights)


@plain(Product)
def _(b: Batch) -> Tensor:
    r, c = (
        (b["logp"] - b["prox_logp"]).exp(),
        torch.where(b["mask"], b["prox_logp"] - b["mu_logp"], 0.0).sum(-1, keepdim=True),
    )
    J = c.exp().clamp(max=2.0) * r * b["advantages"][:, None]
    return torch.where(b["mask"], J, 0.0).sum() / b["mask"].sum()


# --- a band on c, and a penalty to a reference --------------------------------------------------------------------------------


def band_weights(ax, logp, prox_logp, mu_logp, ref_logp, A, n_tokens, low, high, beta):
    log_c = prox_logp - mu_logp
    kept = (log_c >= log_bound(low)) & (log_c <= log_bound(high))
    log_r, d = logp - prox_logp, ref_logp - logp
    f, T, lam = torch.where(kept, exp(log_c), 0.0), exp(log_r), div(1, n_tokens)
    return Weights(
        value=lam * (f * T * A - beta * (exp(d) - 1 - d)), coef=lam * (A * f * T - beta * (1 - exp(d))), W=f * T, T=T, f=f,
        ratios={"r": (log_r, "token"), "c": (log_c, "token")}, limits={"f/mask": ~kept}, outside={"c": ~kept}, grads={}, centre=None,
    )  # fmt: skip


class Band(Hand):
    name = "band"
    PARAMS = {
        "low": (0.5, 0.0, None, "lower"),
        "high": (2.0, 0.0, None, "upper"),
        "beta": (0.1, 0.0, None, "of the penalty"),
    }
    NEEDS = Hand.NEEDS | {"mu_logp": "c = prox/mu is bounded", "ref_logp": "the penalty keeps pi near ref"}
    weights = staticmethod(band_weights)


@plain(Band)
def _(b: Batch) -> Tensor:
    r, c, u = ((b[x] - b[y]).exp() for x, y in (("logp", "prox_logp"), ("prox_logp", "mu_logp"), ("ref_logp", "logp")))
    J = torch.where((c >= 0.5) & (c <= 2), c, 0.0) * r * b["advantages"][:, None] - 0.1 * (u - u.log() - 1)
    return torch.where(b["mask"], J, 0.0).sum() / b["mask"].sum()


# --- an entropy bonus ---------------------------------------------------------------------------------------------------------


def entropy_weights(ax, logp, A, entropy, n_seqs, bonus):
    lam = div(1, n_seqs)
    return Weights(
        value=lam * (A * logp + bonus * entropy), coef=lam * A, W=torch.ones_like(logp), T=None, f=None, ratios={}, limits={},
        outside={}, grads={"entropy": lam * bonus}, centre=None,
    )  # fmt: skip


def entropy_distribution(log_pi):
    return {"entropy": -(log_pi.exp() * log_pi).sum(-1)}


def entropy_d_distribution(grads, log_pi):
    return grads["entropy"] * -(log_pi.exp() * (log_pi + 1))


class Entropy(Hand):
    name = "entropy"
    PARAMS = {"bonus": (0.3, None, None, "weight of the entropy")}
    NEEDS = {"advantages": "A weighs every token"}
    SUMS = ("entropy",)
    weights = staticmethod(entropy_weights)
    distribution = staticmethod(entropy_distribution)
    d_distribution = staticmethod(entropy_d_distribution)


@plain(Entropy)
def _(b: Batch) -> Tensor:
    entropy = b["entropy"] if "log_pi" not in b else -(b["log_pi"].exp() * b["log_pi"]).sum(-1)
    J = b["advantages"][:, None] * b["logp"] + 0.3 * entropy
    return torch.where(b["mask"], J, 0.0).sum() / b["mask"].shape[0]


# --- a mask on an answer's largest divergence, of the whole distributions ---------------------------------------------------------


def trust_weights(ax, logp, mu_logp, A, kl, n_tokens, delta):
    kept, log_rho, lam = ax.max_t(kl) <= delta, logp - mu_logp, div(1, n_tokens)
    f = torch.where(kept, 1.0, 0.0)
    W = torch.where(kept, exp(log_rho), 0.0)
    return Weights(
        value=lam * W * A, coef=lam * W * A, W=W, T=exp(log_rho), f=f, ratios={"rho": (log_rho, "token")}, limits={"f/mask": ~kept},
        outside={}, grads={}, centre=None,
    )  # fmt: skip


def trust_distribution(log_pi, log_mu):
    return {"kl": (log_mu.exp() * (log_mu - log_pi)).sum(-1)}


class Trust(Hand):
    name = "trust"
    PARAMS = {"delta": (1.0, 0.0, None, "largest divergence")}
    NEEDS = {"advantages": "A weighs every token", "mu_logp": "rho = pi/mu", "mu_logprobs": "the divergence from mu"}
    SUMS = ("kl",)
    weights = staticmethod(trust_weights)
    distribution = staticmethod(trust_distribution)


@plain(Trust)
def _(b: Batch) -> Tensor:
    kl = torch.where(b["mask"], (b["mu_logprobs"].exp() * (b["mu_logprobs"] - b["log_pi"].detach())).sum(-1), 0.0)
    J = (kl.amax(-1, keepdim=True) <= 1.0) * (b["logp"] - b["mu_logp"]).exp() * b["advantages"][:, None]
    return torch.where(b["mask"], J, 0.0).sum() / b["mask"].sum()


# --- a centred score with truncated importance weights ----------------------------------------------------------------------------


def centred_weights(ax, logp, mu_logp, A, n_tokens, C):
    log_rho, lam = logp - mu_logp, div(1, n_tokens)
    f = torch.clamp(exp(log_rho), max=C)
    return Weights(
        value=lam * f * A * logp, coef=lam * A * f, W=f, T=None, f=f, ratios={"rho": (log_rho, "token")},
        limits={"f/cap": log_rho > log_bound(C)}, outside={}, grads={}, centre=lam * A,
    )  # fmt: skip


def centred_centre(log_pi, log_mu, C):
    return log_mu.exp() * torch.clamp(exp(log_pi - log_mu), max=C)


class Centred(Hand):
    name = "centred"
    PARAMS = {"C": (1.5, 0.0, None, "cap")}
    NEEDS = {
        "advantages": "A weighs every token",
        "mu_logp": "rho = pi/mu",
        "mu_logprobs": "the centre is a mean over mu",
    }
    TOPK = True
    weights = staticmethod(centred_weights)
    centre = staticmethod(centred_centre)


@plain(Centred)
def _(b: Batch) -> Tensor:
    f = (b["logp"] - b["mu_logp"]).exp().clamp(max=1.5).detach()
    mu = b["mu_logprobs"]
    f_v = (b["log_pi"] - mu).exp().clamp(max=1.5).detach()
    J = b["advantages"][:, None] * (f * b["logp"] - (mu.exp() * f_v * b["log_pi"]).sum(-1))
    return torch.where(b["mask"], J, 0.0).sum() / b["mask"].sum()


FROM_LOGP = (Clip, Geometric, Product, Band, Entropy)
FROM_LOGITS = (*FROM_LOGP, Trust, Centred)
