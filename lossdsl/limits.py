"""What limits a weight: the masks, caps, floors and clips on the multiplicative way to it."""

from __future__ import annotations

from dataclasses import dataclass

from . import ir
from .axes import Axis
from .ir import Node
from .simplify import is_indicator


@dataclass(frozen=True)
class Limit:
    """kind: mask (the weight becomes 0), cap or floor (it stops at a bound); `binds` holds where it does."""

    kind: str
    binds: Node
    subject: Node  # what is compared: the mask's condition, or the value that is bounded
    when: Node  # the branch of a conditional that it stands in


def limiters(node: Node, when: Node = ir.TRUE) -> list[Limit]:
    """All limits on the way to a weight, outermost first. Conditions inside a mask are not entered."""
    match node.op:
        case "mul":
            return [limit for a in node.args for limit in limiters(a, when)]
        case "sg":
            return limiters(node.args[0], when)
        case "where":
            cond, then, other = node.args
            inside, outside = ir.logical_and(when, cond), ir.logical_and(when, ir.logical_not(cond))
            if other is ir.ZERO:
                rest = [] if is_indicator(node) else limiters(then, inside)
                return [Limit("mask", outside, cond, when), *rest]
            if then is ir.ZERO:
                return [Limit("mask", inside, cond, when), *limiters(other, outside)]
            return [*limiters(then, inside), *limiters(other, outside)]
        case "min" | "max":
            for x, bound in (node.args, node.args[::-1]):
                if bound.axis is Axis.CONSTANT and x.axis is not Axis.CONSTANT:
                    binds = ir.compare(">" if node.op == "min" else "<", x, bound)
                    return [
                        Limit("cap" if node.op == "min" else "floor", ir.logical_and(when, binds), x, when),
                        *limiters(x, when),
                    ]
        case "clip":
            x, low, high = node.args
            return [
                Limit("floor", ir.logical_and(when, ir.compare("<", x, low)), x, when),
                Limit("cap", ir.logical_and(when, ir.compare(">", x, high)), x, when),
                *limiters(x, when),
            ]
    return []
