"""What `lossdsl check` warns of: properties of a sound spec that its author may not have meant.

A warning is given only for what is true of the weight at the spec's own parameters. `# lossdsl: allow CODE` on the
line, or on the one above, says that it is meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from . import ast, ir
from .diff.assume import NOTHING
from .diff.branches import outside_reductions
from .diff.equality import Equality
from .diff.probes import bound_on, constant, probes
from .diff.properties import drift_norm, unbounded, when_zero
from .diff.side import Side, sides
from .diff.verdict import find_witness, same_data
from .diff.words import sign_text
from .errors import Diagnostic, place
from .ir import Node
from .method import Method, with_params
from .parse import parse_expression
from .primitives import interval
from .reference import per_token
from .specdoc import Text, texts
from .text import infix


def lint(method: Method) -> tuple[Diagnostic, ...]:
    """All warnings about a sound method, W0702 to W0707."""
    side = sides(method, method, NOTHING)[0]
    rules = (_unbounded, _dead, _idle_bounds, _drift, _cancelled_policy, _self_ratios, _idle_parameters)
    return tuple(diagnostic for rule in rules for diagnostic in rule(side))


def _warn(code: str, message: str, text: Text | None, help: str) -> Diagnostic:
    return Diagnostic(code, message, None if text is None else text.span, help, severity="warning")


def _key_reading(side: Side, ratio: str) -> Text | None:
    """The key in which a ratio stands: T before f for r, f before T for the others, else the objective."""
    m, doc = side.method, side.method.doc
    knobs = [(m.T, doc.T), (m.f, doc.f)] if ratio == "r" else [(m.f, doc.f), (m.T, doc.T)]
    for node, text in knobs:
        if node is not None and text is not None:
            policies = {str(x.attr) for x in ir.leaves(node) if x.op == "logp"}
            if (
                any(x.op == "logratio" and x.attr == ratio for x in ir.leaves(node))
                or set(ir.RATIOS[ratio]) <= policies
            ):
                return text
    return doc.f or doc.T or doc.objective


def _unbounded(side: Side) -> Iterator[Diagnostic]:
    found: dict[int, tuple[Text | None, list[str]]] = {}
    for corner in unbounded(side):
        ratio = corner.split(", ")[-1].split(" ")[0]
        text = _key_reading(side, ratio)
        found.setdefault(id(text), (text, []))[1].append(corner)
    for text, corners in found.values():
        yield _warn(
            "W0702",
            f"the weight grows without end where {' and where '.join(corners)}",
            text,
            "cap it (`min(r, 3)`) or mask it; if it is meant: `# lossdsl: allow W0702` and why",
        )


def _dead(side: Side) -> Iterator[Diagnostic]:
    doc = side.method.doc
    batch, _ = probes((side,))
    for sign in (1, -1):
        if not per_token(side.weight(sign), batch, side.values).any():
            yield _warn(
                "W0703",
                f"no token with {sign_text(sign)} has a gradient",
                doc.f or doc.T or doc.objective,
                "half of the data is unused; if it is meant: `# lossdsl: allow W0703` and why",
            )


def _idle_bounds(side: Side) -> Iterator[Diagnostic]:
    """A side of a min, max or clip that no token with a gradient ever reaches."""
    method = side.method
    if method.W is None:
        return
    keys = dict(texts(method.doc))
    batch, _ = probes((side,))
    live = np.zeros(len(batch.seq), bool)
    for sign in (1, -1):
        live |= per_token(side.weight(sign), batch, side.values) != 0
    for node in outside_reductions(method.W):
        for tested, limit, above in _ends(node):
            x, bound = side.resolve(tested), side.resolve(limit)
            if not constant(bound) or ir.contains(x, lambda n: n is side.A):
                continue
            low, high = interval(ir.sub(x, bound))
            idle = high <= 0 if above else low >= 0
            if not idle and bound_on(x, bound, side) is not None and live.any():
                gap = (per_token(x, batch, side.values) - per_token(bound, batch, side.values))[live]
                idle = bool((gap <= 0).all() if above else (gap >= 0).all())
            if idle:
                key = method.origin.get(id(node), ("", 0))[0]
                yield _warn(
                    "W0704",
                    f"the {'upper' if above else 'lower'} bound {infix(limit)} on `{infix(tested, method.hints, 40)}` never binds",
                    keys.get(key) or method.doc.f or method.doc.T,
                    "drop it, or mend it; if it is meant: `# lossdsl: allow W0704` and why",
                )


def _ends(node: Node) -> list[tuple[Node, Node, bool]]:
    """(what is bounded, the bound, whether from above) of a min, max or clip."""
    if node.op in ("min", "max"):
        return [(x, limit, node.op == "min") for x, limit in (node.args, node.args[::-1]) if constant(limit)]
    return [(node.args[0], node.args[1], False), (node.args[0], node.args[2], True)] if node.op == "clip" else []


def _drift(side: Side) -> Iterator[Diagnostic]:
    if side.entry is ir.ZERO:
        return
    if when_zero(side, drift_norm, ("zero", "")) != "zero":
        doc = side.method.doc
        yield _warn(
            "W0705",
            "the centring does not cancel the drift: it does not average the weight that multiplies the score",
            doc.kappa or doc.objective,
            "subtract kappa = 1 times the same W under mu: `sum_v(sg(mu[v] * W[v]) * log(pi[v]))`",
        )


def _cancelled_policy(side: Side) -> Iterator[Diagnostic]:
    """r * c where prox cancels: the weight is one of rho, and needs no snapshot."""
    leaves = list(ir.leaves(*side.weights))
    if not {"r", "c"} <= {n.attr for n in leaves if n.op == "logratio"}:
        return

    def without_prox(n: Node) -> Node | None:
        if n.op == "logratio":
            return {"r": ir.logratio("rho", n.axis), "c": ir.ZERO}.get(str(n.attr))
        return ir.logp("mu", n.axis) if n.op == "logp" and n.attr == "prox" else None

    pairs = [(w, ir.rewrite(w, without_prox)) for w in side.weights]
    if Equality((side, side)).equal(*pairs):
        yield _warn(
            "W0706",
            "prox cancels out of the weight: r * c is rho",
            _key_reading(side, "c"),
            "write rho: the loss then needs no log-probs of the snapshot",
        )


def _self_ratios(side: Side) -> Iterator[Diagnostic]:
    """A quotient or a distance of a policy with itself."""
    for _, text in texts(side.method.doc):
        for e in _walk(parse_expression(text)):
            if isinstance(e, ast.Binary) and e.op == "div":
                pair = (e.left, e.right)
            elif isinstance(e, ast.Call) and len(e.args) == 2:
                pair = (e.args[0], e.args[1])
            else:
                continue
            names = {(type(x), x.id) for x in pair if isinstance(x, ast.Name | ast.Index) and x.id in ir.POLICIES}
            if len(names) == 1 and all(isinstance(x, ast.Name | ast.Index) for x in pair):
                ((_, policy),) = names
                yield Diagnostic(
                    "W0706",
                    f"this compares {policy} with itself: it is the same for every token",
                    place(text, e.start, e.end),
                    "name the two policies that are meant, of pi, prox, mu and ref",
                    severity="warning",
                )


def _walk(e: ast.Expr) -> Iterator[ast.Expr]:
    yield e
    for child in e.children:
        yield from _walk(child)


def _idle_parameters(side: Side) -> Iterator[Diagnostic]:
    """A parameter of which neither the gradient nor the data side knows."""
    method = side.method
    for p in method.params:
        if p.default is None:
            continue
        low, high = p.min.value if p.min else -np.inf, p.max.value if p.max else np.inf
        tried = {v for v in (2 * p.default.value + 0.1, p.default.value / 2) if low <= v <= high} - {p.default.value}
        if tried and not any(_matters(method, p.name.value, v) for v in sorted(tried)):
            yield _warn(
                "W0707",
                f"the value of `{p.name.value}` changes nothing",
                p.name,
                "it cancels, or stands where nothing reaches it: remove it or mend the expression",
            )


def _matters(method: Method, name: str, value: float) -> bool:
    pair = sides(method, replace(method, doc=with_params(method.doc, {name: value})), NOTHING)
    equality = Equality(pair)
    if not all(same_data(*pair, key, equality) for key in pair[0].data) or find_witness(pair)[1] is not None:
        return True
    a, b = pair
    return not equality.equal((a.coef, b.coef), (a.whole_entry, b.whole_entry))
