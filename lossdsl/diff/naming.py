"""Short names for the distances between policies, so that a table says kl(mu, pi) and not its sum."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import permutations

from .. import ir, scope
from ..errors import Source
from ..ir import Node
from ..lower import Lowering
from ..simplify import erase
from ..specdoc import SpecDoc, plain_text, read_spec
from ..text import infix

LIMIT = 80
SHORT = 3  # levels of an expression that is shorter written out than named


@cache
def blank() -> SpecDoc:
    """A spec that declares nothing: every name means what the language says."""
    return read_spec(Source("names", "lossdsl: 1\nname: names\nT: 1\nnormaliser: sum\n"))


@cache
def names() -> Mapping[int, str]:
    """Node -> the call of the prelude that writes it, for every pair of policies."""
    lowering = Lowering(blank())
    calls = []
    for name, function in scope.prelude().items():
        if function.parameters == ("p", "q"):
            calls += [f"{name}({p}, {q})" for p, q in permutations(ir.POLICIES, 2)]
    found = {}
    for call in (*calls, "entropy"):
        node = ir.rewrite(lowering.key("name", plain_text("name", call)), erase)
        if node.depth > SHORT:
            found[id(node)] = call
    return found


def spell(node: Node, limit: int = LIMIT) -> str:
    """The expression as people write it."""
    return infix(node, names() if node.depth > SHORT else {}, limit)
