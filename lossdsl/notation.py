"""How a formula is written down: one walk with brackets where they are needed, in plain text, LaTeX or what else has marks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from . import ast, ir

# Precedence, loosest first.
CHOICE, OR, AND, NOT, COMPARE, SUM, PRODUCT, SIGN, POWER, ATOM = range(10)

REDUCTIONS = (*ir.REDUCTIONS, "geomean", "all")
OVER = {"t": "t", "s": "turn", "g": "group", "b": "batch", "v": "v"}

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


class Notation(ABC):
    """A notation says how leaves, calls and layouts look; operators are looked up in `marks`, each with its spaces."""

    marks: Mapping[str, str]

    def formula(self, e: ast.Expr) -> str:
        return self.write(e, CHOICE)

    def write(self, e: ast.Expr, outer: int) -> str:
        """An expression, in brackets where it binds less tightly than its surroundings."""
        text, level = self._expr(e)
        return self.bracket(text) if level < outer else self.row(text)

    def mark(self, op: str) -> str:
        return self.marks.get(op, op)

    def row(self, text: str) -> str:
        return text

    @abstractmethod
    def bracket(self, text: str) -> str: ...

    @abstractmethod
    def number(self, text: str) -> str: ...

    @abstractmethod
    def name(self, name: str) -> str: ...

    @abstractmethod
    def call(self, e: ast.Call) -> tuple[str, int]: ...

    @abstractmethod
    def fraction(self, e: ast.Binary) -> tuple[str, int]: ...

    @abstractmethod
    def power(self, e: ast.Binary) -> str: ...

    @abstractmethod
    def choice(self, e: ast.Conditional) -> tuple[str, int]: ...

    def listed(self, items: tuple[ast.Expr, ...]) -> str:
        return self.mark(",").join(self.formula(a) for a in items)

    def infix(self, e: ast.Binary, level: int) -> tuple[str, int]:
        return f"{self.write(e.left, level)}{self.mark(e.op)}{self.write(e.right, level + 1)}", level

    def _expr(self, e: ast.Expr) -> tuple[str, int]:
        match e:
            case ast.Number():
                return self.number(e.text), ATOM
            case ast.Name():
                return self.name(e.id), ATOM
            case ast.Index():
                return f"{self.name(e.id)}{self.mark('(')}{self.name(e.axis)}{self.mark(')')}", ATOM
            case ast.Call():
                return self.call(e)
            case ast.Unary():
                level = SIGN if e.op == "neg" else NOT
                return self.mark(e.op) + self.write(e.arg, level), level
            case ast.Binary(op="pow"):
                return self.power(e), POWER
            case ast.Binary(op="div"):
                return self.fraction(e)
            case ast.Binary():
                return self.infix(e, PRODUCT if e.op == "mul" else SUM)
            case ast.Compare():
                parts = [self.write(e.operands[0], SUM)]
                for op, x in zip(e.ops, e.operands[1:], strict=True):
                    parts += [self.mark(op), self.write(x, SUM)]
                return "".join(parts), COMPARE
            case ast.Between():
                left, right = self.mark("[" if e.low_closed else "("), self.mark("]" if e.high_closed else ")")
                return f"{self.write(e.arg, SUM)}{self.mark('in')}{left}{self.listed((e.low, e.high))}{right}", COMPARE
            case ast.Logic():
                level = AND if e.op == "and" else OR
                return self.mark(e.op).join(self.write(a, level + 1) for a in e.args), level
            case ast.Indicator():
                return f"{self.mark('1')}{self.mark('[')}{self.formula(e.cond)}{self.mark(']')}", ATOM
            case ast.Conditional():
                return self.choice(e)
        raise TypeError(type(e).__name__)


class Plain(Notation):
    """Unicode text, close to the spec's own spelling."""

    marks = {"add": " + ", "sub": " - ", "mul": "·", "div": "/", "neg": "-", "not": "not ", "and": " and ", "or": " or ", ",": ", ",
             "<": " < ", ">": " > ", "<=": " ≤ ", ">=": " ≥ ", "!=": " ≠ ", "==": " = ", "in": " ∈ "}  # fmt: skip
    _names = {"pi": "π", "mu": "μ", "rho": "ρ", "kappa": "κ"}

    def bracket(self, text: str) -> str:
        return f"({text})"

    def number(self, text: str) -> str:
        return text

    def name(self, name: str) -> str:
        return self._names.get(name, name)

    def call(self, e: ast.Call) -> tuple[str, int]:
        return f"{e.func}({self.listed(e.args)})", ATOM

    def fraction(self, e: ast.Binary) -> tuple[str, int]:
        return self.infix(e, PRODUCT)

    def power(self, e: ast.Binary) -> str:
        return f"{self.write(e.left, ATOM)}^{self.write(e.right, SIGN)}"

    def choice(self, e: ast.Conditional) -> tuple[str, int]:
        return f"{self.write(e.then, OR)} if {self.write(e.cond, OR)} else {self.formula(e.other)}", CHOICE


class Latex(Notation):
    marks = {"add": " + ", "sub": " - ", "mul": r"\,", "neg": "-", "not": r"\neg ", "and": r" \wedge ", "or": r" \vee ",
             ",": ", ", "<": " < ", ">": " > ", "<=": r" \le ", ">=": r" \ge ", "!=": r" \ne ", "==": " = ",
             "in": r" \in ", "1": r"\mathbb{1}"}  # fmt: skip
    _functions = {
        "exp": r"\exp",
        "log": r"\log",
        "min": r"\min",
        "max": r"\max",
        "sigmoid": r"\sigma",
        "tanh": r"\tanh",
    }
    _over = OVER | {"s": r"t\in\mathrm{turn}", "g": r"i\in\mathrm{group}", "b": r"\mathrm{batch}"}

    def bracket(self, text: str) -> str:
        return rf"\left({text}\right)"

    def number(self, text: str) -> str:
        return text

    def name(self, name: str) -> str:
        if name in _GREEK:
            return _GREEK[name]
        head, _, tail = name.partition("_")
        if tail:
            escaped = tail.replace("_", r"\_")
            return rf"{self.name(head)}_{{\mathrm{{{escaped}}}}}"
        return name if len(name) == 1 else rf"\mathrm{{{name}}}"

    def call(self, e: ast.Call) -> tuple[str, int]:
        kind, _, suffix = e.func.rpartition("_")
        if e.func == "abs":
            return rf"\left|{self.listed(e.args)}\right|", ATOM
        if e.func == "sqrt":
            return rf"\sqrt{{{self.listed(e.args)}}}", ATOM
        if kind in ("sum", "prod") and suffix in OVER:
            return rf"\{kind}_{{{self._over[suffix]}}} {self.write(e.args[0], PRODUCT)}", PRODUCT
        if kind in REDUCTIONS and suffix in OVER:
            return rf"\mathrm{{{kind}}}_{{{self._over[suffix]}}}{self.bracket(self.listed(e.args))}", ATOM
        if e.func == "log" and isinstance(e.args[0], ast.Name | ast.Index):
            return rf"\log {self.listed(e.args)}", PRODUCT
        return (self._functions.get(e.func) or self.name(e.func)) + self.bracket(self.listed(e.args)), ATOM

    def fraction(self, e: ast.Binary) -> tuple[str, int]:
        return rf"\frac{{{self.formula(e.left)}}}{{{self.formula(e.right)}}}", ATOM

    def power(self, e: ast.Binary) -> str:
        return rf"{self.write(e.left, ATOM)}^{{{self.formula(e.right)}}}"

    def choice(self, e: ast.Conditional) -> tuple[str, int]:
        then, cond, other = self.write(e.then, OR), self.write(e.cond, OR), self.formula(e.other)
        return rf"\begin{{cases}}{then} & {cond} \\ {other} & \text{{else}}\end{{cases}}", ATOM
