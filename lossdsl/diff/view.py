"""What the weights of a pair are drawn over: its coordinates, and the weights as functions of them and of the parameters.

A token's own ratios and probabilities are coordinates; so is each statistic of the whole answer, as one number.
Parameters stay symbols, `a.eps` on one side and `b.eps` on the other, so that a page can move them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .. import ir
from ..axes import Axis
from ..ir import Node
from ..reference import Array, Batch, per_token
from ..simplify import erase
from .branches import Branches, is_log
from .naming import spell
from .side import Side

SIDES = ("a", "b")


@dataclass(frozen=True)
class Coordinate:
    """One thing that can be moved.

    Attributes:
        key: its name in the functions; for r, c, rho and "chance" the log-probs follow from it.
        label: as people write it.
        kind: "ratio" (above 0, drawn on a log axis), "chance" (a probability), "number" or "flag" (0 or 1).
        logged: the functions take its log.
        start: where it rests.
    """

    key: str
    label: str
    kind: str
    logged: bool
    start: float


@dataclass(frozen=True)
class View:
    """Coordinates, (side, sign of A) -> weight over them, and -> the weight as it reads where nothing binds."""

    sides: tuple[Side, Side]
    coordinates: tuple[Coordinate, ...]
    weights: Mapping[tuple[str, int], Node]

    @cached_property
    def plain(self) -> Mapping[tuple[str, int], Node]:
        ratios = [c for c in self.coordinates if c.logged]
        steps = [x for t in (0.05, 0.2, 0.5) for x in (1 + t, 1 - t)]
        places = [dict.fromkeys((c.key for c in ratios), 1.0)]
        places += [{c.key: x if c is moved else 1.0 for c in ratios} for x in steps for moved in ratios]
        at = {c.key: np.array([p[c.key] for p in places]) for c in ratios}
        batch, distance = self._batch(at), np.arange(len(places), dtype=np.float64)
        return {key: Branches(node, batch, self.parameters).nominal(distance) for key, node in self.weights.items()}

    @cached_property
    def parameters(self) -> dict[str, float]:
        """`a.eps` -> value, for every parameter of both sides."""
        found = {}
        for name, side in zip(SIDES, self.sides, strict=True):
            for p, value in side.method.defaults.items():
                found[f"{name}.{p}"] = side.values[p] if value is None else value
        return found

    def values(self, side: str, sign: int, at: Mapping[str, Array | float], plain: bool = False) -> Array:
        """W, or the plain W, over arrays of coordinates; those that are not given rest."""
        nodes = self.plain if plain else self.weights
        return per_token(nodes[side, sign], self._batch(at), self.parameters)

    def _batch(self, at: Mapping[str, Array | float]) -> Batch:
        given = np.broadcast_arrays(*(np.asarray(at.get(c.key, c.start), dtype=np.float64) for c in self.coordinates))
        n = given[0].size if given else 1
        x = {c.key: g.ravel() for c, g in zip(self.coordinates, given, strict=True)}
        one = np.ones(n)
        logp = log_probs({k: np.log(np.maximum(x.get(k, one), 1e-300)) for k in ("r", "c", "rho")}, x.get("chance"))
        values: dict[str, Array | float] = {
            c.key: np.log(x[c.key]) if c.logged else x[c.key] for c in self.coordinates if c.key.startswith("q")
        }
        return Batch(np.arange(n), n, logp=logp, values=values)


def log_probs(ratios: Mapping[str, Array], chance: Array | None) -> dict[str, Array]:
    """Log-probs with these ratios: mu is the sampler's chance of the token, where it matters, else small enough."""
    up = ratios["r"] + ratios["rho"]
    mu = -np.maximum(np.maximum(ratios["c"], ratios["c"] + up), 0.0) - 2.0 if chance is None else np.log(chance)
    prox = mu + ratios["c"]
    return {"mu": mu, "prox": prox, "pi": prox + up, "ref": prox}


def view(sides: tuple[Side, Side]) -> View:
    """The view of a pair."""
    found: dict[int, Coordinate] = {}
    weights = {}
    for name, side in zip(SIDES, sides, strict=True):
        for sign in (1, -1):
            weights[name, sign] = _free(_symbolic(side, name, sign), found)
    return View(sides, (*_own(weights), *found.values()), weights)


def _symbolic(side: Side, name: str, sign: int) -> Node:
    """W at A = +1 or -1 with its parameters as symbols of this side."""
    method = side.method
    node = method.W if method.W is not None else ir.mul(ir.const(sign), side.main)

    def leaf(n: Node) -> Node | None:
        if n.op == "param" and "." not in str(n.attr):
            return ir.param(f"{name}.{n.attr}")
        if n.op == "input" and n.attr == "A":
            return ir.const(sign)
        return side.assumption.leaf(n)

    return ir.rewrite(ir.rewrite(node, erase), leaf)


def _free(node: Node, found: dict[int, Coordinate]) -> Node:
    """The expression with every statistic, count and declared input, the outermost of them, as a coordinate."""
    if node.op != "reduce" and node.op != "input":
        return ir.rebuild(node, tuple(_free(a, found) for a in node.args)) if node.args else node
    if id(node) not in found:
        logged = is_log(node)
        label = spell(ir.exp(node) if logged else node, 60)
        kind = "ratio" if logged else "flag" if node.is_bool else "number"
        start = 1.0 if logged or node.op == "input" else 0.0
        found[id(node)] = Coordinate(f"q{len(found)}", label, kind, logged, start)
    value = ir.value(found[id(node)].key, Axis.TOKEN)
    return ir.compare("<", ir.ZERO, value) if node.is_bool else value


def _own(weights: Mapping[tuple[str, int], Node]) -> list[Coordinate]:
    """The token's own coordinates: r and c where prox is read, else rho; a probability where one is read by itself."""
    leaves = list(ir.leaves(*weights.values()))
    policies = {str(n.attr) for n in leaves if n.op == "logp"}
    policies |= {p for n in leaves if n.op == "logratio" for p in ir.RATIOS[str(n.attr)]}
    alone = any(n.op == "exp" and n.args[0].op == "logp" for n in ir.topological(*weights.values()))
    found = []
    if "prox" in policies:
        found += [Coordinate("r", "r", "ratio", True, 1.0)] if "pi" in policies else []
        found += [Coordinate("c", "c", "ratio", True, 1.0)] if "mu" in policies else []
    elif {"pi", "mu"} <= policies:
        found.append(Coordinate("rho", "rho", "ratio", True, 1.0))
    if alone:
        found.append(Coordinate("chance", "mu" if "mu" in policies else "prox", "chance", False, 0.3))
    return found
