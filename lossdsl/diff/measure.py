"""Two gradients on rollouts: how far apart, which tokens one silences, where they differ most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .. import ir
from ..axes import Axis
from ..reference import Array, Batch, evaluate, per_token
from ..schedule import POLICY_INPUTS
from .rollouts import Rollouts
from .side import Side

TOKENS, ANSWERS = 10, 5


@dataclass(frozen=True)
class Space:
    """The two gradients in one space: cosine of their angle, |a| / |b|, and both norms; None where one is undefined."""

    name: str
    cosine: float | None
    norm_ratio: float | None
    norms: tuple[float, float]


@dataclass(frozen=True)
class Silenced:
    """Shares of the live tokens with this sign of A whose weight is exactly 0."""

    sign: int
    tokens: int
    only_a: float
    only_b: float
    both: float


@dataclass(frozen=True)
class Where:
    """A token (or an answer, where `token` is None) that contributes to the difference.

    Attributes:
        share: of the sum of |gradient of a - gradient of b| over all tokens.
        values: A, ratios, both weights.
    """

    answer: int
    token: int | None
    share: float
    values: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """What rollouts say. `notes`: what could not be measured and why, and what was made up."""

    source: str
    spaces: tuple[Space, ...]
    silenced: tuple[Silenced, ...]
    tokens: tuple[Where, ...]
    answers: tuple[Where, ...]
    notes: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        return asdict(self)


def measure(sides: tuple[Side, Side], rollouts: Rollouts) -> Measured:
    """Compare two sides on rollouts; the same advantages, policies and counts go into both."""
    notes = [*rollouts.notes]
    lacking = [note for side in sides for note in missing(side, rollouts)]
    if lacking:
        return Measured(rollouts.source, (), (), (), (), (*notes, *lacking))
    a, b = (fitted(side, rollouts) for side in sides)
    batch = rollouts.batch
    one, other = (per_token(s.coef, batch, s.values) for s in (a, b))
    spaces = [space("log-probs of the sampled tokens", float(one @ other), float(one @ one), float(other @ other))]
    if "pi" in batch.logp_v and rollouts.tokens is not None:
        spaces += _logit_spaces((a, b), rollouts)
    else:
        notes.append("logit space needs pi's whole distribution: give hidden states and lm_head, and the tokens")
    A = per_token(a.A, batch, {})
    weights = [per_token(s.weighted, batch, s.values) for s in (a, b)]
    return Measured(
        rollouts.source,
        tuple(spaces),
        tuple(_silenced(sign, A, weights) for sign in (1, -1)),
        _tokens(one - other, A, weights, rollouts),
        _answers(one - other, rollouts),
        tuple(notes),
    )


def fitted(side: Side, rollouts: Rollouts) -> Side:
    """The side with the kind of advantage that the rollouts have."""
    per = np.shape(rollouts.batch.values["A"])
    return replace(side, token_A=per == rollouts.batch.seq.shape and per != (rollouts.batch.n_seqs,))


def missing(side: Side, rollouts: Rollouts) -> list[str]:
    """Why a side cannot be measured on these rollouts, one line per lacking input."""
    batch = rollouts.batch
    found = []
    for leaf in ir.leaves(side.coef, side.whole_entry):
        policies = {"logp": (str(leaf.attr),), "logratio": ir.RATIOS.get(str(leaf.attr), ())}.get(leaf.op, ())
        for p in policies:
            if leaf.axis is Axis.VOCAB and p not in batch.logp_v:
                found.append(f"the next-token distribution of {p} ({p}_logprobs, or its top-k with hidden states)")
            elif leaf.axis is not Axis.VOCAB and p not in batch.logp:
                found.append(f"`{POLICY_INPUTS.get(p, 'logp')}`")
        if leaf.op == "input" and leaf.attr != "A" and leaf.attr not in batch.values:
            try:
                batch.count(str(leaf.attr))
            except KeyError:
                found.append(f"`{leaf.attr}`")
    because = {f"`{name}`": why for name, why in rollouts.unread.items()}
    return [
        f"{side.label} cannot be measured: it reads {what}, {because.get(what, 'which is not there')}"
        for what in dict.fromkeys(found)
    ]


def space(name: str, dot: float, aa: float, bb: float) -> Space:
    """From the three inner products."""
    a, b = math.sqrt(aa), math.sqrt(bb)
    cosine = min(1.0, max(-1.0, dot / (a * b))) if a and b else None
    return Space(name, cosine, a / b if b else None, (a, b))


def _logit_spaces(sides: tuple[Side, Side], rollouts: Rollouts) -> list[Space]:
    """dJ/dz [N, V], and through z = hidden @ head.T the gradient of the head [V, H]."""
    one, other = (logit_gradient(side, rollouts) for side in sides)
    found = [space("logits", float((one * other).sum()), float((one * one).sum()), float((other * other).sum()))]
    if rollouts.hidden is not None and rollouts.head is not None:
        x, y = (g.T @ rollouts.hidden.astype(np.float64) for g in (one, other))
        found.append(space("lm_head", float((x * y).sum()), float((x * x).sum()), float((y * y).sum())))
    return found


def logit_gradient(side: Side, rollouts: Rollouts) -> Array:
    """dJ/dz = D - pi * sum_v D(v), with D(v) = coef * 1[v = y] + entry(v)."""
    batch = rollouts.batch
    assert rollouts.tokens is not None
    pi = np.exp(batch.logp_v["pi"])
    d = np.zeros_like(pi)
    d[np.arange(len(pi)), rollouts.tokens] = per_token(side.coef, batch, side.values)
    if side.whole_entry is not ir.ZERO:
        d += batch.spread(evaluate(side.whole_entry, batch, side.values), side.whole_entry.axis, Axis.VOCAB)
    return np.asarray(d - pi * d.sum(-1, keepdims=True))


def _silenced(sign: int, A: Array, weights: Sequence[Array]) -> Silenced:
    there = np.sign(A) == sign
    n = int(there.sum())
    a, b = (w[there] == 0 for w in weights)
    shares = [float(x.sum()) / n if n else 0.0 for x in (a & ~b, b & ~a, a & b)]
    return Silenced(sign, n, *shares)


def _tokens(gap: Array, A: Array, weights: Sequence[Array], rollouts: Rollouts) -> tuple[Where, ...]:
    batch, size = rollouts.batch, np.abs(gap)
    total = float(size.sum())
    found = []
    for t in np.argsort(-size, kind="stable")[:TOKENS]:
        if size[t] == 0:
            break
        values = {"A": float(A[t]), **_ratios(batch, int(t))}
        if A[t] != 0:
            values |= {"W_a": float(weights[0][t] / A[t]), "W_b": float(weights[1][t] / A[t])}
        found.append(Where(int(batch.seq[t]) + 1, int(rollouts.position[t]), float(size[t]) / total, values))
    return tuple(found)


def _ratios(batch: Batch, t: int) -> dict[str, float]:
    return {
        name: float(np.exp(batch.logp[above][t] - batch.logp[below][t]))
        for name, (above, below) in ir.RATIOS.items()
        if above in batch.logp and below in batch.logp
    }


def _answers(gap: Array, rollouts: Rollouts) -> tuple[Where, ...]:
    batch = rollouts.batch
    size = np.bincount(batch.seq, weights=np.abs(gap), minlength=batch.n_seqs)
    total = float(size.sum())
    A = np.asarray(batch.values["A"])
    return tuple(
        Where(int(i) + 1, None, float(size[i]) / total,
              {"len": float(batch.lengths[i]), **({"A": float(A[i])} if A.shape == size.shape else {})})
        for i in np.argsort(-size, kind="stable")[:ANSWERS]
        if size[i] > 0
    )  # fmt: skip


def cosines(sides: Sequence[Side], rollouts: Rollouts) -> tuple[Array, tuple[str, ...]]:
    """Pairwise cosines in logit space (of log-probs where pi's distribution is not known); nan where one is lacking."""
    notes = [note for side in sides for note in missing(side, rollouts)]
    whole = "pi" in rollouts.batch.logp_v and rollouts.tokens is not None
    rows: list[Array | None] = []
    for side in sides:
        if missing(side, rollouts):
            rows.append(None)
            continue
        fit = fitted(side, rollouts)
        g = logit_gradient(fit, rollouts) if whole else per_token(fit.coef, rollouts.batch, fit.values)
        norm = float(np.linalg.norm(g))
        rows.append(g.ravel() / norm if norm else g.ravel())
    found = np.full((len(rows), len(rows)), np.nan)
    for i, x in enumerate(rows):
        for j, y in enumerate(rows[: i + 1]):
            if x is not None and y is not None:
                found[i, j] = found[j, i] = float(np.clip(x @ y, -1, 1))
    return found, tuple(notes)
