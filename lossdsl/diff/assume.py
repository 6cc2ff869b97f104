"""What a question may take for granted: `c = 1`, `on_policy`, `A > 0`, `r < 2`.

An equality of a ratio with 1 makes two policies one, everywhere; any other condition only cuts the space down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .. import ir
from ..errors import Diagnostic, SpecError
from ..ir import Node
from ..lower import Lowering
from ..specdoc import SpecDoc, plain_text

ORDER = ("ref", "mu", "prox", "pi")  # of two policies that are one, the later stands for both


@dataclass(frozen=True)
class Assumption:
    """Texts as given; `same` maps a policy to the one it equals; `conditions` must hold."""

    texts: tuple[str, ...] = ()
    same: tuple[tuple[str, str], ...] = ()
    conditions: tuple[Node, ...] = ()

    def __str__(self) -> str:
        return " and ".join(self.texts)

    @cached_property
    def merged(self) -> dict[str, str]:
        """Each policy's representative."""
        found = {p: p for p in ORDER}
        for one, other in self.same:
            x, y = sorted((found[one], found[other]), key=ORDER.index)
            found = {p: y if q == x else q for p, q in found.items()}
        return found

    def leaf(self, node: Node) -> Node | None:
        """The leaf after the merging of policies."""
        if node.op == "logp":
            return ir.logp(self.merged[str(node.attr)], node.axis)
        if node.op != "logratio":
            return None
        above, below = (self.merged[p] for p in ir.RATIOS[str(node.attr)])
        if above == below:
            return ir.ZERO
        name = next((n for n, pair in ir.RATIOS.items() if pair == (above, below)), None)
        return ir.logratio(name, node.axis) if name else ir.sub(ir.logp(above, node.axis), ir.logp(below, node.axis))


NOTHING = Assumption()
KNOWN = {"c=1": (("prox", "mu"),), "on_policy": (("prox", "pi"), ("mu", "pi"))}


def assume(texts: Iterable[str], doc: SpecDoc) -> Assumption:
    """Read assumptions; names mean what they mean in `doc`'s loss.

    Raises:
        SpecError: E0605 for what is not an assumption, and the language's own errors.
    """
    same: list[tuple[str, str]] = []
    conditions: list[Node] = []
    kept = tuple(" ".join(t.split()) for t in texts)
    for text in kept:
        if text == "on_policy":
            same += KNOWN["on_policy"]
            continue
        written = re.sub(r"(?<![<>=!])=(?!=)", "==", text)
        place = plain_text("--assume", written)
        lowering = Lowering(doc)
        node = lowering.key("assumption", place, want="condition")
        if lowering.diagnostics:
            raise SpecError(lowering.diagnostics)
        for part in _parts(node):
            pair = _one(part)
            if pair:
                same.append(pair)
            elif part.op in ("lt", "le", "eq"):
                conditions.append(part)
            elif part is not ir.TRUE:
                raise SpecError(
                    (
                        Diagnostic(
                            "E0605",
                            f"`{text}` cannot be assumed",
                            place.span,
                            "assume comparisons joined by `and`, such as `c = 1`, `A > 0`, `r < 2`, or `on_policy`",
                        ),
                    )
                )
    return Assumption(kept, tuple(same), tuple(conditions))


def _parts(node: Node) -> list[Node]:
    return [p for a in node.args for p in _parts(a)] if node.op == "and" else [node]


def _one(node: Node) -> tuple[str, str] | None:
    """The two policies of `ratio == 1`."""
    if node.op != "eq" or ir.ONE not in node.args:
        return None
    ratio = node.args[0] if node.args[1] is ir.ONE else node.args[1]
    if ratio.op == "exp":
        inner = ratio.args[0]
        if inner.op == "logratio":
            return ir.RATIOS[str(inner.attr)]
        if inner.op == "sub" and all(a.op == "logp" for a in inner.args):
            return str(inner.args[0].attr), str(inner.args[1].attr)
    return None
