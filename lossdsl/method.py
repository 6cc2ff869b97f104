"""A checked method: one spec after every check, the object that all tools work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from . import ir
from .autodiff import Gradient, NotDifferentiable, differentiate
from .axes import Axis
from .errors import Diagnostic, Span, SpecError
from .ir import Node
from .lower import POISON, Lowering, TooLarge
from .primitives import Range, depends_on_pi, interval
from .specdoc import Number, ParamDoc, SpecDoc, Text


@dataclass(frozen=True)
class Term:
    """A further differentiable term of J: sum over live tokens of weight * add, where `mask` holds."""

    name: str
    add: Node
    normaliser: Node
    doc: str


@dataclass(frozen=True)
class Method:
    """A method in the master equation's terms.

        grad J = sum_{i,t} lambda * A * ( W * s_y - kappa * sum_v mu(v) W_v s_v ),   W = f * T

    Attributes:
        T, f, W, kappa: the knobs (W is None for a method given by its objective alone).
        objective: the per-token objective; J = sum over live tokens of normaliser * objective + terms, loss = -J.
        normaliser: lambda.
        advantage, reward, keep: the data side, or None.
        hints: node id -> the name the spec gives that value; origin: node id -> (key, line) that wrote it.
        proof: how the objective and the knobs were found to agree ("" where only one of them is written).
    """

    doc: SpecDoc
    T: Node | None
    f: Node | None
    W: Node | None
    kappa: Node
    objective: Node
    normaliser: Node
    terms: tuple[Term, ...]
    advantage: Node | None
    reward: Node | None
    keep: Node | None
    hints: Mapping[int, str] = field(repr=False)
    origin: Mapping[int, tuple[str, int]] = field(repr=False)
    proof: str = ""

    @property
    def name(self) -> str:
        return self.doc.name.value

    @property
    def title(self) -> str:
        return self.doc.title or self.name

    @property
    def params(self) -> tuple[ParamDoc, ...]:
        return self.doc.params

    @property
    def defaults(self) -> dict[str, float | None]:
        """Each parameter's default; None for a required one."""
        return {p.name.value: None if p.default is None else p.default.value for p in self.params}

    @cached_property
    def level(self) -> str:
        """token, segment or sequence: the level of the ratio that the method controls (that of f where f holds one, else of T)."""
        for knob in (self.f, self.T, self.objective):
            if knob is not None and holds_ratio(knob):
                return str(level_of(knob))
        return "token"

    @cached_property
    def gradient(self) -> Gradient:
        """dJ / d log pi of the whole loss: from the knobs where they are given, else from the objective; plus the terms."""
        objective = differentiate(((self.normaliser, self.objective),))
        terms = tuple((t.normaliser, t.add) for t in self.terms)
        extra = differentiate(terms)
        main = objective.coef if self.W is None else ir.mul(ir.mul(self.normaliser, advantage_of(self)), self.W)
        return Gradient(ir.add(main, extra.coef), objective.sums + extra.sums)

    @property
    def loss_side(self) -> tuple[Node, ...]:
        """Everything the loss computes."""
        knobs = tuple(k for k in (self.T, self.f) if k is not None)
        gradient = tuple(n for s in self.gradient.sums for n in (s.cotangent, s.slope))
        terms = tuple(n for t in self.terms for n in (t.add, t.normaliser))
        return (*knobs, self.objective, self.normaliser, *terms, self.gradient.coef, *gradient)


def advantage_of(method: Method) -> Node:
    """The advantage leaf: per answer, or per token where the spec redeclares it so."""
    per_token = any(i.name.value == "A" and i.axis.value == "token" for i in method.doc.inputs)
    return ir.value("A", Axis.TOKEN if per_token else Axis.SEQUENCE)


def holds_ratio(node: Node) -> bool:
    """Whether a probability of any policy is in it."""
    return ir.contains(node, lambda n: n.op in ("logp", "logratio"))


def level_of(node: Node) -> Axis:
    """SEQUENCE or SEGMENT where a ratio or probability is reduced over an answer's or a turn's tokens, else TOKEN."""
    found = Axis.TOKEN
    for below in ir.topological(node):
        if (
            below.op == "reduce"
            and isinstance(below.attr, tuple)
            and below.attr[1] in "ts"
            and holds_ratio(below.args[0])
        ):
            found = min(found, Axis.SEQUENCE if below.attr[1] == "t" else Axis.SEGMENT)
    return found


def with_params(doc: SpecDoc, values: Mapping[str, float]) -> SpecDoc:
    """The spec with other defaults.

    Raises:
        SpecError: E0602, for a parameter that the spec does not have or a value outside its bounds.
    """
    known = {p.name.value: p for p in doc.params}
    errors = []
    for name, value in values.items():
        p = known.get(name)
        if p is None:
            from .errors import suggest

            listed = ", ".join(known) or "none"
            errors.append(
                Diagnostic(
                    "E0602",
                    f"`{doc.name.value}` has no parameter `{name}`",
                    doc.name.span,
                    suggest(name, sorted(known)) or f"its parameters: {listed}",
                )
            )
            continue
        low, high = p.min.value if p.min else -float("inf"), p.max.value if p.max else float("inf")
        if not low <= value <= high:
            errors.append(Diagnostic("E0602", f"{name}={value:g} is outside [{low:g}, {high:g}]", p.span, p.doc))
    if errors:
        raise SpecError(tuple(errors))
    params = tuple(
        replace(p, default=Number(float(values[p.name.value]), p.span)) if p.name.value in values else p
        for p in doc.params
    )
    return replace(doc, params=params)


def lower_spec(doc: SpecDoc) -> Method:
    """The method of a spec, every name and type checked; whether objective and knobs agree is `prove`'s question.

    Raises:
        SpecError: all E03xx, E04xx and E05xx diagnostics found.
    """
    lowering = Lowering(doc)
    errors = lowering.diagnostics
    found: dict[str, Node] = {}

    def lower(key: str, text: Text | None, **kind: object) -> Node | None:
        if text is None:
            return None
        try:
            found[key] = lowering.key(key, text, **kind)  # type: ignore[arg-type]
        except SpecError as error:
            errors.extend(d for d in error.diagnostics if d not in errors)
            found[key] = POISON
        except (TooLarge, RecursionError):
            errors.append(
                Diagnostic(
                    "E0409",
                    f"`{key}` is too large once its functions are written out",
                    text.span,
                    "a method fits on a page; name shared parts under `where:`",
                )
            )
            found[key] = POISON
        return found[key]

    given = doc.T is not None or doc.f is not None or doc.kappa is not None or doc.objective is None
    T = lower("T", doc.T) or ir.ONE
    lowering.knobs["T"] = T
    f = lower("f", doc.f) or ir.ONE
    lowering.knobs["f"] = f
    W = ir.mul(f, T)
    lowering.knobs["W"] = W
    if not given:
        lowering.knobs.clear()
    kappa = lower("kappa", doc.kappa, finest=Axis.CONSTANT) or ir.ZERO
    objective = lower("objective", doc.objective)
    normaliser = lower("normaliser", doc.normaliser) or ir.ONE
    terms = []
    for number, term in enumerate(doc.terms, 1):
        name = term.name.value if term.name else f"term {number}"
        add = lower(f"terms: {name}", term.add) or POISON
        if term.mask is not None:
            mask = lower(f"terms: {name}: mask", term.mask, want="condition") or ir.TRUE
            add = ir.where(mask, add, ir.ZERO) if mask.is_bool else add
        weight = lower(f"terms: {name}: normaliser", term.normaliser) if term.normaliser else normaliser
        terms.append(Term(name, add, weight or normaliser, term.doc))
    reward = lower("reward", doc.reward, side="data", finest=Axis.SEQUENCE)
    advantage = lower("advantage", doc.advantage, side="data", finest=Axis.SEQUENCE)
    keep = lower("keep", doc.keep, side="data", want="condition", finest=Axis.SEQUENCE)
    for name, node in (("T", T), ("f", f), ("W", W)):
        lowering.hint(node, name)

    method = Method(
        doc,
        T if given else None,
        f if given else None,
        W if given else None,
        kappa,
        objective or ir.ZERO,
        normaliser,
        tuple(terms),
        advantage,
        reward,
        keep,
        lowering.hints,
        lowering.origin,
    )
    if not errors:
        errors += _meaning(method, lowering)
        if objective is None:
            method = replace(method, objective=canonical_objective(method))
        if not errors:
            errors += _differentiable(method)
    if errors:
        raise SpecError(tuple(errors))
    return method


def canonical_objective(method: Method) -> Node:
    """sg(W) A log pi - kappa A sum_v sg(mu(v) W_v) log pi(v): what a method given by its weights alone maximises."""
    assert method.W is not None
    A = advantage_of(method)
    first = ir.mul(ir.mul(ir.sg(method.W), A), ir.logp("pi"))
    if method.kappa is ir.ZERO:
        return first
    return ir.sub(
        first,
        ir.mul(
            ir.mul(method.kappa, A),
            ir.reduce("sum", "v", ir.mul(ir.sg(centre_weight(method)), ir.logp("pi", Axis.VOCAB))),
        ),
    )


def centre_weight(method: Method) -> Node:
    """mu(v) * W_v: the weight of the score of token v in the centring term."""
    assert method.W is not None
    return ir.mul(ir.exp(ir.logp("mu", Axis.VOCAB)), ir.at_vocabulary(method.W))


# --- checks of meaning --------------------------------------------------------------------------------------------


def _meaning(method: Method, lowering: Lowering) -> list[Diagnostic]:
    return [*_unused(method.doc, lowering), *_level(method), *_centring(method), *_bounds(method, lowering)]


def _unused(doc: SpecDoc, lowering: Lowering) -> list[Diagnostic]:
    """An option that changes nothing is an error: it would be believed to work."""
    definitions = [(d.signature, lowering.definitions[i].name, "definition") for i, d in enumerate(doc.where)]
    params = [(p.name, p.name.value, "parameter") for p in doc.params]
    inputs = [(i.name, i.name.value, "input") for i in doc.inputs]
    return [
        Diagnostic(
            "E0410",
            f"the {what} `{name}` is used nowhere",
            text.span,
            "use it or remove it: an option without effect misleads",
        )
        for text, name, what in (*params, *inputs, *definitions)
        if name not in lowering.used
    ]


def _level(method: Method) -> list[Diagnostic]:
    claim = method.doc.level
    if claim is None or claim.value == method.level:
        return []
    knob = (
        "f"
        if method.f is not None and holds_ratio(method.f)
        else "T"
        if method.T is not None and holds_ratio(method.T)
        else "objective"
    )
    return [
        Diagnostic(
            "E0501",
            f"`level: {claim.value}`, but `{knob}` works at the {method.level} level",
            claim.span,
            f"write `level: {method.level}`, or reduce the ratio over the answer (prod_t, geomean_t, ...) where you mean it",
        )
    ]


def _centring(method: Method) -> list[Diagnostic]:
    if method.kappa is ir.ZERO or method.W is None:
        return []
    assert method.doc.kappa is not None
    for node in ir.topological(method.W):
        if node.op == "reduce" and isinstance(node.attr, tuple) and node.attr[1] != "v" and holds_ratio(node.args[0]):
            return [
                Diagnostic(
                    "E0502",
                    "kappa needs a weight per token, but W contains a statistic of the whole answer",
                    method.doc.kappa.span,
                    "sum_v mu(v) W_v s_v has zero mean only if W_v is a function of this prefix: use the ratio per token, or kappa: 0",
                )
            ]
    return []


def defaults_range(method: Method) -> dict[int, Range]:
    """Each parameter pinned to its default, where it has one, else to its bounds."""
    ranges: dict[int, Range] = {}
    for p in method.params:
        low, high = p.min.value if p.min else -float("inf"), p.max.value if p.max else float("inf")
        ranges[id(ir.param(p.name.value))] = (low, high) if p.default is None else (p.default.value, p.default.value)
    return ranges


def _bounds(method: Method, lowering: Lowering) -> list[Diagnostic]:
    """An interval whose low end is above its high end at the defaults."""
    ranges = defaults_range(method)
    errors = []
    for low, high, span in lowering.intervals:
        _, most = interval(ir.sub(high, low), lambda n: ranges.get(id(n)))
        if most < 0:
            a, b = (interval(x, lambda n: ranges.get(id(n)))[0] for x in (low, high))
            errors.append(
                Diagnostic(
                    "E0411",
                    f"this interval is empty: its low end {a:g} is above its high end {b:g}",
                    span,
                    "a bound is written as the bound itself, e.g. `1 + eps_high`; swap the two or mend the default",
                )
            )
    return errors


def _differentiable(method: Method) -> list[Diagnostic]:
    spans: list[tuple[tuple[Node, Node], Span]] = []
    if method.doc.objective is not None:
        spans.append(((method.normaliser, method.objective), method.doc.objective.span))
    spans += [((t.normaliser, t.add), d.add.span) for t, d in zip(method.terms, method.doc.terms, strict=True)]
    errors = []
    for part, span in spans:
        try:
            differentiate((part,))
        except NotDifferentiable as error:
            errors.append(
                Diagnostic(
                    "E0503",
                    f"the gradient would flow through {error.what}, which has no closed form here",
                    span,
                    "wrap that part in sg(...) if it is meant as a fixed weight",
                )
            )
            continue
        if not depends_on_pi(part[1]):
            errors.append(
                Diagnostic(
                    "E0504",
                    "this has no gradient: nothing in it moves with pi",
                    span,
                    "use pi, r or rho outside sg(...); a weight form is `sg(w) * A * log(pi)`",
                )
            )
    return errors
