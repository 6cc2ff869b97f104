"""Random small batches that reach every corner of a method: for witnesses, and for tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import ir
from .axes import Axis
from .method import Method, advantage_of
from .reference import Array, Batch

VOCAB = 6


def sample_batches(method: Method, count: int, seed: int = 0) -> Iterator[Batch]:
    """`count` batches of ragged answers; policies drift apart a little in some batches and wildly in others."""
    for number in range(count):
        yield sample_batch(method, np.random.default_rng([seed, number]), spread=(0.01, 0.3, 1.5)[number % 3])


def sample_batch(
    method: Method,
    rng: np.random.Generator,
    spread: float = 0.5,
    groups: int = 3,
    size: int = 3,
    longest: int = 6,
    still: bool = True,
) -> Batch:
    """One batch: `groups` prompts of `size` answers of 0 to `longest` tokens, all four policies, a small vocabulary.

    With `still` some answers have the same distribution under all policies: every ratio of theirs is exactly 1.
    """
    n_seqs = groups * size
    lengths = rng.integers(0, longest + 1, n_seqs)
    seq = np.repeat(np.arange(n_seqs), lengths)
    n = len(seq)
    base = rng.normal(size=(n, VOCAB))
    drift = spread * rng.choice([0.0 if still else 0.5, 0.3, 1.0, 2.0], size=n_seqs)[seq][:, None]
    logits = {policy: base + drift * rng.normal(size=(n, VOCAB)) for policy in ir.POLICIES}
    logp_v = {policy: z - np.log(np.exp(z).sum(-1, keepdims=True)) for policy, z in logits.items()}
    tokens = rng.integers(0, VOCAB, n)
    logp = {policy: x[np.arange(n), tokens] for policy, x in logp_v.items()}
    A = advantage_of(method)
    values: dict[str, Array | float] = {
        "A": rng.choice([-2.0, -1.0, 0.0, 0.5, 1.0], size=n if A.axis is Axis.TOKEN else n_seqs)
    }
    values["R"] = rng.choice([0.0, 0.3, 1.0], size=n_seqs)
    shape = {"token": n, "segment": n_seqs, "sequence": n_seqs, "group": groups, "batch": 1}
    for declared in method.doc.inputs:
        if declared.name.value != "A":
            x = rng.uniform(0.1, 2.0, size=shape[declared.axis.value])
            values[declared.name.value] = x if declared.axis.value != "batch" else float(x[0])
    return Batch(
        seq=seq, n_seqs=n_seqs, group=np.repeat(np.arange(groups), size), logp=logp, logp_v=logp_v, values=values
    )
