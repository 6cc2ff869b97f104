"""Axes are types: every value lives on one of these, from coarse to fine.

A coarse value spreads to a fine axis silently (each token of an answer sees the answer's advantage); a fine value
becomes coarse only through a written reduction, whose suffix is the axis it removes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Axis(IntEnum):
    """One value per ... ; the order is the order of refinement."""

    CONSTANT = 0  # a number or a parameter
    BATCH = 1
    GROUP = 2  # the answers to one prompt
    SEQUENCE = 3  # one answer
    SEGMENT = 4  # one turn of an answer
    TOKEN = 5  # one live token
    VOCAB = 6  # one entry of the next-token distribution at a token

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Reducer:
    """What a reduction's suffix does: which values it takes in and where the result lives."""

    suffix: str
    finest: Axis  # the finest argument it accepts
    result: Axis
    over: str  # in words, for messages and documentation


REDUCERS = {
    r.suffix: r
    for r in (
        Reducer("t", Axis.TOKEN, Axis.SEQUENCE, "an answer's live tokens"),
        Reducer("s", Axis.TOKEN, Axis.SEGMENT, "a turn's live tokens"),
        Reducer("g", Axis.SEQUENCE, Axis.GROUP, "a group's answers"),
        Reducer("b", Axis.TOKEN, Axis.BATCH, "the whole batch"),
        Reducer("v", Axis.VOCAB, Axis.TOKEN, "the next-token distribution"),
    )
}
