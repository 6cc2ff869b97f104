"""Which of many methods are the same loss: classes of equal gradients under an assumption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import ir
from ..axes import Axis
from ..method import Method, advantage_of
from ..reference import Array, Batch, evaluate, per_token
from .assume import Assumption
from .equality import Equality
from .side import Side
from .verdict import apart, find_witness, on_a_bound, random_batch

BATCHES = 4


@dataclass(frozen=True)
class Class:
    """Methods with one gradient for equal advantages; `proved` unless some member agreed on samples only."""

    names: tuple[str, ...]
    proved: bool


def classes(methods: Sequence[Method], assumption: Assumption) -> tuple[Class, ...]:
    """The classes of two or more, in the order of their first members.

    Numbers tell most methods apart; of the others algebra proves each equal to the first of its class.
    """
    token_A = any(advantage_of(m).axis is Axis.TOKEN for m in methods)
    sides = [Side(m.name, m, assumption, token_A) for m in methods]
    batches = [random_batch(sides, number) for number in range(BATCHES)]
    prints = [np.concatenate([_print(side, batch) for batch in batches]) for side in sides]
    found: list[tuple[list[int], list[bool]]] = []
    for i in range(len(sides)):
        for members, proofs in found:
            proof = _same(sides[members[0]], sides[i], prints[members[0]], prints[i])
            if proof is not None:
                members.append(i)
                proofs.append(proof)
                break
        else:
            found.append(([i], []))
    return tuple(
        Class(tuple(methods[i].name for i in members), all(proofs)) for members, proofs in found if len(members) > 1
    )


def _same(a: Side, b: Side, numbers_a: Array, numbers_b: Array) -> bool | None:
    """None if numbers tell the two apart, else whether they are proved equal."""
    if apart(numbers_a, numbers_b).any() or find_witness((a, b))[1] is not None:
        return None
    proved = Equality((a, b)).equal((a.coef, b.coef), (a.whole_entry, b.whole_entry))
    return None if not proved and on_a_bound((a, b)) is not None else proved


def _print(side: Side, batch: Batch) -> Array:
    """Numbers that two equal gradients share: the sampled tokens' and, along a fixed direction, the vocabulary's."""
    direction = ir.exp(ir.logp("pi", Axis.VOCAB))
    values = side.values
    entry = ir.reduce("sum", "v", ir.mul(side.whole_entry, direction))
    along = np.broadcast_to(batch.spread(evaluate(entry, batch, values), entry.axis, Axis.TOKEN), batch.seq.shape)
    held = np.ones(len(batch.seq), bool)
    for condition in side.conditions:
        held &= per_token(ir.where(condition, ir.ONE, ir.ZERO), batch, values) > 0
    return np.concatenate([per_token(side.coef, batch, values)[held], along[held]])
