"""IR as one-line infix text, with the names that people use: for messages, listings and comments."""

from __future__ import annotations

from collections.abc import Mapping

from . import ir
from .axes import Axis
from .ir import Node

_INFIX = {
    "add": ("+", 4),
    "sub": ("-", 4),
    "mul": ("*", 5),
    "div": ("/", 5),
    "pow": ("**", 7),
    "lt": ("<", 3),
    "le": ("<=", 3),
    "eq": ("==", 3),
    "and": ("and", 1),
    "or": ("or", 0),
}
_LOOSEST = -1


def infix(node: Node, hints: Mapping[int, str] | None = None, limit: int = 160) -> str:
    """The expression as the language would write it; `hints` name shared values; cut with ... beyond `limit`."""
    text = _Infix(hints or {}, limit).text(node, _LOOSEST)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class _Infix:
    def __init__(self, hints: Mapping[int, str], limit: int) -> None:
        self.hints, self.left = hints, 4 * limit

    def text(self, node: Node, outer: int) -> str:
        name = self.hints.get(id(node))
        if name is not None:
            return name
        self.left -= 4
        if self.left < 0:
            return "..."
        if node.op == "exp" and node.args[0].op in ("logp", "logratio"):
            leaf = node.args[0]
            return f"{leaf.attr}[v]" if leaf.axis is Axis.VOCAB else str(leaf.attr)
        if not node.args:
            return ir.leaf_text(node)
        if node.op == "exp" and node.args[0].op == "sub" and all(a.op == "logp" for a in node.args[0].args):
            above, below = (self.text(ir.exp(a), 4) for a in node.args[0].args)
            return self._bracket(f"{above} / {below}", 5, outer)
        if node.op in ("lt", "le") and node.args[0].axis < node.args[1].axis:
            sign = ">" if node.op == "lt" else ">="
            return self._bracket(f"{self.text(node.args[1], 3)} {sign} {self.text(node.args[0], 3)}", 3, outer)
        if node.op in _INFIX:
            sign, level = _INFIX[node.op]
            left, right = self.text(node.args[0], level - 1), self.text(node.args[1], level)
            return self._bracket(f"{left} {sign} {right}", level, outer)
        match node.op:
            case "neg":
                return self._bracket(f"-{self.text(node.args[0], 5)}", 4, outer)
            case "not":
                return self._bracket(f"not {self.text(node.args[0], 2)}", 2, outer)
            case "where":
                cond, then, other = node.args
                if then is ir.ONE and other is ir.ZERO:
                    return f"1[{self.text(cond, _LOOSEST)}]"
                text = f"{self.text(then, 0)} if {self.text(cond, 0)} else {self.text(other, _LOOSEST)}"
                return self._bracket(text, _LOOSEST, outer)
            case "exp" if (
                node.args[0].op == "reduce" and isinstance(node.args[0].attr, tuple) and node.args[0].attr[1] in "ts"
            ):
                kind, suffix = node.args[0].attr
                written = {"sum": "prod", "mean": "geomean"}.get(kind)
                if written:
                    return f"{written}_{suffix}({self.text(ir.exp(node.args[0].args[0]), _LOOSEST)})"
        name = "_".join(node.attr) if isinstance(node.attr, tuple) else node.op
        return f"{name}({', '.join(self.text(a, _LOOSEST) for a in node.args)})"

    @staticmethod
    def _bracket(text: str, level: int, outer: int) -> str:
        return f"({text})" if level <= outer else text
