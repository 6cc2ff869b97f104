"""IR -> JavaScript: the same functions in a page, one line a node, with the meaning that `primitives` gives each operation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction

from .. import ir
from ..ir import Node
from ..primitives import EXP_CEILING, LOG_FLOOR, PRIMITIVES

PRELUDE = f"""\
// x / 0 is 0, exp saturates, log has a floor: what the loss computes.
const div = (a, b) => b === 0 ? 0 : a / b;
const exp = a => Math.exp(Math.min(a, {EXP_CEILING!r}));
const log = a => Math.log(Math.max(a, {LOG_FLOOR!r}));
const pow = (a, b) => a === 0 && b < 0 ? 0 : Math.pow(Number.isInteger(b) ? a : Math.max(a, 0), b);
"""


def functions(nodes: Mapping[str, Node]) -> str:
    """One function (x, p) per entry, after the prelude.

    `x` holds log-probs (x.pi, ...), log-ratios (x.r, ...) and inputs by name, `p` the parameters.
    """
    return PRELUDE + "".join(f"\n{function(name, node)}" for name, node in nodes.items())


def function(name: str, root: Node) -> str:
    """`function NAME(x, p) { ... }` for a token-level expression without reductions."""
    texts: dict[int, str] = {}
    lines = [f"function {name}(x, p) {{"]
    for node in ir.topological(root):
        if not node.args:
            texts[id(node)] = _leaf(node)
            continue
        args = [texts[id(a)] for a in node.args]
        texts[id(node)] = f"v{len(lines) - 1}"
        lines.append(f"  const {texts[id(node)]} = {PRIMITIVES[node.op].script.format(*args)};")
    return "\n".join([*lines, f"  return {texts[id(root)]};", "}", ""])


def _leaf(node: Node) -> str:
    match node.op:
        case "const":
            assert isinstance(node.attr, Fraction)
            return f"({float(node.attr)!r})" if node.attr < 0 else repr(float(node.attr))
        case "param":
            return f"p[{json.dumps(node.attr)}]"
        case "logp" | "logratio" | "input":
            return f"x[{json.dumps(node.attr)}]"
        case "true" | "false":
            return node.op
    raise TypeError(node.op)
