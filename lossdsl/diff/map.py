"""All methods at once: which are the same loss under an assumption, and how far apart the others' gradients point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..axes import Axis
from ..method import Method, advantage_of
from ..reference import Array
from .assume import assume
from .classes import Class, classes
from .measure import cosines
from .rollouts import Rollouts
from .side import Side

SCHEMA = "lossdsl.map/1"
MATRIX = 12  # methods beyond this are not shown as a matrix in the terminal


@dataclass(frozen=True)
class Map:
    """Many methods compared.

    Attributes:
        groups: (heading, names) in the order of the review.
        classes: methods with one gradient for equal advantages, two or more each.
        cosines: [n, n] of the gradients on the rollouts, in the order of `names`; nan where one could not be taken.
        source: what the rollouts are; assumption: what was taken for granted; notes: what could not be measured.
    """

    groups: tuple[tuple[str, tuple[str, ...]], ...]
    classes: tuple[Class, ...]
    cosines: Array
    source: str
    assumption: str
    notes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, names in self.groups for name in names)

    def class_of(self, name: str) -> Class | None:
        return next((c for c in self.classes if name in c.names), None)

    def nearest(self, name: str) -> tuple[str, float] | None:
        """The other method, outside its class, whose gradient points most nearly the same way."""
        i = self.names.index(name)
        mine = self.class_of(name)
        others = [j for j, n in enumerate(self.names) if j != i and not (mine and n in mine.names)]
        known = [j for j in others if not np.isnan(self.cosines[i, j])]
        if not known:
            return None
        best = max(known, key=lambda j: (float(self.cosines[i, j]), -j))
        return self.names[best], float(self.cosines[i, best])

    def json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "assumption": self.assumption,
            "source": self.source,
            "groups": [{"heading": h, "names": list(n)} for h, n in self.groups],
            "classes": [{"names": list(c.names), "proved": c.proved} for c in self.classes],
            "names": list(self.names),
            "cosines": [[None if np.isnan(x) else round(float(x), 6) for x in row] for row in self.cosines],
            "notes": list(self.notes),
        }


def make_map(groups: Sequence[tuple[str, Sequence[Method]]], assumptions: Sequence[str], rollouts: Rollouts) -> Map:
    """The map of methods under headings.

    Raises:
        SpecError: E0605, an assumption that makes no sense.
    """
    methods = [m for _, ms in groups for m in ms]
    assumption = assume(assumptions, methods[0].doc)
    token_A = any(advantage_of(m).axis is Axis.TOKEN for m in methods)
    matrix, notes = cosines([Side(m.name, m, assumption, token_A) for m in methods], rollouts)
    return Map(
        tuple((heading, tuple(m.name for m in ms)) for heading, ms in groups),
        classes(methods, assumption), matrix, rollouts.source, str(assumption), (*rollouts.notes, *notes),
    )  # fmt: skip
