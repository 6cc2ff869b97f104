"""One random batch of a method in each layout that a generated module takes, and the reference's answer for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lossdsl.method import Method
from lossdsl.reference import Batch, logits_gradient, per_token
from lossdsl.samples import sample_batch


@dataclass
class Case:
    """A batch with the tokens that were sampled, and parameter values for the method."""

    method: Method
    batch: Batch
    tokens: np.ndarray
    params: dict[str, float]

    @property
    def advantage_per_token(self) -> bool:
        return any(i.name.value == "A" and i.axis.value == "token" for i in self.method.doc.inputs)


# Values for parameters without a published default; and milder ones where the default would mask every token of a random batch.
CHOSEN: dict[str, dict[str, float]] = {
    "scalerl_gspo": {"eps_low": 0.2, "eps_high": 0.3}, "deepseek_v32_mask": {"delta": 0.05}, "dr_grpo": {"L": 7.0}, "vaco": {"delta": 0.2},
    "gspo": {"eps_low": 0.2, "eps_high": 0.3}, "gspo_token": {"eps_low": 0.2, "eps_high": 0.3}, "luspo": {"eps_low": 0.2, "eps_high": 0.3},
    "geo_mis": {"band_low": 0.8, "band_high": 1.25}, "seq_mask_tis": {"band_low": 0.8, "band_high": 1.25},
    "trm_max": {"delta": 0.3}, "trm_avg": {"delta": 0.15}, "trm_combined": {"delta_max": 0.4, "delta_avg": 0.2}, "erc": {"low": 0.5, "high": 2.0},
}  # fmt: skip


def random_case(method: Method, seed: int, spread: float = 0.5) -> Case:
    """A batch of ragged answers (some empty), three groups of three."""
    rng = np.random.default_rng([seed, 17])
    batch = sample_batch(method, rng, spread)
    # The sampled token is the one whose log-prob the batch holds: find it again from pi's distribution.
    tokens = np.abs(batch.logp_v["pi"] - batch.logp["pi"][:, None]).argmin(-1)
    defaults = {k: v for k, v in method.defaults.items() if v is not None}
    return Case(method, batch, tokens, defaults | CHOSEN.get(method.name, {}))


def on_policy(case: Case) -> Case:
    """The same with all four policies equal to pi."""
    b = case.batch
    values = dict(b.values)
    if "old_entropy" in values:
        p = np.exp(b.logp_v["pi"])
        values["old_entropy"] = -(p * b.logp_v["pi"]).sum(-1)
    same = dict.fromkeys(b.logp, b.logp["pi"])
    return replace(case, batch=replace(b, logp=same, logp_v=dict.fromkeys(b.logp_v, b.logp_v["pi"]), values=values))


def expected(case: Case) -> tuple[float, np.ndarray, np.ndarray]:
    """The reference's loss, d loss / d logp [N], d loss / d logits [N, V] (logits = log-probs)."""
    m, b, p = case.method, case.batch, case.params
    total = per_token(m.normaliser, b, p) * per_token(m.objective, b, p)
    for term in m.terms:
        total = total + per_token(term.normaliser, b, p) * per_token(term.add, b, p)
    gradient = m.gradient
    return -float(total.sum()), -per_token(gradient.coef, b, p), -logits_gradient(gradient, case.tokens, b, p)


def place(case: Case, width: int | None = None, fill: float = 0.0) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """(mask [B, T], row and column of each live token)."""
    b = case.batch
    lengths = np.bincount(b.seq, minlength=b.n_seqs)
    columns = np.concatenate([np.arange(n) for n in lengths]) if len(b.seq) else np.zeros(0, int)
    mask = torch.zeros(b.n_seqs, width or max(int(lengths.max(initial=0)), 1), dtype=torch.bool)
    mask[b.seq, columns] = True
    return mask, b.seq, columns


def padded(
    case: Case, width: int | None = None, fill: float = 0.0, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Keyword arguments of a padded call; `fill` stands in every masked slot."""
    mask, rows, columns = place(case, width)

    def spread(x: np.ndarray) -> Tensor:
        out = torch.full((*mask.shape, *x.shape[1:]), fill, dtype=dtype)
        out[rows, columns] = torch.tensor(x, dtype=dtype)
        return out

    given = _common(case, spread, lambda x: torch.tensor(np.asarray(x), dtype=dtype))
    tokens = torch.zeros(mask.shape, dtype=torch.long)
    tokens[rows, columns] = torch.tensor(case.tokens)
    return given | {"mask": mask, "tokens": tokens, "groups": torch.tensor(case.batch.group)}


def packed(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Keyword arguments of a packed call, the answers' tokens one after the other, with some dead tokens between."""
    b = case.batch
    n = len(b.seq)
    keep = np.arange(n) * 3 // 2  # every third slot is dead
    size = int(keep.max(initial=-1)) + 2
    mask = torch.zeros(size, dtype=torch.bool)
    mask[keep] = True
    owner = np.zeros(size, int)
    owner[keep] = b.seq
    assert b.group is not None

    def spread(x: np.ndarray) -> Tensor:
        out = torch.full((size, *x.shape[1:]), 0.0, dtype=dtype)
        out[keep] = torch.tensor(x, dtype=dtype)
        return out

    # An empty answer has no tokens to carry it: it exists only in the counts.
    counts = {
        "n_seqs": b.n_seqs,
        "n_groups": int(b.group.max()) + 1,
        "group_size": torch.tensor(b.count("group_size")[b.group[owner]]),
    }
    given = _common(case, spread, lambda x: spread(np.asarray(x)[b.seq]))
    tokens = torch.zeros(size, dtype=torch.long)
    tokens[keep] = torch.tensor(case.tokens)
    return given | {
        "mask": mask,
        "tokens": tokens,
        "groups": torch.tensor(b.group[owner]),
        "seq_ids": torch.tensor(owner),
        "counts": counts,
        "keep": keep,
    }


def _common(case: Case, per_token_: Any, per_answer: Any) -> dict[str, Any]:
    b = case.batch
    A = np.asarray(b.values["A"])
    given: dict[str, Any] = {"advantages": per_token_(A) if case.advantage_per_token else per_answer(A)}
    for policy, name in (("pi", "logp"), ("prox", "prox_logp"), ("mu", "mu_logp"), ("ref", "ref_logp")):
        given[name] = per_token_(b.logp[policy])
    for policy in ("pi", "prox", "mu", "ref"):
        given[f"{policy}_logprobs"] = per_token_(b.logp_v[policy])
    given["entropy"] = per_token_(-(np.exp(b.logp_v["pi"]) * b.logp_v["pi"]).sum(-1))
    for declared in case.method.doc.inputs:
        name = declared.name.value
        if name != "A":
            x = np.asarray(b.values[name])
            given[name] = per_token_(x) if declared.axis.value == "token" else per_answer(x)
    return given


def reads_logits(loss_fn: Any) -> bool:
    """Whether this loss must be called through from_logits."""
    return loss_fn.centre is not None or (loss_fn.distribution is not None and loss_fn.SUMS != ("entropy",))


def call(loss_fn: Any, given: Mapping[str, Any], logits: bool) -> tuple[float, Tensor, dict[str, Any]]:
    """(loss, d loss / d logp or logits, metrics) of one call."""
    rest = {
        k: v
        for k, v in given.items()
        if k not in ("logp", "tokens", "pi_logprobs", "keep", "entropy")
        and (k in loss_fn.needs or k in ("mask", "seq_ids", "counts"))
    }
    if logits:
        x = given["pi_logprobs"].clone().requires_grad_()
        out = loss_fn.from_logits(x, given["tokens"], **rest)
    else:
        x = given["logp"].clone().requires_grad_()
        if "entropy" in loss_fn.SUMS:
            rest["entropy"] = given["entropy"]
        out = loss_fn(x, **rest)
    out.loss.backward()
    assert x.grad is not None
    return float(out.loss.detach()), x.grad, out.metrics
