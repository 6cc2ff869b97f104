"""What a method is, in the words of the review's table: every entry derived from the IR, none stated in a spec."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from . import ir
from .ir import Node
from .limits import Limit, limiters
from .method import Method, level_of
from .schedule import Schedule

_PAIRS = {frozenset(pair): name for name, pair in ir.RATIOS.items()}


@dataclass(frozen=True)
class Description:
    """One row of `lossdsl list`.

    Attributes:
        ratio: the ratio that the weight controls: none, r, r and c, rho.
        treatment: how each is bounded, e.g. "masked r, truncated c (sequence, product)".
        needs: log-probs and distributions the loss must be given, besides those of pi.
    """

    name: str
    title: str
    level: str
    ratio: str
    treatment: str
    needs: tuple[str, ...]

    def json(self) -> dict[str, object]:
        return asdict(self)


def describe(method: Method) -> Description:
    schedule = Schedule(method)
    needs = tuple(
        n
        for n in schedule.needs
        if n.endswith(("_logp", "_logprobs")) or n in {i.name.value for i in method.doc.inputs}
    )
    return Description(method.name, method.title, method.level, _ratio(method), _treatment(method), needs)


def _weight(method: Method) -> Node:
    return method.W if method.W is not None else method.gradient.coef


def _policies(root: Node) -> set[str]:
    found: set[str] = set()
    for leaf in ir.leaves(root):
        if leaf.op == "logp":
            found.add(str(leaf.attr))
        elif leaf.op == "logratio":
            found |= set(ir.RATIOS[str(leaf.attr)])
    return found


def _ratio(method: Method) -> str:
    policies = _policies(_weight(method)) & {"pi", "prox", "mu"}
    if {"pi", "prox", "mu"} <= policies:
        return "r and c"
    if "mu" in policies and "pi" in policies:
        return "rho"
    if "prox" in policies and "pi" in policies:
        return "r"
    return "c" if {"prox", "mu"} <= policies else "none"


def _treatment(method: Method) -> str:
    if method.W is None or method.T is None or method.f is None:
        return "by its objective"
    parts = []
    for name in ("r", "c", "rho"):
        leaf = ir.logratio(name)
        used = [k for k in (method.T, method.f) if _reads_ratio(k, name)]
        if used:
            limits = [limit for k in used for limit in limiters(k) if _reads_ratio(limit.subject, name)]
            parts.append(_words(name, leaf, used, limits))
    if method.kappa is not ir.ZERO:
        parts.append("score centred")
    return ", ".join(parts) or "no ratio"


def _reads_ratio(node: Node, name: str) -> bool:
    """Whether a ratio, or the two probabilities it is made of, are in an expression."""
    if ir.contains(node, lambda n: n.op == "logratio" and n.attr == name):
        return True
    plain = {str(n.attr) for n in ir.leaves(node) if n.op == "logp"}
    return set(ir.RATIOS[name]) <= plain


def _words(name: str, leaf: Node, used: list[Node], limits: list[Limit]) -> str:
    kinds = {limit.kind for limit in limits}
    verb = (
        " and ".join([*(["masked"] if "mask" in kinds else []), *(["truncated"] if kinds - {"mask"} else [])])
        or "unclipped"
    )
    notes: list[str] = []
    pooled = {
        n.attr[0]
        for k in used
        for n in ir.topological(k)
        if n.op == "reduce" and isinstance(n.attr, tuple) and n.attr[1] in "ts" and ir.contains(n, lambda x: x is leaf)
    }
    if pooled:
        notes.append("sequence")
        notes += [
            word
            for kind, word in (("sum", "product"), ("mean", "geometric mean"), ("max", "largest"), ("min", "smallest"))
            if kind in pooled
        ]
    elif any(str(level_of(limit.subject)) != "token" for limit in limits):
        notes.append("whole answer")
    if any(_probabilities(limit.subject) for limit in limits if limit.kind == "mask"):
        notes.append("divergence test")
    if limits and all(_one_sided(limit.when) for limit in limits):
        notes.append("one sign of A only")
    return f"{verb} {name}" + (f" ({', '.join(notes)})" if notes else "")


def _probabilities(cond: Node) -> bool:
    """Whether a condition tests probabilities or whole distributions rather than the ratio."""
    return any(n.op == "logp" for n in ir.leaves(cond))


def _one_sided(when: Node) -> bool:
    return ir.contains(when, lambda n: n.op == "input" and n.attr == "A")
