"""IR -> straight-line PyTorch: one readable assignment for each value that a reader would name."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from .. import ir
from ..axes import Axis
from ..ir import Node
from ..primitives import ATOM, COMPARE, OR, PRIMITIVES, PRODUCT, SUM, UNARY, interval

WIDTH = 96  # an inline expression longer than this gets a line of its own

# Names that the emitted text itself uses.
TAKEN = frozenset(
    {
        "torch",
        "Tensor",
        "ax",
        "exp",
        "log",
        "div",
        "log_bound",
        "Weights",
        "PolicyLoss",
        "self",
        "grads",
        "True",
        "False",
        "None",
        "dict",
        "tuple",
        "float",
        "int",
        "str",
        "bool",
        "super",
        "property",
        "staticmethod",
        "object",
        "type",
        "len",
        "sum",
        "min",
        "max",
    }
)


def safe_name(name: str, taken: frozenset[str] | set[str] = frozenset()) -> str:
    """The name, or with underscores behind it where Python or the emitted text already uses it."""
    while keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in TAKEN or name in taken:
        name += "_"
    return name


class Code:
    """Assigns names to values and writes their lines.

    `arguments` maps leaves (and sums over the vocabulary) to the names of the function's arguments; what it does not
    hold is computed. `line_of` gives a trailing comment for a value.
    """

    def __init__(
        self,
        arguments: Mapping[int, str],
        hints: Mapping[int, str],
        like: str,
        line_of: Callable[[Node], str] = lambda node: "",
    ) -> None:
        self.arguments = dict(arguments)
        self.hints = hints
        self.like = like  # an argument with the full shape, for constants that need one
        self.line_of = line_of
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        self.taken = set(self.arguments.values())
        self._uses: dict[int, int] = {}

    def count(self, *roots: Node) -> None:
        """Announce everything that will be written, so that shared values get names."""
        for node in ir.topological(*roots):
            for arg in node.args:
                self._uses[id(arg)] = self._uses.get(id(arg), 0) + 1
        for root in roots:
            self._uses[id(root)] = self._uses.get(id(root), 0) + 1

    def ref(self, node: Node, outer: int = OR) -> str:
        """The text of a value, its lines written before it is used."""
        text, level = self._text(node)
        return f"({text})" if level < outer else text

    def assign(self, node: Node, name: str) -> str:
        """Write `name = value` (unless the value already has a name) and return the name to use."""
        known = self.names.get(id(node)) or self.arguments.get(id(node))
        if known is not None:
            return known
        if _number(node) is not None or (not node.args and node.op != "logratio"):
            return self.ref(node)
        return self._name(node, name)

    def tensor(self, node: Node) -> str:
        """The value as a tensor of the full shape, also where it is a plain number."""
        if node.is_bool and node.axis is Axis.CONSTANT:
            return f"{self.ref(node, UNARY)} & torch.ones_like({self.like}, dtype=torch.bool)"
        if _number(node) is not None or node.axis is Axis.CONSTANT:
            text = self.ref(node, PRODUCT)
            return f"torch.ones_like({self.like})" if node is ir.ONE else f"{text} * torch.ones_like({self.like})"
        return self.ref(node)

    def _text(self, node: Node) -> tuple[str, int]:
        known = self.names.get(id(node)) or self.arguments.get(id(node))
        if known is not None:
            return known, ATOM
        number = _number(node)
        if number is not None:
            return (number, ATOM) if not number.startswith("-") else (number, UNARY)
        if node.op == "sg":
            return self._text(node.args[0])
        if node.op in ("true", "false"):
            return node.op.capitalize(), ATOM
        name = self._wanted_name(node)
        if name is not None:
            return self._name(node, name), ATOM
        text, level = self._compute(node)
        if (self._uses.get(id(node), 0) > 1 and len(text) > 24) or len(text) > WIDTH:
            return self._write(node, self._unique(f"x{len(self.names)}"), text), ATOM
        return text, level

    def _wanted_name(self, node: Node) -> str | None:
        hint = self.hints.get(id(node))
        if hint is not None:
            return hint
        if node.op == "logratio":
            return f"log_{node.attr}"
        if node.op == "reduce" and isinstance(node.attr, tuple) and self._uses.get(id(node), 0) > 1:
            of = node.args[0]
            return f"{node.attr[0]}_log_{of.attr}" if of.op == "logratio" else "_".join(node.attr)
        if node.op == "exp" and node.args[0].op == "logratio" and self._uses.get(id(node), 0) > 1:
            return str(node.args[0].attr)
        if node.op == "exp" and node.args[0].op == "logp" and self._uses.get(id(node), 0) > 1:
            return f"p_{node.args[0].attr}"
        return None

    def _name(self, node: Node, name: str) -> str:
        text, _ = self._compute(node)
        return self._write(node, self._unique(name), text)

    def _write(self, node: Node, name: str, text: str) -> str:
        if self.names.get(id(node)) is not None:
            return self.names[id(node)]
        comment = self.line_of(node)
        line = f"{name} = {text}"
        self.lines.append(f"{line}  # {comment}" if comment and len(line) + len(comment) < 112 else line)
        self.names[id(node)] = name
        return name

    def _unique(self, name: str) -> str:
        base = name = safe_name(re.sub(r"\W+", "_", name).strip("_"))
        number = 1
        while name in self.taken:
            number += 1
            name = f"{base}_{number}"
        self.taken.add(name)
        return name

    # --- one operation ------------------------------------------------------------------------------------------------

    def _compute(self, node: Node) -> tuple[str, int]:
        match node.op:
            case "logratio":
                above, below = ir.RATIOS[str(node.attr)]
                return f"{self.ref(ir.logp(above, node.axis))} - {self.ref(ir.logp(below, node.axis))}", PRIMITIVES[
                    "sub"
                ].level
            case "reduce":
                return self._reduce(node), ATOM
            case "min" | "max":
                return self._bound(node), ATOM
            case "clip":
                return self._clip(node), ATOM
            case "lt" | "le" if node.args[0].axis < node.args[1].axis:  # the bound on the right, as people write it
                sign = ">" if node.op == "lt" else ">="
                return f"{self.ref(node.args[1], SUM)} {sign} {self.ref(node.args[0], SUM)}", COMPARE
            case "sub" if node.args[0] is ir.ONE and node.args[1].op == "exp":
                return f"-torch.expm1({self.ref(node.args[1].args[0])})", UNARY  # 1 - e**x, exact for x near 0
            case "where":
                return self._where(node), ATOM
            case "not" if node.args[0].op == "eq":
                a, b = node.args[0].args
                return f"{self.ref(a, SUM)} != {self.ref(b, SUM)}", COMPARE
            case "div" if _number(node.args[1]) is not None:
                return f"{self.ref(node.args[0], PRODUCT)} / {self.ref(node.args[1], UNARY)}", PRODUCT
        primitive = PRIMITIVES[node.op]
        inner = [self.ref(a, level) for a, level in zip(node.args, primitive.inner, strict=False)]
        return primitive.emit.format(*inner), primitive.level

    def _where(self, node: Node) -> str:
        cond, then, other = node.args
        if (then, other) == (ir.ONE, ir.ZERO):
            return f"{self.ref(cond, ATOM)}.to({self.like}.dtype)"
        if (then, other) == (ir.ZERO, ir.ONE):
            return f"{self.ref(ir.logical_not(cond), ATOM)}.to({self.like}.dtype)"
        parts = [self.ref(then), "0.0" if other is ir.ZERO else self.ref(other)]
        if all(_number(x) is not None for x in (then, other)):
            parts[0] = f"{parts[0]} * torch.ones_like({self.like})"
        return f"torch.where({self.ref(cond)}, {', '.join(parts)})"

    def _bound(self, node: Node) -> str:
        side = "max" if node.op == "min" else "min"
        for x, bound in (node.args, node.args[::-1]):
            if bound.axis is Axis.CONSTANT and _number(x) is None:
                return f"torch.clamp({self.ref(x)}, {side}={self.ref(bound)})"
        return f"torch.{node.op}imum({', '.join(self.ref(a) for a in node.args)})"

    def _clip(self, node: Node) -> str:
        x, low, high = node.args
        if (
            (_number(low) is None) == (_number(high) is None)
            and low.axis is Axis.CONSTANT
            and high.axis is Axis.CONSTANT
        ):
            return f"torch.clamp({self.ref(x)}, min={self.ref(low)}, max={self.ref(high)})"
        return self._bound(ir.minimum(ir.maximum(x, low), high))

    def _reduce(self, node: Node) -> str:
        assert isinstance(node.attr, tuple)
        kind, suffix = node.attr
        x = node.args[0]
        if suffix == "v":
            text = self.ref(x, ATOM)
            return {
                "sum": f"{text}.sum(-1)",
                "max": f"{text}.amax(-1)",
                "min": f"{text}.amin(-1)",
                "any": f"{text}.any(-1)",
            }[kind]
        args = [self.tensor(x), *(self.ref(a) for a in node.args[1:])]
        if suffix == "b":
            args.append(f'"{max(x.axis, Axis.GROUP)}"' if x.axis is not Axis.TOKEN else '"token"')
        return f"ax.{kind}_{suffix}({', '.join(args)})"


def _number(node: Node) -> str | None:
    """The literal of a value that is a number whatever the inputs and parameters."""
    if node.op == "const":
        assert isinstance(node.attr, Fraction)
        return (
            str(node.attr.numerator)
            if node.attr.denominator == 1 and abs(node.attr) < 10**15
            else repr(float(node.attr))
        )
    if node.args and not node.is_bool and all(leaf.op == "const" for leaf in ir.leaves(node)):
        low, high = interval(node)
        if low == high:
            return repr(low) if math.isfinite(low) else f'float("{low}")'
    return None
