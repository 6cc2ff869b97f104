"""The knobs of the master equation, as resolved numbers, side by side where they differ.

Two knobs are the same when they mean the same, however they are spelled: bounds are read off the regions of a weight,
expressions are compared by algebra.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from .. import ir
from ..axes import Axis
from ..ir import Node
from ..lower import Lowering
from ..primitives import depends_on_pi
from ..scope import prelude
from ..simplify import erase
from ..specdoc import plain_text
from .cases import Case
from .equality import Equality
from .naming import blank, spell
from .properties import own_cases
from .regions import widest
from .side import Side
from .verdict import same_data
from .words import region_text, sign_text

MANY = 6  # regions of one sign that are still worth listing


@dataclass(frozen=True)
class Knob:
    """One knob on which the two sides differ."""

    name: str
    a: str
    b: str

    def json(self) -> dict[str, str]:
        return {"name": self.name, "a": self.a, "b": self.b}


def knobs(sides: tuple[Side, Side], equality: Equality) -> tuple[Knob, ...]:
    """All knobs that differ, in the order of the master equation."""
    a, b = sides
    found: list[Knob] = []

    def compare(name: str, left: str, right: str, same: bool | None = None) -> None:
        if left != right if same is None else not same:
            found.append(Knob(name, left, right))

    def both(name: str, say: Callable[[Side], str], same: bool | None = None) -> None:
        compare(name, say(a), say(b), same)

    own = [own_cases(s) for s in sides]
    both("level", lambda s: s.method.level)
    both("ratios", ratios)
    for sign in (1, -1):
        texts = [_bounds([row for row in rows if row.sign == sign]) for rows in own]
        compare(f"bounds, {sign_text(sign)}", texts[0], texts[1])
    signs = ["matters" if _asks_sign(rows) else "does not matter" for rows in own]
    compare("sign of A", signs[0], signs[1])
    both("kappa", lambda s: spell(s.kappa), equality.equal((a.kappa, b.kappa)))
    same = equality.equal((a.normaliser, b.normaliser))
    both("normaliser", lambda s: normaliser_text(s.normaliser), same)
    for name in {**a.terms, **b.terms}:
        compare(f"term {name}", _term(a, name), _term(b, name), _same_term(a, b, name, equality))
    for key in a.data:
        compare(key, _data(a, key), _data(b, key), same_data(a, b, key, equality))
    both("gradient flows", _flow)
    return tuple(found)


def ratios(side: Side) -> str:
    """Which policies each ratio of the weight divides by, and how answers are pooled."""
    found = []
    for name, pair in ir.RATIOS.items():
        pooled = {
            n.attr[0]
            for n in ir.topological(*side.weights)
            if n.op == "reduce" and isinstance(n.attr, tuple) and n.attr[1] in "ts" and _reads(n, name)
        }
        words = {"sum": "product", "mean": "geometric mean", "max": "largest", "min": "smallest", "any": "any token's"}
        outside = any(n.op == "logratio" and n.attr == name for n in _unpooled(side))
        text = f"{name} = {pair[0]}/{pair[1]}"
        if outside:
            found.append(text)
        found += [f"{words.get(kind, kind)} of {text} over the answer" for kind in sorted(pooled)]
    return ", ".join(found) or "none"


def _reads(node: Node, ratio: str) -> bool:
    return any(n.op == "logratio" and n.attr == ratio for n in ir.leaves(node))


def _unpooled(side: Side) -> list[Node]:
    """The leaves that are read outside reductions over an answer."""
    found: list[Node] = []
    stack, seen = list(side.weights), set()
    while stack:
        node = stack.pop()
        if id(node) in seen or (node.op == "reduce" and isinstance(node.attr, tuple) and node.attr[1] in "tsgb"):
            continue
        seen.add(id(node))
        found += [] if node.args else [node]
        stack += node.args
    return found


def _bounds(rows: list[Case]) -> str:
    """Where the weight does not simply count: `masked where r > 1.28; capped at 2 where c > 2`."""
    limits = list(dict.fromkeys(_limit(row, rows) for row in rows if row.actions[0] != "kept"))
    return f"{len(limits)} regions, see the cases" if len(limits) > MANY else "; ".join(limits) or "none"


def _limit(row: Case, rows: list[Case]) -> str:
    others = [other.where for other in rows if other.weights != row.weights]
    at = f" at {spell(row.weights[0], 40)}" if row.actions[0] in ("capped", "raised") else ""
    region = region_text(replace(row, where=widest(row.where, others)))
    return f"{row.actions[0]}{at} where {region or 'always'}"


def _asks_sign(rows: tuple[Case, ...]) -> bool:
    """Whether the regions for A > 0 and for A < 0 are not the same ones."""
    found = [{(frozenset(r.where.items()), r.also, r.weights) for r in rows if r.sign == sign} for sign in (1, -1)]
    return all(found) and found[0] != found[1]


def _term(side: Side, name: str) -> str:
    if name not in side.terms:
        return "-"
    normaliser, term = side.terms[name]
    return f"{spell(term)}, each token {normaliser_text(normaliser)}"


def _same_term(a: Side, b: Side, name: str, equality: Equality) -> bool:
    if name not in a.terms or name not in b.terms:
        return False
    return equality.equal(*zip(a.terms[name], b.terms[name], strict=True))


def _data(side: Side, key: str) -> str:
    node = side.data[key]
    return "-" if node is None else spell(node)


def _flow(side: Side) -> str:
    """What the objective is differentiated through: the ratio itself, or log pi under a fixed weight."""
    names = []
    stack, seen = [side.method.objective], set()
    while stack:
        node = stack.pop()
        if id(node) in seen or node.op == "sg" or node.is_bool:
            continue
        seen.add(id(node))
        if node.op == "exp" and depends_on_pi(node):
            names.append(spell(node, 40))
            continue
        stack += node.args
    return f"through {', '.join(sorted(set(names)))}" if names else "through log pi, weights fixed"


@cache
def _normalisers() -> dict[int, str]:
    lowering = Lowering(blank())
    found: dict[int, str] = {}
    for name, function in prelude().items():
        if function.parameters is None and name != "entropy":
            found.setdefault(id(ir.rewrite(lowering.key(name, plain_text("name", name)), erase)), name)
    return found


def normaliser_text(node: Node) -> str:
    """lambda with its name where it has one, and what its denominator counts."""
    name = _normalisers().get(id(node))
    counted = "kept tokens only" if ir.contains(node, lambda n: n.op == "reduce") else "rejected tokens stay counted"
    if not any(n.op == "input" for n in ir.leaves(node)):
        counted = "no count"
    scope = {Axis.CONSTANT: "", Axis.BATCH: "one number for the whole batch, ", Axis.GROUP: "one per prompt, ",
             Axis.SEQUENCE: "one per answer, "}.get(node.axis, "")  # fmt: skip
    return f"{spell(node)} ({name + ': ' if name else ''}{scope}{counted})"
