"""The derivative of an objective with respect to log pi, in closed form, through reductions and stop-gradients.

Reverse mode over the IR. For J = sum over live tokens of lambda * objective the result is

    coef     dJ / d log pi(y_t)   of the sampled token, one value per token
    sums     for each sum over the vocabulary that moves with pi: (the sum's node, dJ / d sum per token,
             d sum / d log pi(v) per vocabulary entry)

so that in logit space dJ/dz = D - pi * sum_v D(v), with D(v) = coef * 1[v = y] + sum_k (dJ/d sum_k) * (d sum_k / d log pi(v)).
"""

from __future__ import annotations

from dataclasses import dataclass

from . import ir
from .axes import Axis
from .ir import Node
from .primitives import PRIMITIVES, active_set, depends_on_pi


class NotDifferentiable(Exception):
    """An operation in the objective has no derivative that this language can write."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


@dataclass(frozen=True)
class VocabularySum:
    """A `sum_v` that gradients flow through."""

    node: Node  # the reduction
    cotangent: Node  # dJ / d node, per token
    slope: Node  # d node / d log pi(v), per vocabulary entry


@dataclass(frozen=True)
class Gradient:
    coef: Node
    sums: tuple[VocabularySum, ...]


def differentiate(parts: tuple[tuple[Node, Node], ...]) -> Gradient:
    """The gradient of J = sum over live tokens of sum_j weight_j * part_j, given as (weight, part) pairs.

    The weights (the normalisers) are held fixed. A part may live on any axis coarser than the token; it then
    spreads to its tokens.

    Raises:
        NotDifferentiable: the objective moves with pi through a quantile, a statistic of the batch or the like.
    """
    adjoint: dict[int, Node] = {}
    roots = tuple(part for _, part in parts)
    for weight, part in parts:
        if depends_on_pi(part):
            _add(adjoint, part, _to_axis(weight, Axis.TOKEN, part.axis))
    coef, sums = _pull_back(roots, adjoint, Axis.TOKEN)
    found = []
    for node, cotangent in sums:
        slope, inner = _pull_back((node.args[0],), {id(node.args[0]): ir.ONE}, Axis.VOCAB)
        if inner:
            raise NotDifferentiable("a sum over the vocabulary inside another one")
        found.append(VocabularySum(node, cotangent, slope))
    return Gradient(coef, tuple(found))


def _pull_back(
    roots: tuple[Node, ...], adjoint: dict[int, Node], leaf_axis: Axis
) -> tuple[Node, list[tuple[Node, Node]]]:
    """Carry adjoints from the roots to log pi; sums over the vocabulary are returned with theirs, not entered."""
    coef = ir.ZERO
    sums: list[tuple[Node, Node]] = []
    active = active_set(*roots)
    for node in reversed(ir.topological(*roots)):
        bar = adjoint.get(id(node))
        if bar is None or id(node) not in active:
            continue
        if node.op in ("logp", "logratio"):
            if node.axis is not leaf_axis:
                raise NotDifferentiable("the sampled token's probability inside a sum over the vocabulary")
            coef = ir.add(coef, bar)
        elif node.attr == ("sum", "v"):
            sums.append((node, bar))
        elif node.op == "reduce":
            _add(adjoint, node.args[0], ir.mul(bar, _reduction_partial(node)))
        else:
            for arg, partial in zip(node.args, PRIMITIVES[node.op].partials(node), strict=True):
                if partial is not None and id(arg) in active:
                    _add(adjoint, arg, _to_axis(ir.mul(bar, partial), node.axis, arg.axis))
    return coef, sums


def _add(adjoint: dict[int, Node], node: Node, value: Node) -> None:
    before = adjoint.get(id(node))
    adjoint[id(node)] = value if before is None else ir.add(before, value)


def _to_axis(value: Node, user: Axis, axis: Axis) -> Node:
    """What one coarse value receives from all the finer ones that use it: the sum of theirs.

    A contribution that is the same for every token still arrives once per token; `ir.reduce` then multiplies it
    by the length.
    """
    if axis == user or axis is Axis.CONSTANT:
        return value
    if user is Axis.TOKEN and axis in (Axis.SEQUENCE, Axis.SEGMENT):
        return ir.reduce("sum", "t" if axis is Axis.SEQUENCE else "s", value)
    if user is Axis.VOCAB and axis is Axis.TOKEN:
        raise NotDifferentiable("the sampled token's probability inside a sum over the vocabulary")
    raise NotDifferentiable(f"a statistic of the {axis}")


def _reduction_partial(node: Node) -> Node:
    """d (reduction of x) / d x, one value per element of x."""
    assert isinstance(node.attr, tuple)
    kind, suffix = node.attr
    x = node.args[0]
    match kind:
        case "sum":
            return ir.ONE
        case "mean":
            return ir.div(ir.ONE, ir.reduce("sum", suffix, ir.ONE))
        case "max" | "min":
            hit = ir.where(ir.compare("==", x, node), ir.ONE, ir.ZERO)
            return ir.div(hit, ir.reduce("sum", suffix, hit))  # ties share the gradient
    raise NotDifferentiable(f"`{kind}_{suffix}`")
