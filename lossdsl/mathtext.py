"""A method as mathematics for a reader: plain text for the terminal, LaTeX for a paper."""

from __future__ import annotations

import textwrap

from . import ir
from .describe import describe
from .method import Method
from .notation import Latex, Plain
from .parse import parse_expression
from .schedule import Schedule
from .specdoc import SpecDoc, Text
from .text import infix


def as_text(method: Method) -> str:
    """Objective and gradient, knobs, parameters with their documentation, what it needs, and its source."""
    doc, facts, schedule = method.doc, describe(method), Schedule(method)
    title = method.title if method.title.lower() == method.name else f"{method.title} ({method.name})"
    lines = [title]
    if doc.cite:
        lines.append(", ".join(x for x in (doc.cite.paper, doc.cite.where, doc.cite.url) if x))
    lines += [
        "",
        f"level {facts.level} · ratio {facts.ratio} · {facts.treatment}",
        "",
        "Objective (maximised; loss = -J)",
    ]
    terms = "".join(f" + {'term ' + t.name}" for t in method.terms)
    objective = (
        _text(doc.objective)
        if doc.objective
        else "sg(W)·A·log π" + ("" if method.kappa is ir.ZERO else " - κ·A·Σ_v sg(μ(v)·W_v)·log π(v)")
    )
    lines.append(f"  J = Σ_{{i,t}} λ·[ {objective} ]{terms}")
    if method.W is not None:
        centre = "" if method.kappa is ir.ZERO else " - κ·Σ_v μ(v)·W_v·∇log π(v)"
        lines += [
            "",
            "Gradient",
            f"  ∇J = Σ_{{i,t}} λ·A·( W·∇log π(y){centre} ),  W = f·T" + (" + terms" if terms else ""),
        ]
        lines += [f"  T = {_text(doc.T) if doc.T else '1'}", f"  f = {_text(doc.f) if doc.f else '1'}"]
        if method.kappa is not ir.ZERO and doc.kappa:
            lines.append(f"  κ = {_text(doc.kappa)}")
        if method.proof:
            lines.append(f"  objective and knobs agree: {method.proof}")
    written = _text(doc.normaliser) if doc.normaliser else "1"
    meaning = infix(method.normaliser)
    lines.append(f"  λ = {written}" + (f" = {meaning}" if meaning.replace(" ", "") != written.replace(" ", "") else ""))
    if doc.where:
        lines += ["", "where", *(f"  {d.signature.value} = {_text(d.body)}" for d in doc.where)]
    for term in doc.terms:
        name = term.name.value if term.name else "term"
        extra = (f" where {_text(term.mask)}" if term.mask else "") + (
            f", λ = {_text(term.normaliser)}" if term.normaliser else ""
        )
        lines += ["", f"term {name}: {_text(term.add)}{extra}", *([f"  {term.doc}"] if term.doc else [])]
    data = [
        (k, t) for k, t in (("reward", doc.reward), ("advantage", doc.advantage), ("keep", doc.keep)) if t is not None
    ]
    if data:
        lines += ["", "Data side", *(f"  {k} = {_text(t)}" for k, t in data)]
    if doc.params:
        lines += ["", "Parameters"]
        width = max(len(p.name.value) for p in doc.params)
        for p in doc.params:
            value = "required" if p.default is None else f"{p.default.value:g}"
            lines.append(f"  {p.name.value:<{width}}  {value:<9} {p.doc}".rstrip())
    if schedule.needs:
        lines += ["", "Needs", *(f"  {name}: {why}" for name, why in schedule.needs.items())]
    lines += ["", f"Passes over the logits: {schedule.passes}"]
    if doc.note:
        lines += ["", *textwrap.wrap("Note: " + " ".join(doc.note.split()), 100)]
    return "\n".join(lines)


def as_latex(method: Method) -> str:
    """The objective and the gradient as two LaTeX align lines, with the knobs below."""
    doc: SpecDoc = method.doc
    objective = (
        _latex_of(doc.objective)
        if doc.objective
        else r"\mathrm{sg}(W)\,\hat A\log\pi_\theta(y)"
        + ("" if method.kappa is ir.ZERO else r" - \kappa\,\hat A\sum_v \mathrm{sg}(\mu_v W_v)\log\pi_\theta(v)")
    )
    lines = [
        r"J &= \mathbb{E}_{y\sim\mu}\Big[\textstyle\sum_{i,t} \lambda\,\big("
        + objective
        + r"\big)"
        + "".join(" + " + _latex_of(t.add) for t in doc.terms)
        + r"\Big]"
    ]
    if method.W is not None:
        centre = "" if method.kappa is ir.ZERO else r" - \kappa\sum_v \mu(v)\,W_v\,\nabla\log\pi_\theta(v)"
        lines.append(
            r"\nabla J &= \mathbb{E}_{y\sim\mu}\Big[\textstyle\sum_{i,t} \lambda\,\hat A\big(W\,\nabla\log\pi_\theta(y)"
            + centre
            + r"\big)\Big], \quad W = f\,T"
        )
        lines += [f"T &= {_latex_of(doc.T) if doc.T else '1'}", f"f &= {_latex_of(doc.f) if doc.f else '1'}"]
    lines.append(rf"\lambda &= {_latex_of(doc.normaliser) if doc.normaliser else '1'}")
    lines += [f"{Latex().name(d.signature.value)} &= {_latex_of(d.body)}" for d in doc.where]
    return "\\begin{align*}\n" + " \\\\\n".join(lines) + "\n\\end{align*}"


def _text(text: Text) -> str:
    return Plain().formula(parse_expression(text))


def _latex_of(text: Text) -> str:
    return Latex().formula(parse_expression(text))
