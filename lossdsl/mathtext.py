"""A method as mathematics for a reader: plain text for the terminal, LaTeX for a paper."""

from __future__ import annotations

import textwrap

from . import ast, ir
from .describe import describe
from .method import Method
from .parse import parse_expression
from .schedule import Schedule
from .specdoc import SpecDoc, Text
from .text import infix

# Precedence, loosest first.
_CHOICE, _OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _SIGN, _POWER, _ATOM = range(10)

_GREEK = {
    "pi": r"\pi_\theta",
    "prox": r"\pi_{\mathrm{prox}}",
    "mu": r"\mu",
    "ref": r"\pi_{\mathrm{ref}}",
    "rho": r"\rho",
    "A": r"\hat A",
    "eps": r"\epsilon",
    "alpha": r"\alpha",
    "beta": r"\beta",
    "delta": r"\delta",
    "tau": r"\tau",
    "gamma": r"\gamma",
    "len": r"|y|",
    "n_tokens": r"N_{\mathrm{tok}}",
    "n_seqs": r"N_{\mathrm{seq}}",
    "n_groups": r"N_{\mathrm{group}}",
    "kappa": r"\kappa",
    "entropy": r"H",
}
_OVER = {"t": "t", "s": r"t\in\mathrm{turn}", "g": r"i\in\mathrm{group}", "b": r"\mathrm{batch}", "v": "v"}
_TEXT_OPS = {"add": "+", "sub": "-", "mul": "·", "div": "/"}


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
    lines += [f"{_latex_name(d.signature.value)} &= {_latex_of(d.body)}" for d in doc.where]
    return "\\begin{align*}\n" + " \\\\\n".join(lines) + "\n\\end{align*}"


def _text(text: Text) -> str:
    return _Text().write(parse_expression(text), _CHOICE)


def _latex_of(text: Text) -> str:
    return _Latex().write(parse_expression(text), _CHOICE)


def _latex_name(name: str) -> str:
    if name in _GREEK:
        return _GREEK[name]
    head, _, tail = name.partition("_")
    if tail:
        escaped = tail.replace("_", r"\_")
        return rf"{_latex_name(head)}_{{\mathrm{{{escaped}}}}}"
    return name if len(name) == 1 else rf"\mathrm{{{name}}}"


class _Text:
    """Unicode text, close to the spec's own spelling."""

    names = {"pi": "π", "mu": "μ", "rho": "ρ", "kappa": "κ"}

    def write(self, e: ast.Expr, outer: int) -> str:
        text, level = self.expr(e)
        return self.bracket(text) if level < outer else text

    def bracket(self, text: str) -> str:
        return f"({text})"

    def expr(self, e: ast.Expr) -> tuple[str, int]:
        match e:
            case ast.Number():
                return e.text, _ATOM
            case ast.Name():
                return self.names.get(e.id, e.id), _ATOM
            case ast.Index():
                return f"{self.names.get(e.id, e.id)}({e.axis})", _ATOM
            case ast.Call():
                return f"{e.func}({', '.join(self.write(a, _CHOICE) for a in e.args)})", _ATOM
            case ast.Unary():
                return (
                    (f"-{self.write(e.arg, _SIGN)}", _SIGN)
                    if e.op == "neg"
                    else (f"not {self.write(e.arg, _NOT)}", _NOT)
                )
            case ast.Binary(op="pow"):
                return f"{self.write(e.left, _ATOM)}^{self.write(e.right, _SIGN)}", _POWER
            case ast.Binary():
                level = _SUM if e.op in ("add", "sub") else _PRODUCT
                space = " " if level == _SUM else ""
                sign = f"{space}{_TEXT_OPS[e.op]}{space}"
                return f"{self.write(e.left, level)}{sign}{self.write(e.right, level + 1)}", level
            case ast.Compare():
                parts = [self.write(e.operands[0], _SUM)]
                for op, x in zip(e.ops, e.operands[1:], strict=True):
                    parts += [{"<=": "≤", ">=": "≥", "!=": "≠", "==": "="}.get(op, op), self.write(x, _SUM)]
                return " ".join(parts), _COMPARE
            case ast.Between():
                ends = ("[" if e.low_closed else "(", "]" if e.high_closed else ")")
                return (
                    f"{self.write(e.arg, _SUM)} ∈ {ends[0]}{self.write(e.low, _CHOICE)}, {self.write(e.high, _CHOICE)}{ends[1]}",
                    _COMPARE,
                )
            case ast.Logic():
                level = _AND if e.op == "and" else _OR
                return f" {e.op} ".join(self.write(a, level + 1) for a in e.args), level
            case ast.Indicator():
                return f"1[{self.write(e.cond, _CHOICE)}]", _ATOM
            case ast.Conditional():
                return (
                    f"{self.write(e.then, _OR)} if {self.write(e.cond, _OR)} else {self.write(e.other, _CHOICE)}",
                    _CHOICE,
                )
        raise TypeError(type(e).__name__)


class _Latex(_Text):
    def bracket(self, text: str) -> str:
        return rf"\left({text}\right)"

    def expr(self, e: ast.Expr) -> tuple[str, int]:
        match e:
            case ast.Name():
                return _latex_name(e.id), _ATOM
            case ast.Index():
                return f"{_latex_name(e.id)}({e.axis})", _ATOM
            case ast.Call():
                return self.call(e)
            case ast.Unary(op="not"):
                return rf"\neg {self.write(e.arg, _NOT)}", _NOT
            case ast.Binary(op="mul"):
                return rf"{self.write(e.left, _PRODUCT)}\,{self.write(e.right, _PRODUCT + 1)}", _PRODUCT
            case ast.Binary(op="div"):
                return rf"\frac{{{self.write(e.left, _CHOICE)}}}{{{self.write(e.right, _CHOICE)}}}", _ATOM
            case ast.Binary(op="pow"):
                return rf"{self.write(e.left, _ATOM)}^{{{self.write(e.right, _CHOICE)}}}", _POWER
            case ast.Compare():
                parts = [self.write(e.operands[0], _SUM)]
                for op, x in zip(e.ops, e.operands[1:], strict=True):
                    parts += [{"<=": r"\le", ">=": r"\ge", "!=": r"\ne", "==": "="}.get(op, op), self.write(x, _SUM)]
                return " ".join(parts), _COMPARE
            case ast.Between():
                text, level = super().expr(e)
                return text.replace("∈", r"\in"), level
            case ast.Logic():
                text, level = super().expr(e)
                sign = r" \wedge " if e.op == "and" else r" \vee "
                return sign.join(self.write(a, level + 1) for a in e.args), level
            case ast.Indicator():
                return rf"\mathbb{{1}}[{self.write(e.cond, _CHOICE)}]", _ATOM
            case ast.Conditional():
                then, cond, other = self.write(e.then, _OR), self.write(e.cond, _OR), self.write(e.other, _CHOICE)
                return rf"\begin{{cases}}{then} & {cond} \\ {other} & \text{{else}}\end{{cases}}", _ATOM
        return super().expr(e)

    def call(self, e: ast.Call) -> tuple[str, int]:
        args = [self.write(a, _CHOICE) for a in e.args]
        kind, _, suffix = e.func.rpartition("_")
        if e.func == "abs":
            return rf"\left|{args[0]}\right|", _ATOM
        if e.func == "sqrt":
            return rf"\sqrt{{{args[0]}}}", _ATOM
        if kind in ("sum", "prod") and suffix in _OVER:
            return rf"\{kind}_{{{_OVER[suffix]}}} {self.write(e.args[0], _PRODUCT)}", _PRODUCT
        if kind in (*ir.REDUCTIONS, "geomean", "all") and suffix in _OVER:
            return rf"\mathrm{{{kind}}}_{{{_OVER[suffix]}}}\left({', '.join(args)}\right)", _ATOM
        name = {
            "exp": r"\exp",
            "log": r"\log",
            "min": r"\min",
            "max": r"\max",
            "sigmoid": r"\sigma",
            "tanh": r"\tanh",
        }.get(e.func)
        if e.func == "log" and isinstance(e.args[0], ast.Name | ast.Index):
            return rf"\log {args[0]}", _PRODUCT
        return rf"{name or _latex_name(e.func)}\left({', '.join(args)}\right)", _ATOM
