"""A made batch: answers of a sampler that is stale and mismatched by given amounts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..reference import Array, Batch
from .rollouts import Rollouts, log_softmax

VOCAB = 16
GROUPS, SIZE, LONGEST = 8, 8, 24


def synthetic_rollouts(
    seed: int = 0, staleness: float = 0.2, mismatch: float = 0.1, inputs: Mapping[str, str] | None = None
) -> Rollouts:
    """8 prompts of 8 answers over a vocabulary of 16, sampled from mu.

    Args:
        staleness: standard deviation of log r over the sampled tokens.
        mismatch: standard deviation of log c over them.
        inputs: declared inputs, name -> axis; they are drawn evenly from [0.1, 2].
    """
    rng = np.random.default_rng(seed)
    n_seqs = GROUPS * SIZE
    lengths = rng.integers(4, LONGEST + 1, n_seqs)
    n = int(lengths.sum())
    logits = 1.5 * rng.normal(size=(n, VOCAB))
    mu = log_softmax(logits)
    chance = np.cumsum(np.exp(mu), -1)
    tokens = np.minimum((rng.random((n, 1)) > chance).sum(-1), VOCAB - 1)
    prox = _drift(logits, rng, tokens, mismatch)
    pi = _drift(prox, rng, tokens, staleness)
    ref = _drift(prox, rng, tokens, staleness)
    logp_v = {"pi": log_softmax(pi), "prox": log_softmax(prox), "mu": mu, "ref": log_softmax(ref)}
    rows = np.arange(n)
    R = rng.choice([0.0, 0.5, 1.0], n_seqs)
    group = np.repeat(np.arange(GROUPS), SIZE)
    mean = R.reshape(GROUPS, SIZE).mean(1)[group]
    std = R.reshape(GROUPS, SIZE).std(1, ddof=1)[group]
    values: dict[str, Array | float] = {"A": (R - mean) / (std + 1e-6), "R": R}
    sizes = {"token": n, "segment": n_seqs, "sequence": n_seqs, "group": GROUPS, "batch": 1}
    for name, axis in (inputs or {}).items():
        drawn = rng.uniform(0.1, 2.0, sizes[axis])
        values[name] = drawn if axis != "batch" else float(drawn[0])
    position = np.concatenate([np.arange(k) for k in lengths])
    batch = Batch(
        np.repeat(np.arange(n_seqs), lengths), n_seqs, group=group, values=values,
        logp={p: x[rows, tokens] for p, x in logp_v.items()}, logp_v=logp_v,
    )  # fmt: skip
    source = (
        f"synthetic: {n_seqs} answers, {n} tokens, std of log r {staleness:g}, std of log c {mismatch:g}, seed {seed}"
    )
    notes = tuple(f"`{name}` is drawn at random" for name in inputs or {})
    return Rollouts(batch, position, source, tokens, notes=notes)


def _drift(logits: Array, rng: np.random.Generator, tokens: Array, spread: float) -> Array:
    """Logits moved at random so that the log-probs of the sampled tokens move by `spread` (standard deviation)."""
    if spread == 0:
        return logits
    direction = rng.normal(size=logits.shape)
    rows = np.arange(len(tokens))
    before = log_softmax(logits)[rows, tokens]
    scale = spread
    for _ in range(20):  # the spread is nearly proportional to the scale
        reached = float(np.std(log_softmax(logits + scale * direction)[rows, tokens] - before))
        scale *= spread / reached
    return np.asarray(logits + scale * direction)
