"""The points at which two methods are looked at: small answers built around every bound that either tests.

A probe is one token with exact ratios, alone in its answer or with a neighbour that moves the answer's statistics.
Values are chosen between neighbouring bounds and beyond the last, round ones first, so every region that the two
methods tell apart along their ratios has a probe, and what a probe shows can be repeated by hand. None lies on a bound:
there the last bit of an exponential would decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from .. import ir
from ..axes import Axis
from ..ir import Node
from ..reference import Array, Batch, evaluate
from .side import Side

# The first of these that lies between two bounds stands for the whole interval.
ROUND = (1.1, 1.5, 0.6, 3.0, 0.9, 2.0, 0.5, 5.0, 0.3, 0.1, 10.0, 1.0, 0.05, 30.0, 0.01, 100.0)
FREE = (1.1, 0.6, 1.5, 3.0)  # for a ratio that nothing is tested against
CHANCES = ((0.001, 0.003), (0.99, 0.8), (0.3, 0.33), (0.3, 0.27), (0.3, 0.6), (0.6, 0.3), (0.9, 0.99),
           (0.02, 0.001), (0.01, 0.012), (0.5, 0.999))  # fmt: skip  # (before, after), for tests on probabilities
VOCAB = 4

Point = tuple[float, float, float, float]  # log-probs under pi, prox, mu, ref


@dataclass(frozen=True)
class Bound:
    """A number that a statistic of policies `above` / `below` is compared with."""

    above: str
    below: str
    pooled: str  # "" for a token's ratio, else "sum" or "mean": the answer's product or geometric mean
    log_value: float


def bounds(sides: Sequence[Side]) -> tuple[Bound, ...]:
    """Every bound on a ratio that can be read off the weights."""
    found: dict[Bound, None] = {}
    for side in sides:
        roots = [*side.weights, *side.conditions]
        for node in ir.topological(*roots):
            pairs: list[tuple[Node, Node]] = []
            if node.op in ("lt", "le", "eq", "min", "max"):
                pairs = [(node.args[0], node.args[1]), (node.args[1], node.args[0])]
            elif node.op == "clip":
                pairs = [(node.args[0], node.args[1]), (node.args[0], node.args[2])]
            for tested, limit in pairs:
                bound = bound_on(tested, limit, side)
                if bound is not None:
                    found[bound] = None
    return tuple(sorted(found, key=lambda b: (b.above, b.below, b.pooled, b.log_value)))


def bound_on(tested: Node, limit: Node, side: Side) -> Bound | None:
    """The bound on a ratio that a comparison is, if it is one."""
    if not constant(limit):
        return None
    value = number(limit, side.values)
    while tested.op == "neg" or (tested.op == "mul" and tested.args[0].op == "const"):
        scale = -1.0 if tested.op == "neg" else number(tested.args[0], {})
        if scale == 0:
            return None
        value, tested = value / scale, tested.args[-1]
    if tested.op == "exp":
        if value <= 0:
            return None
        value, tested = math.log(value), tested.args[0]
    pooled = ""
    if tested.op == "reduce" and tested.attr in (("sum", "t"), ("mean", "t")):
        assert isinstance(tested.attr, tuple)
        pooled, tested = tested.attr[0], tested.args[0]
    scale, tested = (-1.0, tested.args[0]) if tested.op == "neg" else (1.0, tested)
    if tested.op == "logratio":
        above, below = ir.RATIOS[str(tested.attr)]
    elif tested.op == "sub" and all(a.op == "logp" for a in tested.args):
        above, below = str(tested.args[0].attr), str(tested.args[1].attr)
    else:
        return None
    value *= scale
    if (above, below) not in ir.RATIOS.values() and (below, above) in ir.RATIOS.values():
        above, below, value = below, above, -value
    return Bound(above, below, pooled, value) if abs(value) < 15 else None


def constant(node: Node) -> bool:
    """A number or an expression of parameters."""
    return node.axis is Axis.CONSTANT and not ir.contains(node, lambda n: n.op in ("reduce", "input"))


_EMPTY = Batch(np.zeros(0, np.int64), 0)


def number(node: Node, values: Mapping[str, float]) -> float:
    """The value of a constant."""
    return float(evaluate(node, _EMPTY, values))


# --- values -----------------------------------------------------------------------------------------------------------


def values(edges: Iterable[float], free: Sequence[float] = FREE) -> list[float]:
    """Logs of a ratio's probe values: one inside each interval between the edges, round where it can be; two beyond them."""
    logs: list[float] = []
    for edge in sorted(edges):
        if not logs or edge - logs[-1] > 1e-9:
            logs.append(edge)
    if not logs:
        return [math.log(x) for x in free]
    chosen: list[float] = []
    ends = [-math.inf, *logs, math.inf]
    for low, high in pairwise(ends):
        inside = [math.log(x) for x in ROUND if low + 1e-9 < math.log(x) < high - 1e-9]
        if math.isinf(low) or math.isinf(high):  # the end of the line: two values, one farther out
            nearest = inside[:1] or [low + 0.7 if math.isinf(high) else high - 0.7]
            out = [x for x in inside if (x > nearest[0]) == math.isinf(high)]
            chosen += nearest + out[:1]
        else:
            chosen += inside[:1] or [(low + high) / 2]
    return chosen


def probes(sides: Sequence[Side]) -> tuple[Batch, Array]:
    """A batch of probe answers, and which of its tokens are probes (the others are their neighbours)."""
    found = bounds(sides)
    merged = sides[0].assumption.merged
    ratio: dict[str, list[float]] = {name: [] for name in ("r", "c", "rho")}
    pooled: dict[str, list[float]] = {name: [] for name in ratio}
    for bound in found:
        for name, pair in ir.RATIOS.items():
            if tuple(merged[p] for p in pair) == (bound.above, bound.below):
                (pooled if bound.pooled else ratio)[name].append(bound.log_value)
                break
    points = _points(sides, ratio, merged)
    answers = [[p] for p in points]
    for name, edges in pooled.items():
        if edges:
            answers += _pooled_answers(points, ir.RATIOS[name], values(edges), found)
    rng = np.random.default_rng(0)
    answers += [[points[int(i)] for i in rng.integers(0, len(points), 3)] for _ in range(min(24, len(points)))]
    return batch_of(answers, sides, rng)


def edges(sides: Sequence[Side]) -> tuple[Batch, Array] | None:
    """Probes on the bounds themselves, where a number is found whose exponential is the bound to the last bit.

    One of the two policies is certain of the token, so that the log-ratio is one stored number.
    """
    points: list[list[Point]] = []
    for bound in bounds(sides):
        exact = _exact(bound.log_value)
        if exact is None:
            continue
        upper, lower = (exact, 0.0) if exact <= 0 else (0.0, -exact)
        order = ("pi", "prox", "mu")
        if bound.above in order and bound.below in order:
            split = order.index(bound.above)  # all policies up to this one are above, the others below
            logs = [upper if i <= split else lower for i in range(3)]
            points.append([(logs[0], logs[1], logs[2], lower)])
    return batch_of(points, sides, np.random.default_rng(0)) if points else None


def _exact(log_value: float) -> float | None:
    """A float near `log_value` whose exponential is the number that `log_value` is the log of, as it was written."""
    target = float(f"{math.exp(log_value):.12g}")
    near = [log_value]
    for direction in (-math.inf, math.inf):
        x = log_value
        for _ in range(4):
            x = math.nextafter(x, direction)
            near.append(x)
    return next((x for x in near if float(np.exp(x)) == target), None)


def _points(sides: Sequence[Side], ratio: dict[str, list[float]], merged: dict[str, str]) -> list[Point]:
    """Tokens between and beyond the bounds of r, c and rho."""
    needs = {str(p) for s in sides for n in ir.leaves(*s.weights) for p in _policies(n)}
    one = merged["prox"] == merged["mu"], merged["pi"] == merged["prox"]
    R = values(ratio["r"]) if not one[1] else [0.0]
    C = values(ratio["c"], (1.0, 1.5, 0.6)) if not one[0] and "mu" in needs and "prox" in needs else [0.0]
    P = values(ratio["rho"]) if not (one[0] or one[1]) else []
    pairs = list(product(R, C))
    if ratio["rho"] and not any(one):
        pairs += [(p - c, c) for p in P for c in C] + [(r, p - r) for p in P for r in R]
    if not pairs:
        pairs = [(0.0, 0.0)]
    points: list[Point] = []
    if any(_reads_chance(w) for s in sides for w in s.weights):
        steps = sorted({v for s in sides for v in _steps(s)})
        moves = [(b, b + k * d) for b, d, k in product((0.3, 0.6), steps, (1.5, -1.5, 0.5, -0.5))]
        for before, after in (*CHANCES, *moves):
            if 0 < after < 1:
                start, end = math.log(before), math.log(after)
                points.append((end, start, start, start))
                if not any(one):
                    points += [(end, end - r, start, start) for r in R if end - r < 0]
    for r, c in dict.fromkeys(pairs):
        mu = math.log(0.2) - max(0.0, c, r + c)
        points.append((mu + c + r, mu + c, mu, mu + 0.5 * c))
    return points


def _policies(leaf: Node) -> tuple[str, ...]:
    if leaf.op == "logp":
        return (str(leaf.attr),)
    return ir.RATIOS[str(leaf.attr)] if leaf.op == "logratio" else ()


def _reads_chance(root: Node) -> bool:
    """Whether a probability itself matters, not only ratios."""
    return any(n.op == "exp" and n.args[0].op == "logp" for n in ir.topological(root)) or any(
        n.op == "logp" and n.axis is Axis.VOCAB for n in ir.leaves(root)
    )


def _steps(side: Side) -> list[float]:
    """Numbers below 1 that something other than a ratio is compared with: how far a probability may move."""
    found = []
    for node in ir.topological(*side.weights):
        if node.op in ("lt", "le"):
            for limit in node.args:
                if constant(limit):
                    value = number(limit, side.values)
                    if 0 < value < 0.5:
                        found.append(value)
    return found


def _pooled_answers(
    points: list[Point], pair: tuple[str, str], targets: list[float], found: Sequence[Bound]
) -> list[list[Point]]:
    """Each point with a neighbour that brings the answer's product, or its geometric mean, to each target."""
    index = {"pi": 0, "prox": 1, "mu": 2, "ref": 3}
    above, below = (index[p] for p in pair)
    kinds = sorted({b.pooled for b in found if b.pooled})
    answers = []
    few = points if len(points) <= 40 else points[:: len(points) // 40 + 1]
    for point, target, kind in product(few, targets, kinds):
        total = target if kind == "sum" else 2 * target
        missing = total - (point[above] - point[below])
        base = math.log(0.1) - abs(missing)
        neighbour = [base] * 4
        for position in range(4):  # policies are in the order pi, prox, mu: shift all above the ratio's lower one
            if position <= above and position < 3:
                neighbour[position] = base + missing
        answers.append([point, (neighbour[0], neighbour[1], neighbour[2], neighbour[3])])
    return answers


def batch_of(answers: list[list[Point]], sides: Sequence[Side], rng: np.random.Generator) -> tuple[Batch, Array]:
    lengths = np.array([len(a) for a in answers])
    seq = np.repeat(np.arange(len(answers)), lengths)
    logs = np.array([p for a in answers for p in a])
    first = np.zeros(len(seq), bool)
    first[np.concatenate([[0], np.cumsum(lengths)[:-1]])] = True
    logp = {policy: logs[:, i] for i, policy in enumerate(ir.POLICIES)}
    logp = {policy: logp[sides[0].assumption.merged[policy]] for policy in ir.POLICIES}
    logp_v = {}
    if any(n.axis is Axis.VOCAB for s in sides for n in ir.leaves(s.coef, s.whole_entry)):
        # The sampled token is entry 0; what is left of the mass is spread over the others, alike for all policies.
        share = rng.dirichlet(np.ones(VOCAB - 1), size=len(seq))
        for policy, chance in logp.items():
            with np.errstate(divide="ignore"):  # a token that is certain leaves nothing for the others
                rest = np.log(-np.expm1(chance))[:, None] + np.log(share)
            logp_v[policy] = np.concatenate([chance[:, None], rest], axis=1)
    A = rng.choice([1.0, -1.0, 0.5, -2.0], size=len(seq) if sides[0].token_A else len(answers))
    inputs: dict[str, Array | float] = {"A": A}
    shape = {"token": len(seq), "segment": len(answers), "sequence": len(answers), "group": 1, "batch": 1}
    for side in sides:
        for declared in side.method.doc.inputs:
            name = declared.name.value
            if name not in inputs:
                x = rng.uniform(0.1, 2.0, size=shape[declared.axis.value])
                inputs[name] = x if declared.axis.value != "batch" else float(x[0])
    batch = Batch(seq, len(answers), logp=logp, logp_v=logp_v, values=inputs)
    return batch, first
