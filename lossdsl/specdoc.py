"""A spec's structure: YAML tree -> SpecDoc, with the place of everything in it. The only room where pydantic is used."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from . import yamlnodes
from .errors import Diagnostic, Source, Span, SpecError, suggest
from .names import why_not
from .yamlnodes import Mapping, Node, Scalar, Sequence, read_source

__all__ = [
    "Cite",
    "Definition",
    "InputDoc",
    "Number",
    "ParamDoc",
    "SpecDoc",
    "TermDoc",
    "Text",
    "json_schema",
    "plain_text",
    "read_source",
    "read_spec",
    "texts",
]

LANGUAGE = 1  # the version of the language that this build reads

Text = Scalar  # any text of a spec, with its place


def plain_text(name: str, value: str) -> Text:
    """Text that stands in no file; `name` is what diagnostics call its place."""
    return Text(value, Span(Source(name, value), 0, len(value)), tuple(range(len(value) + 1)))


@dataclass(frozen=True)
class Number:
    value: float
    span: Span


@dataclass(frozen=True)
class ParamDoc:
    """A parameter; without a default it is required."""

    name: Text
    default: Number | None
    min: Number | None
    max: Number | None
    doc: str
    span: Span


@dataclass(frozen=True)
class InputDoc:
    """A declared input: a keyword argument of the generated module, one value per item of `axis`."""

    name: Text
    axis: Text
    doc: str


@dataclass(frozen=True)
class Cite:
    paper: str
    where: str
    url: str


@dataclass(frozen=True)
class TermDoc:
    """A further term of J, with its own mask and normaliser where they differ from the main part's."""

    name: Text | None
    add: Text
    mask: Text | None
    normaliser: Text | None
    doc: str


@dataclass(frozen=True)
class Definition:
    """An entry of `where:`: a name (`s`) or a function (`gate(x, tau)`)."""

    signature: Text
    body: Text


@dataclass(frozen=True)
class SpecDoc:
    """What a spec file says; its expressions are still text."""

    source: Source
    name: Text
    title: str
    cite: Cite | None
    note: str
    params: tuple[ParamDoc, ...]
    inputs: tuple[InputDoc, ...]
    where: tuple[Definition, ...]
    level: Text | None
    T: Text | None
    f: Text | None
    kappa: Text | None
    objective: Text | None
    normaliser: Text | None
    advantage: Text | None
    reward: Text | None
    keep: Text | None
    terms: tuple[TermDoc, ...]
    allow: tuple[tuple[str, int], ...]  # (warning code, line) of each `# lossdsl: allow CODE`


def texts(doc: SpecDoc) -> list[tuple[str, Text]]:
    """Every expression of a spec with the key that it stands under."""
    keys = [(d.signature.value, d.body) for d in doc.where]
    for key in ("T", "f", "kappa", "objective", "normaliser", "reward", "advantage", "keep"):
        text = getattr(doc, key)
        if text is not None:
            keys.append((key, text))
    for number, term in enumerate(doc.terms, 1):
        name = term.name.value if term.name else f"term {number}"
        keys += [
            (f"{name}: {k}", t)
            for k, t in (("add", term.add), ("mask", term.mask), ("normaliser", term.normaliser))
            if t is not None
        ]
    return keys


# --- the structure, as pydantic sees it: also the JSON Schema that editors read ------------------------------------------

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def _number(text: object) -> float:
    if not isinstance(text, str):
        raise ValueError("a number is wanted here")
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise ValueError(f"`{text[:40]}` is not a number")
    return value


_Num = Annotated[float, BeforeValidator(_number), WithJsonSchema({"type": "number"})]
_Expr = Annotated[str, WithJsonSchema({"type": ["string", "number"], "description": "an expression of the language"})]
_Doc = Annotated[str, Field(max_length=2000)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Param(_Model):
    """A parameter of the loss; without a default it is required."""

    default: _Num | None = Field(None, description="the published value")
    min: _Num | None = None
    max: _Num | None = None
    doc: _Doc = Field("", description="what it is, in a few words")


class _Input(_Model):
    """An extra input: a keyword argument of the generated module."""

    axis: Literal["batch", "group", "sequence", "segment", "token"]
    doc: _Doc = ""


class _Cite(_Model):
    paper: _Doc = ""
    where: _Doc = Field("", description="equation or section")
    url: _Doc = ""


class _Term(_Model):
    """A further differentiable term, added to J."""

    name: str | None = Field(None, max_length=60)
    add: _Expr
    mask: _Expr | None = None
    normaliser: _Expr | None = None
    doc: _Doc = ""


_ParamOrNumber = Annotated[_Param, WithJsonSchema({"anyOf": [{"type": "number"}, {"$ref": "#/$defs/_Param"}]})]


class _Spec(_Model):
    """A policy-gradient method for lossdsl."""

    lossdsl: Annotated[Literal["1"], WithJsonSchema({"const": 1, "description": "the language version"})]
    name: str = Field(description="lower case; the generated file's name", pattern=r"^[a-z][a-z0-9_]{0,39}$")
    title: str = Field("", max_length=200)
    cite: _Cite | None = None
    note: _Doc = Field("", description="where sources disagree, and what was chosen")
    params: dict[str, _Param] = Field(default_factory=dict)
    inputs: dict[str, _Input] = Field(default_factory=dict)
    where: dict[str, _Expr] = Field(
        default_factory=dict, description="names and functions that later keys use, in order"
    )
    level: Literal["token", "segment", "sequence"] | None = None
    T: _Expr | None = Field(None, description="trust region, a stop-gradient weight")
    f: _Expr | None = Field(None, description="off-policy correction, a stop-gradient weight")
    kappa: _Expr | None = Field(None, description="1 centres the score under mu")
    objective: _Expr | None = Field(None, description="what is maximised, per token, before lambda")
    normaliser: _Expr = Field(description="lambda: the weight of one token")
    terms: list[_Term] = Field(default_factory=list)
    advantage: _Expr | None = None
    reward: _Expr | None = None
    keep: _Expr | None = None


def json_schema() -> dict[str, Any]:
    """The JSON Schema of spec files, for editors."""
    schema = _Spec.model_json_schema()
    schema["properties"]["params"]["additionalProperties"] = {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/_Param"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_SIGNATURE = re.compile(
    r"([A-Za-z][A-Za-z0-9_]*)\s*(?:\(\s*([A-Za-z][A-Za-z0-9_]*(?:\s*,\s*[A-Za-z][A-Za-z0-9_]*)*)?\s*\))?"
)


# --- reading --------------------------------------------------------------------------------------------------------------------

_Path = tuple[str | int, ...]


def read_spec(source: Source) -> SpecDoc:
    """The structure of a spec, checked; its expressions are not looked at yet.

    Raises:
        SpecError: all E01xx or all E02xx diagnostics.
    """
    root = yamlnodes.read_tree(source)
    keys: dict[_Path, Scalar] = {}
    nodes: dict[_Path, Node] = {}
    raw = _plain(root, (), keys, nodes)
    try:
        spec = _Spec.model_validate(raw)
    except ValidationError as error:
        raise SpecError(_structure_error(e, source, keys, nodes) for e in error.errors()) from None
    errors = list(_name_errors(spec, keys)) + list(_bound_errors(spec, keys, nodes))
    if spec.T is None and spec.f is None and spec.objective is None and not spec.terms:
        errors.append(
            Diagnostic(
                "E0208",
                "this spec says nothing to maximise",
                keys[("name",)].span,
                "give `objective:`, or weights `T:` and `f:`, or both",
            )
        )
    if errors:
        raise SpecError(errors)
    return _document(spec, source, keys, nodes)


def _plain(node: Node, path: _Path, keys: dict[_Path, Scalar], nodes: dict[_Path, Node]) -> object:
    """The tree as dicts, lists and strings; remembers which node each path came from."""
    nodes[path] = node
    if isinstance(node, Scalar):
        if len(path) == 2 and path[0] == "params":  # the shorthand `eps: 0.2`
            nodes[(*path, "default")] = node
            return {"default": node.value}
        return node.value
    if isinstance(node, Sequence):
        return [_plain(item, (*path, i), keys, nodes) for i, item in enumerate(node.items)]
    result = {}
    for key, value in node.entries:
        keys[(*path, key.value)] = key
        result[key.value] = _plain(value, (*path, key.value), keys, nodes)
    return result


def _structure_error(error: Any, source: Source, keys: dict[_Path, Scalar], nodes: dict[_Path, Node]) -> Diagnostic:
    """One pydantic error in this language's words."""
    path: _Path = tuple(error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    key = str(path[-1]) if path else ""
    if kind == "extra_forbidden":
        known = _known_keys(path)
        return Diagnostic(
            "E0201",
            f"unknown key `{key}`",
            keys[path].span,
            suggest(key, known) or f"the keys here are {', '.join(known)}",
        )
    if kind == "missing":
        above = path[:-1]
        span = keys[above].span if above in keys else Span(source, 0, 1) if not above else nodes[above].span
        help = {
            "lossdsl": f"start with `lossdsl: {LANGUAGE}`",
            "name": "e.g. `name: my_method`",
            "add": "e.g. `add: -beta * k3(ref, pi)`",
            "normaliser": "what one token weighs: token_mean, seq_mean_token_mean, ...",
            "axis": "one of batch, group, sequence, segment, token",
        }
        return Diagnostic("E0203", f"the key `{key}` is missing", span, help.get(key, ""))
    node = nodes.get(path) or nodes.get(path[:-1])
    span = node.span if node is not None else Span(source, 0, 1)
    written = node.value if isinstance(node, Scalar) else ""
    if kind == "value_error":
        return Diagnostic("E0204", f"`{key}` must be a number: {context['error']}", span, "e.g. 0.2, 3e-4")
    if kind == "literal_error" and key == "lossdsl":
        return Diagnostic(
            "E0205",
            f"this build reads version {LANGUAGE} of the language, not `{written[:20]}`",
            span,
            f"write `lossdsl: {LANGUAGE}`",
        )
    if kind == "literal_error":
        expected = str(context["expected"]).replace("'", "`")
        return Diagnostic("E0205", f"`{key}` cannot be `{written[:40]}`", span, f"one of {expected}")
    if kind == "string_pattern_mismatch":
        return Diagnostic(
            "E0206",
            f"`{written[:40]}` cannot be a method's name",
            span,
            "lower-case letters, digits and _, starting with a letter",
        )
    if kind == "string_too_long":
        return Diagnostic("E0209", f"`{key}` is longer than {context['max_length']} characters", span, "shorten it")
    wanted = {
        "string_type": "a text",
        "model_type": "a mapping of keys",
        "model_attributes_type": "a mapping of keys",
        "dict_type": "a mapping of names",
        "list_type": "a list (lines that start with `- `)",
    }.get(kind, "something else")
    found = {Scalar: "a text", Mapping: "a mapping", Sequence: "a list"}.get(type(node), "something else")
    return Diagnostic("E0202", f"`{key}` must be {wanted}, here is {found}", span, _example(key))


def _known_keys(path: _Path) -> list[str]:
    models: dict[object, type[BaseModel]] = {"params": _Param, "inputs": _Input, "cite": _Cite, "terms": _Term}
    model = models.get(path[0], _Spec) if len(path) > 1 else _Spec
    return list(model.model_fields)


def _example(key: str) -> str:
    return {"params": "e.g. `params: {eps: 0.2}`", "terms": "e.g. `- add: -beta * k3(ref, pi)`", "where": "e.g. `s: geomean_t(r)`",
            "inputs": "e.g. `old_entropy: {axis: token}`", "cite": "e.g. `cite: {paper: ..., where: Eq. 1}`"}.get(key, "")  # fmt: skip


def _name_errors(spec: _Spec, keys: dict[_Path, Scalar]) -> Iterator[Diagnostic]:
    taken: dict[str, Scalar] = {}

    def claim(name: str, key: Scalar) -> Iterator[Diagnostic]:
        if name in taken:
            line = key.span.source.line_col(taken[name].span.start)[0]
            yield Diagnostic(
                "E0206", f"the name `{name}` is given twice", key.span, f"it already stands on line {line}"
            )
        taken[name] = key

    for group in ("params", "inputs"):
        for name in getattr(spec, group):
            key = keys[(group, name)]
            why = None if group == "inputs" and name == "A" else why_not(name)
            if why:
                yield Diagnostic("E0206", f"`{name[:40]}` cannot be a name here", key.span, why)
            yield from claim(name, key)
    if "A" in spec.inputs and spec.inputs["A"].axis not in ("token", "sequence"):
        yield Diagnostic(
            "E0205",
            f"the advantage `A` cannot be per {spec.inputs['A'].axis}",
            keys[("inputs", "A")].span,
            "token or sequence",
        )
    for written in spec.where:
        key = keys[("where", written)]
        match = _SIGNATURE.fullmatch(written.strip())
        if match is None:
            yield Diagnostic(
                "E0206",
                f"`{written[:40]}` cannot be defined",
                key.span,
                "an entry is `name: expression` or `name(x, y): expression`",
            )
            continue
        arguments = [a.strip() for a in (match[2] or "").split(",") if a.strip()]
        for name, why in [(match[1], why_not(match[1])), *((a, why_not(a, argument=True)) for a in arguments)]:
            if why:
                yield Diagnostic("E0206", f"`{name[:40]}` cannot be a name here", key.span, why)
        if len(set(arguments)) < len(arguments):
            yield Diagnostic("E0206", f"two arguments of `{match[1]}` have the same name", key.span, "rename one")
        yield from claim(match[1], key)


def _bound_errors(spec: _Spec, keys: dict[_Path, Scalar], nodes: dict[_Path, Node]) -> Iterator[Diagnostic]:
    for name, p in spec.params.items():
        low, high = -math.inf if p.min is None else p.min, math.inf if p.max is None else p.max
        if low > high:
            yield Diagnostic(
                "E0207", f"`{name}` has min {low:g} above max {high:g}", keys[("params", name)].span, "swap them"
            )
        elif p.default is not None and not low <= p.default <= high:
            yield Diagnostic(
                "E0207",
                f"the default {p.default:g} of `{name}` is outside [{low:g}, {high:g}]",
                nodes[("params", name, "default")].span,
                "change one of them",
            )


def _document(spec: _Spec, source: Source, keys: dict[_Path, Scalar], nodes: dict[_Path, Node]) -> SpecDoc:
    def text(*path: str | int) -> Text | None:
        node = nodes.get(path)
        return node if isinstance(node, Scalar) else None

    def known(*path: str | int) -> Text:
        node = nodes[path]
        assert isinstance(node, Scalar)
        return node

    def number(*path: str | int) -> Number | None:
        node = text(*path)
        return None if node is None else Number(float(node.value), node.span)

    params = tuple(
        ParamDoc(
            keys[("params", n)],
            number("params", n, "default"),
            number("params", n, "min"),
            number("params", n, "max"),
            p.doc,
            keys[("params", n)].span,
        )
        for n, p in spec.params.items()
    )
    inputs = tuple(InputDoc(keys[("inputs", n)], known("inputs", n, "axis"), i.doc) for n, i in spec.inputs.items())
    where = tuple(Definition(keys[("where", n)], known("where", n)) for n in spec.where)
    terms = tuple(
        TermDoc(
            text("terms", i, "name"),
            known("terms", i, "add"),
            text("terms", i, "mask"),
            _dashes(text("terms", i, "normaliser")),
            t.doc,
        )
        for i, t in enumerate(spec.terms)
    )
    cite = None if spec.cite is None else Cite(spec.cite.paper, spec.cite.where, spec.cite.url)
    expressions = {k: text(k) for k in ("level", "T", "f", "kappa", "objective", "advantage", "reward", "keep")}
    return SpecDoc(
        source=source,
        name=known("name"),
        title=spec.title,
        cite=cite,
        note=spec.note,
        params=params,
        inputs=inputs,
        where=where,
        normaliser=_dashes(text("normaliser")),
        terms=terms,
        allow=_allowances(source),
        **expressions,
    )


def _dashes(text: Text | None) -> Text | None:
    """`token-mean` is spelt with dashes as often as with underscores."""
    if text is None or not re.fullmatch(r"[a-z]+(-[a-z]+)+", text.value):
        return text
    return Scalar(text.value.replace("-", "_"), text.span, text.chars)


def _allowances(source: Source) -> tuple[tuple[str, int], ...]:
    found = []
    for number, line in enumerate(source.text.splitlines(), 1):
        match = re.search(r"#\s*lossdsl:\s*allow\s+([A-Z]\d{4}(?:\s*,\s*[A-Z]\d{4})*)", line)
        if match:
            found += [(code.strip(), number) for code in match[1].split(",")]
    return tuple(found)
