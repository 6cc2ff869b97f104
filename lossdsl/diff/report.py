"""The whole answer to `how do two methods' gradients differ?`, as one immutable object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..method import Method
from ..reference import Batch, per_token
from .assume import assume
from .cases import Case, cases, first_difference
from .equality import Equality
from .knobs import Knob, knobs
from .measure import Measured, measure
from .naming import spell
from .probes import edges, probes
from .properties import Properties, properties
from .rollouts import Rollouts
from .side import Side, sides
from .verdict import Verdict, judge, would_be_equal
from .words import number_text, region_text, weight_text

SCHEMA = "lossdsl.diff/1"


@dataclass(frozen=True)
class Diff:
    """Two methods compared.

    Attributes:
        a, b: the two sides, every parameter filled in.
        verdict: equal, equal up to a factor, equal but for the data side, or different, and in which parts.
        knobs: the knobs that differ, as resolved values.
        cases: both weights in every region that either tells apart, A > 0 first.
        measured: both gradients on rollouts, where some were given; rollouts: these.
        properties: of each side.
        notes: what the numbers rest on: stand-ins for parameters without a default, the size of A.
    """

    a: Side
    b: Side
    verdict: Verdict
    knobs: tuple[Knob, ...]
    cases: tuple[Case, ...]
    properties: tuple[Properties, Properties]
    notes: tuple[str, ...]
    measured: Measured | None = None
    rollouts: Rollouts | None = field(default=None, repr=False)

    @property
    def equal(self) -> bool:
        return self.verdict.equal

    @property
    def first(self) -> Case | None:
        """The first case in which the weights differ."""
        return first_difference(self.cases)

    def json(self) -> dict[str, Any]:
        """Everything, for programs; `schema` names the version of this layout."""
        v = self.verdict
        witness = None
        if v.witness is not None:
            witness = {"at": dict(v.witness.at), "gradients": list(v.witness.gradients), "entry": v.witness.entry}
        return {
            "schema": SCHEMA,
            "a": _side(self.a),
            "b": _side(self.b),
            "assumptions": list(self.a.assumption.texts),
            "verdict": {
                "kind": v.kind,
                "proved": v.proved,
                "points": v.points,
                "differing": list(v.differing),
                "factor": None if v.factor is None else spell(v.factor),
                "equal_if": list(v.also),
                "witness": witness,
            },
            "knobs": [k.json() for k in self.knobs],
            "cases": [_case(c) for c in self.cases],
            "properties": [p.json() for p in self.properties],
            "notes": list(self.notes),
            "measured": None if self.measured is None else self.measured.json(),
        }


def _side(side: Side) -> dict[str, Any]:
    return {"label": side.label, "name": side.method.name, "title": side.method.title, "params": side.method.defaults}


def _case(case: Case) -> dict[str, Any]:
    return {
        "sign_of_A": case.sign,
        "where": region_text(case),
        "weights": [weight_text(w) for w in case.weights],
        "actions": list(case.actions),
        "sample": dict(case.sample),
        "values": list(case.values),
        "same": case.same,
        "proved": case.proved,
    }


def compare(
    a: Method,
    b: Method,
    assumptions: Sequence[str] = (),
    labels: tuple[str, str] | None = None,
    rollouts: Rollouts | None = None,
) -> Diff:
    """Compare two methods, their parameters at their defaults.

    Args:
        labels: what the report calls the two.
        rollouts: what both gradients are taken on, besides.
        assumptions: `c = 1`, `on_policy`, `A > 0`, `r < 2`, ...: what may be taken for granted.

    Raises:
        SpecError: an assumption that makes no sense.
    """
    assumption = assume(assumptions, a.doc)
    pair = sides(a, b, assumption, labels)
    verdict = judge(pair)
    if not verdict.equal and not assumptions:
        others = tuple(assume([text], a.doc) for text in ("c = 1", "on_policy"))
        also = would_be_equal(*pair, others)
        verdict = replace(verdict, also=also)
    batch, subjects = probes(pair)
    equality = Equality(pair)
    found = cases(pair, batch, subjects, equality)
    on_bounds = edges(pair) if verdict.kind == "bound" else None
    if on_bounds is not None:
        found += tuple(c for c in cases(pair, *on_bounds, equality) if not c.same)
    differing = knobs(pair, equality)
    measured = None if rollouts is None else measure(pair, rollouts)
    facts = properties(pair[0]), properties(pair[1])
    return Diff(*pair, verdict, differing, found, facts, tuple(_notes(pair, batch)), measured, rollouts)


def _notes(pair: tuple[Side, Side], batch: Batch) -> Iterator[str]:
    for name, value in {**pair[1].values, **pair[0].values}.items():
        yield f"{name} has no default: one free value for both sides, {number_text(value)} at sample points"
    for side in pair:
        one, two = (
            per_token(
                side.weighted,
                replace(batch, values={**batch.values, "A": size * np.sign(batch.values["A"])}),
                side.values,
            )
            for size in (1.0, 2.0)
        )
        if not np.allclose(2 * one, two, rtol=1e-9, atol=0):
            yield f"the weight of {side.label} depends on the size of A; shown at |A| = 1"
