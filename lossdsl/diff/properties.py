"""What is true of one method's gradient: trust region, bounds, silence, drift, bias, and what it needs.

Everything is derived from the weight itself. Limits are read along rays: the ratio goes to 0 or to infinity with the rest
still. Drift and bias are exact expectations over all answers of two tokens under random tables of policies:

    drift  E_mu[ sum_t ( W_t s_t - centring ) ]            at A = +1 and at A = -1
    bias   E_mu[ sum_t A ( W_t s_t - centring ) ] - grad E_pi[ A ]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from .. import ir
from ..axes import Axis
from ..method import Method, lower_spec
from ..reference import Array, Batch, evaluate, per_token
from ..schedule import Schedule
from .assume import Assumption, assume
from .branches import Branches
from .cases import Case, cases
from .equality import Equality
from .naming import blank
from .probes import Point, batch_of, probes
from .regions import Interval, widest
from .side import Side
from .words import region_text, sign_text

FAR = (9.0, 13.5, 18.0)  # how far along a ray, as a log; the loss itself saturates at 20
TABLES = (1.0, 0.15, 0.3, 0.05, 0.09, 2e-3, 3e-4, 0.02, 0.5, 2.5)  # how far the policies of a random table are apart


@dataclass(frozen=True)
class Properties:
    """One method's gradient in words.

    Attributes:
        trust_region: where a token that has moved far the way A pushes gets no gradient at all.
        unbounded: the corners in which |W| grows without end, e.g. "A < 0, r → ∞"; empty if it is bounded.
        silent: the regions of zero gradient.
        drift: when the mean score under the sampler is zero at every prefix, so that a constant advantage moves nothing.
        bias: when the expected update is the policy gradient.
        needs: the inputs that the loss must be given; passes: over the logits.
    """

    trust_region: str
    unbounded: tuple[str, ...]
    silent: tuple[str, ...]
    drift: str
    bias: str
    needs: tuple[str, ...]
    passes: str

    def json(self) -> dict[str, Any]:
        return asdict(self)


def properties(side: Side) -> Properties:
    """The properties of a side, at its parameters and under its assumption."""
    schedule = Schedule(side.method)
    return Properties(
        trust_region(side),
        unbounded(side),
        silent(side),
        when_zero(side, drift_norm, ("zero", "not zero, not even on-policy")),
        when_zero(side, bias_norm, ("unbiased", "biased, even on-policy")),
        tuple(schedule.needs),
        schedule.passes,
    )


# --- along rays -----------------------------------------------------------------------------------------------------------


def _ratios(side: Side) -> tuple[str, ...]:
    """The ratios that the weight moves with, r and c before rho."""
    policies = set()
    for leaf in ir.leaves(*side.weights):
        policies |= {"logp": {str(leaf.attr)}, "logratio": set(ir.RATIOS.get(str(leaf.attr), ()))}.get(leaf.op, set())
    if {"pi", "prox", "mu"} <= policies:
        return ("r", "c")
    return tuple(name for name, pair in ir.RATIOS.items() if set(pair) <= policies)


def _ray(ratio: str, direction: int, high: float) -> list[Point]:
    """Tokens along which one ratio moves; `high` is the largest log-prob on the way."""
    points: list[Point] = []
    for far in FAR:
        up, down = high, high - far
        moved, rest = (up, down) if direction > 0 else (down, up)
        prox = moved if ratio == "c" else rest
        points.append((moved, prox, rest, rest))
    return points


def _along(side: Side, sign: int, ratio: str, direction: int) -> Iterator[Array]:
    """|W| along the ray, for likely tokens and for rare ones."""
    for high in (-0.05, -9.0):
        batch, _ = batch_of([[p] for p in _ray(ratio, direction, high)], (side,), np.random.default_rng(0))
        yield np.abs(per_token(side.weight(sign), batch, side.values))


def unbounded(side: Side) -> tuple[str, ...]:
    """The corners in which |W| keeps growing."""
    found = []
    for sign in (1, -1):
        for ratio in _ratios(side):
            for direction, end in ((1, "∞"), (-1, "0")):
                if any(w[2] > 1.5 * w[1] > 2.25 * w[0] and w[2] > 1 for w in _along(side, sign, ratio, direction)):
                    found.append((sign, f"{ratio} → {end}"))
    both = [corner for sign, corner in found if sign > 0 and (-1, corner) in found]
    return tuple(dict.fromkeys(corner if corner in both else f"{sign_text(sign)}, {corner}" for sign, corner in found))


def trust_region(side: Side) -> str:
    """Where a far token is silenced: the ratio has gone the way that A pushes, and the weight there is the number 0."""
    moving = [name for name in _ratios(side) if name != "c"]
    signs = [sign_text(sign) for sign in (1, -1) if moving and _silences(side, sign, moving[0])]
    return f"masks {moving[0]}" + ("" if len(signs) == 2 else f" for {signs[0]} only") if signs else "none"


def _silences(side: Side, sign: int, ratio: str) -> bool:
    batch, _ = batch_of([[p] for p in _ray(ratio, sign, -0.05)], (side,), np.random.default_rng(0))
    branches = Branches(side.weight(sign), batch, side.values)
    return all(branches.piece(token)[0] is ir.ZERO for token in (1, 2))


def own_cases(side: Side) -> tuple[Case, ...]:
    """The regions of one weight alone."""
    return cases((side, side), *probes((side,)), Equality((side, side)))


def silent(side: Side) -> tuple[str, ...]:
    """The regions in which the weight is 0."""
    rows = own_cases(side)
    found = []
    for row in rows:
        if row.actions[0] == "masked":
            others = [other.where for other in rows if other.sign == row.sign and other.weights != row.weights]
            where: dict[ir.Node, Interval] = widest(row.where, others)
            region = region_text(replace(row, where=where))
            found.append((row.sign, region))
    both = [region for sign, region in found if sign > 0 and (-1, region) in found]
    return tuple(
        dict.fromkeys(
            (region or "everywhere") if region in both else ", ".join(x for x in (sign_text(sign), region) if x)
            for sign, region in found
        )
    )


# --- exact expectations -----------------------------------------------------------------------------------------------------

V = 3  # tokens of the vocabulary; answers have two


@dataclass(frozen=True)
class _Tables:
    """Policies by context (the root, then after each first token), and a reward per answer."""

    logp: dict[str, Array]  # [1 + V, V]
    reward: Array  # [V * V]


@cache
def _tables(spread: float, seed: int) -> _Tables:
    rng = np.random.default_rng([seed, round(1000 * spread)])
    base = rng.normal(size=(1 + V, V))
    logits = {p: base + spread * rng.normal(size=base.shape) for p in ir.POLICIES}
    logp = {p: z - np.log(np.exp(z).sum(-1, keepdims=True)) for p, z in logits.items()}
    return _Tables(logp, rng.uniform(-1, 1, V * V))


def _gradient(side: Side, tables: _Tables, A: Array, sampler: str) -> Array:
    """The expected gradient over the logits of every context, answers drawn from `sampler`."""
    merged = side.assumption.merged
    first, second = np.divmod(np.arange(V * V), V)
    context = np.stack([np.zeros(V * V, int), 1 + first], 1).ravel()
    token = np.stack([first, second], 1).ravel()
    logp_v = {p: tables.logp[merged[p]][context] for p in ir.POLICIES}
    logp = {p: x[np.arange(len(token)), token] for p, x in logp_v.items()}
    seq = np.repeat(np.arange(V * V), 2)
    values: dict[str, Array | float] = {"A": A[seq] if side.token_A else A}
    for declared in side.method.doc.inputs:
        if declared.name.value != "A":
            shape = {"token": len(seq), "batch": None}.get(declared.axis.value, V * V)
            values[declared.name.value] = 1.0 if shape is None else np.ones(shape)
    batch = Batch(seq, V * V, group=np.zeros(V * V, int), logp=logp, logp_v=logp_v, values=values)
    chance = np.exp(np.bincount(seq, weights=logp[merged[sampler]]))[seq]
    pi = np.exp(logp_v["pi"])
    d = np.zeros_like(pi)
    d[np.arange(len(token)), token] = per_token(side.weighted, batch, side.values)
    d = d + batch.spread(evaluate(side.entry, batch, side.values), side.entry.axis, Axis.VOCAB)
    dz = (d - pi * d.sum(-1, keepdims=True)) * chance[:, None]
    total = np.zeros((1 + V, V))
    np.add.at(total, context, dz)
    return total


def drift_norm(side: Side, spread: float, seed: int) -> float:
    """The largest drift of the two signs."""
    tables = _tables(spread, seed)
    return max(float(np.linalg.norm(_gradient(side, tables, sign * np.ones(V * V), "mu"))) for sign in (1.0, -1.0))


def bias_norm(side: Side, spread: float, seed: int) -> float:
    """The distance of the expected update from the policy gradient."""
    tables = _tables(spread, seed)
    found = _gradient(side, tables, tables.reward, "mu")
    return float(np.linalg.norm(found - _gradient(_reinforce(side), tables, tables.reward, "pi")))


@cache
def _log_likelihood() -> Method:
    return lower_spec(blank())


def _reinforce(side: Side) -> Side:
    """W = 1: in expectation under pi, the policy gradient itself."""
    return Side("", _log_likelihood(), side.assumption, side.token_A)


def when_zero(side: Side, norm: Callable[[Side, float, int], float], words: tuple[str, str]) -> str:
    """`zero`, `zero if c = 1`, `zero on-policy only`, or never: the mildest assumption under which a norm vanishes."""
    for extra, text in (("", ""), ("c = 1", " if c = 1"), ("on_policy", " on-policy only")):
        assumption = _with(side.assumption, extra)
        other = replace(side, assumption=assumption)
        if all(norm(other, spread, seed) < 1e-10 for spread in TABLES for seed in range(2)):
            return words[0] + text
    return words[1]


def _with(assumption: Assumption, text: str) -> Assumption:
    more = assume([text] if text else [], blank())
    return Assumption(assumption.texts, assumption.same + more.same, ())
