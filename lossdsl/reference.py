"""The meaning of the IR, in float64 numpy: the oracle that generated code is held against.

It walks the graph node by node on a flat list of live tokens (no padding, no layout, no fusion, no log-space tricks),
so it shares nothing with the emitter but the IR itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from . import ir
from .autodiff import Gradient
from .axes import Axis
from .ir import Node
from .primitives import PRIMITIVES

Array = np.ndarray[Any, Any]


@dataclass
class Batch:
    """Answers as flat arrays over their live tokens.

    Attributes:
        seq: [N] the answer that each live token belongs to, 0..S-1 in any order.
        n_seqs: S, answers, empty ones included.
        group: [S] the group of each answer, 0..G-1; default: all in one group.
        segment: [N] the turn of each token, unique over the batch; default: one turn per answer.
        logp: policy -> [N] log-prob of the sampled token under "pi", "prox", "mu", "ref".
        logp_v: policy -> [N, V] log-probs of the whole next-token distribution.
        values: other inputs by name ("A", "R", declared inputs), each on its own axis: [N], [S], [G] or a number.
        counts: overrides for the global counts ("n_tokens", "n_seqs", ...).
    """

    seq: Array
    n_seqs: int
    group: Array | None = None
    segment: Array | None = None
    logp: Mapping[str, Array] = field(default_factory=dict)
    logp_v: Mapping[str, Array] = field(default_factory=dict)
    values: Mapping[str, Array | float] = field(default_factory=dict)
    counts: Mapping[str, Array | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seq = np.asarray(self.seq, dtype=np.int64)
        self.group = np.zeros(self.n_seqs, np.int64) if self.group is None else np.asarray(self.group, dtype=np.int64)
        self.segment = self.seq if self.segment is None else np.asarray(self.segment, dtype=np.int64)

    @property
    def lengths(self) -> Array:
        return np.bincount(self.seq, minlength=self.n_seqs).astype(np.float64)

    def parent(self, axis: Axis) -> tuple[Array, int]:
        """For each item of `axis`' finer neighbour in a reduction: the item it belongs to, and how many there are."""
        assert self.group is not None and self.segment is not None
        match axis:
            case Axis.SEQUENCE:
                return self.seq, self.n_seqs
            case Axis.SEGMENT:
                return self.segment, int(self.segment.max(initial=-1)) + 1
            case Axis.GROUP:
                return self.group, int(self.group.max(initial=-1)) + 1
        raise ValueError(axis)

    def spread(self, x: Array, source: Axis, target: Axis) -> Array:
        """A coarse array repeated onto a finer axis."""
        if source is target or source <= Axis.BATCH:
            if source <= Axis.BATCH and target > Axis.BATCH:
                return np.broadcast_to(x, self._shape(target))
            return x
        if target is Axis.VOCAB:
            return self.spread(x, source, Axis.TOKEN)[:, None]
        if source is Axis.GROUP:
            x, source = x[self.parent(Axis.GROUP)[0]], Axis.SEQUENCE
        if source is Axis.SEQUENCE and target is Axis.SEGMENT:
            first = np.zeros(self.parent(Axis.SEGMENT)[1], np.int64)
            first[self.parent(Axis.SEGMENT)[0]] = self.seq
            return x[first]
        if source is target:
            return x
        return x[self.seq] if source is Axis.SEQUENCE else x[self.parent(Axis.SEGMENT)[0]]

    def _shape(self, axis: Axis) -> tuple[int, ...]:
        match axis:
            case Axis.TOKEN:
                return (len(self.seq),)
            case Axis.SEQUENCE:
                return (self.n_seqs,)
            case Axis.VOCAB:
                return (len(self.seq), 1)
        return (self.parent(axis)[1],)

    def count(self, name: str) -> Array:
        """A count by its language name."""
        if name in self.counts:
            return np.asarray(self.counts[name], dtype=np.float64)
        groups, n_groups = self.parent(Axis.GROUP)
        match name:
            case "len":
                return self.lengths
            case "n_tokens":
                return np.asarray(float(len(self.seq)))
            case "n_seqs":
                return np.asarray(float(self.n_seqs))
            case "n_groups":
                return np.asarray(float(n_groups))
            case "group_size":
                return np.bincount(groups, minlength=n_groups).astype(np.float64)
            case "group_tokens":
                return np.bincount(groups, weights=self.lengths, minlength=n_groups)
        raise KeyError(name)


def evaluate(root: Node, batch: Batch, params: Mapping[str, float]) -> Array:
    """The value of a node: an array shaped by its axis (a 0-dim one for constants and batch values)."""
    return evaluate_all((root,), batch, params)[id(root)]


def evaluate_all(roots: tuple[Node, ...], batch: Batch, params: Mapping[str, float]) -> dict[int, Array]:
    """The value of every node below the roots, by id."""
    known: dict[int, Array] = {}
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for node in ir.topological(*roots):
            if not node.args:
                known[id(node)] = _leaf(node, batch, params)
            elif node.op == "reduce":
                known[id(node)] = _reduce(node, [known[id(a)] for a in node.args], batch)
            else:
                args = [batch.spread(known[id(a)], a.axis, node.axis) for a in node.args]
                known[id(node)] = PRIMITIVES[node.op].reference(*args)
    return known


def per_token(root: Node, batch: Batch, params: Mapping[str, float]) -> Array:
    """The same, spread to one value per live token."""
    return np.array(batch.spread(evaluate(root, batch, params), root.axis, Axis.TOKEN), dtype=np.float64)


def logits_gradient(gradient: Gradient, tokens: Array, batch: Batch, params: Mapping[str, float]) -> Array:
    """dJ/dz [N, V] for logits z with log_softmax(z) = logp_v["pi"], from the closed-form gradient.

    With D(v) = coef * 1[v = y] + sum_k (dJ/d sum_k) * (d sum_k / d log pi(v)):  dJ/dz = D - pi * sum_v D(v).
    """
    pi = np.exp(batch.logp_v["pi"])
    d = np.zeros_like(pi)
    d[np.arange(len(tokens)), tokens] = per_token(gradient.coef, batch, params)
    for term in gradient.sums:
        slope = batch.spread(evaluate(term.slope, batch, params), term.slope.axis, Axis.VOCAB)
        d = d + per_token(term.cotangent, batch, params)[:, None] * slope
    return np.asarray(d - pi * d.sum(-1, keepdims=True))


def _leaf(node: Node, batch: Batch, params: Mapping[str, float]) -> Array:
    match node.op:
        case "const":
            assert isinstance(node.attr, Fraction)
            return np.asarray(float(node.attr))
        case "param":
            return np.asarray(float(params[str(node.attr)]))
        case "logp":
            table = batch.logp_v if node.axis is Axis.VOCAB else batch.logp
            return np.maximum(np.asarray(table[str(node.attr)], dtype=np.float64), -1e4)  # probability 0 is e**-10000
        case "logratio":
            above, below = ir.RATIOS[str(node.attr)]
            return _leaf(ir.logp(above, node.axis), batch, params) - _leaf(ir.logp(below, node.axis), batch, params)
        case "true" | "false":
            return np.asarray(node.op == "true")
    name = str(node.attr)
    if name in batch.values:
        return np.asarray(batch.values[name], dtype=np.float64)
    return batch.count(name)


def _reduce(node: Node, args: list[Array], batch: Batch) -> Array:
    assert isinstance(node.attr, tuple)
    kind, suffix = node.attr
    x, axis = args[0], node.args[0].axis
    extra = float(args[1]) if len(args) > 1 else 0.0
    if suffix == "v":
        if kind == "sum":
            return np.asarray(x.sum(-1))
        return np.asarray(x.max(-1) if kind == "max" else x.min(-1) if kind == "min" else x.any(-1))
    if suffix == "b":
        ids, n = np.zeros(x.size, np.int64), 1
        x = x.reshape(-1)
    else:
        finer = Axis.SEQUENCE if suffix == "g" else Axis.TOKEN
        x = np.asarray(batch.spread(x, axis, finer))
        ids, n = batch.parent({"t": Axis.SEQUENCE, "s": Axis.SEGMENT, "g": Axis.GROUP}[suffix])
    if kind == "loo":
        total, size = _by(ids, n, x), np.bincount(ids, minlength=n)
        return np.asarray((total[ids] - x) / (size[ids] - 1.0))
    result = _statistic(kind, x, ids, n, extra)
    return result.reshape(()) if suffix == "b" else result


def _by(ids: Array, n: int, x: Array) -> Array:
    return np.bincount(ids, weights=x, minlength=n)


def _statistic(kind: str, x: Array, ids: Array, n: int, extra: float) -> Array:
    """One value per id; over nothing: sum 0, mean 0, max and min 0, std 0, any False."""
    if kind == "any":
        return _by(ids, n, x.astype(np.float64)) > 0
    if kind == "sum":
        return _by(ids, n, x)
    count = np.bincount(ids, minlength=n)
    low, high = np.full(n, np.inf), np.full(n, -np.inf)
    np.minimum.at(low, ids, x)
    np.maximum.at(high, ids, x)
    there = count > 0
    if kind in ("max", "min"):
        return np.where(there, high if kind == "max" else low, 0.0)
    if kind == "quantile":
        result = np.zeros(n)
        for i, mine in enumerate(np.split(x[np.argsort(ids, kind="stable")], np.cumsum(count)[:-1])):
            result[i] = np.quantile(mine, extra) if mine.size else 0.0
        return result
    flat = low == high  # equal values have exactly their value as mean, and no spread
    mean = np.where(flat, low, np.where(there, _by(ids, n, x) / np.maximum(count, 1), 0.0))
    if kind == "mean":
        return np.where(there, mean, 0.0)
    spread = _by(ids, n, np.where(flat[ids], 0.0, x - mean[ids]) ** 2)
    return np.where(count > extra, np.sqrt(spread / np.where(count > extra, count - extra, 1.0)), 0.0)
