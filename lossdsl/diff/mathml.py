"""Formulas of a spec as MathML, which browsers typeset by themselves."""

from __future__ import annotations

from html import escape

from .. import ast, ir
from ..method import Method
from ..notation import ATOM, CHOICE, OR, OVER, PRODUCT, REDUCTIONS, Notation
from ..parse import parse_expression
from ..specdoc import Text

_GREEK = {"mu": "μ", "rho": "ρ", "eps": "ε", "alpha": "α", "beta": "β", "delta": "δ", "tau": "τ", "gamma": "γ", "phi": "φ", "kappa": "κ",
          "lambda": "λ", "sigma": "σ", "eta": "η", "theta": "θ", "entropy": "H"}  # fmt: skip
_POLICY = {"pi": "<msub><mi>π</mi><mi>θ</mi></msub>", "prox": "<msub><mi>π</mi><mtext>prox</mtext></msub>",
           "ref": "<msub><mi>π</mi><mtext>ref</mtext></msub>", "A": "<mover><mi>A</mi><mo>^</mo></mover>"}  # fmt: skip


def formulas(method: Method) -> list[tuple[str, str]]:
    """(name, MathML) of the objective, the gradient and the knobs of a method."""
    doc = method.doc
    expected = "<msub><mi mathvariant='normal'>E</mi><mrow><mi>y</mi><mo>∼</mo><mi>μ</mi></mrow></msub>"
    total = "<munder><mo>∑</mo><mrow><mi>i</mi><mo>,</mo><mi>t</mi></mrow></munder>"
    score = "<mo>∇</mo><mi>log</mi>" + _POLICY["pi"]
    first = f"<mi>W</mi>{score}<mo>(</mo><mi>y</mi><mo>)</mo>"
    rows = []
    if doc.objective is not None:
        more = "".join("<mo>+</mo>" + _of(t.add) for t in doc.terms)
        rows.append(
            ("J", f"<mi>J</mi><mo>=</mo>{expected}{total}<mi>λ</mi><mo>[</mo>{_of(doc.objective)}<mo>]</mo>{more}")
        )
    centre = ""
    if method.kappa is not ir.ZERO:
        over = "<mo>−</mo><mi>κ</mi><munder><mo>∑</mo><mi>v</mi></munder><mi>μ</mi><mo>(</mo><mi>v</mi><mo>)</mo>"
        centre = f"{over}<msub><mi>W</mi><mi>v</mi></msub>{score}<mo>(</mo><mi>v</mi><mo>)</mo>"
    gradient = f"<mi>λ</mi>{_POLICY['A']}<mo>(</mo>{first}{centre}<mo>)</mo>"
    rows.append(("grad J", f"<mo>∇</mo><mi>J</mi><mo>=</mo>{expected}{total}{gradient}"))
    for name, text in (("T", doc.T), ("f", doc.f), ("kappa", doc.kappa), ("lambda", doc.normaliser)):
        if text is not None:
            rows.append((name, f"{MathML().name(name)}<mo>=</mo>{_of(text)}"))
    rows += [
        (d.signature.value, f"<mtext>{escape(d.signature.value)}</mtext><mo>=</mo>{_of(d.body)}") for d in doc.where
    ]
    return [(name, f"<math display='block'><mrow>{body}</mrow></math>") for name, body in rows]


def _of(text: Text) -> str:
    return MathML().formula(parse_expression(text))


class MathML(Notation):
    marks = {"add": "+", "sub": "−", "neg": "−", "not": "¬", "<=": "≤", ">=": "≥", "!=": "≠", "==": "=", "in": "∈"}
    _spaced = {"mul": "<mspace width='0.2em'/>", "1": "<mn>𝟏</mn>"}
    _spaced |= {op: f"<mspace width='0.3em'/><mtext>{op}</mtext><mspace width='0.3em'/>" for op in ("and", "or")}

    def mark(self, op: str) -> str:
        return self._spaced.get(op) or f"<mo>{escape(self.marks.get(op, op))}</mo>"

    def row(self, text: str) -> str:
        return f"<mrow>{text}</mrow>"

    def bracket(self, text: str) -> str:
        return f"<mrow><mo>(</mo>{text}<mo>)</mo></mrow>"

    def number(self, text: str) -> str:
        return f"<mn>{escape(text)}</mn>"

    def name(self, name: str) -> str:
        if name in _POLICY:
            return _POLICY[name]
        head, _, tail = name.partition("_")
        if (len(head) > 3 and head not in _GREEK) or "_" in tail:
            return f"<mtext>{escape(name)}</mtext>"
        base = f"<mi>{escape(_GREEK.get(head, head))}</mi>"
        return f"<msub>{base}<mtext>{escape(tail)}</mtext></msub>" if tail else base

    def call(self, e: ast.Call) -> tuple[str, int]:
        kind, _, suffix = e.func.rpartition("_")
        if e.func == "abs":
            return f"<mo>|</mo>{self.listed(e.args)}<mo>|</mo>", ATOM
        if e.func == "sqrt":
            return f"<msqrt>{self.listed(e.args)}</msqrt>", ATOM
        if kind in ("sum", "prod") and suffix in OVER:
            sign = "∑" if kind == "sum" else "∏"
            return (
                f"<munder><mo>{sign}</mo><mtext>{OVER[suffix]}</mtext></munder>{self.write(e.args[0], PRODUCT)}",
                PRODUCT,
            )
        if kind in REDUCTIONS and suffix in OVER:
            head = f"<munder><mi>{escape(kind)}</mi><mtext>{OVER[suffix]}</mtext></munder>"
        elif e.func == "log" and isinstance(e.args[0], ast.Name | ast.Index):
            return f"<mi>log</mi><mspace width='0.15em'/>{self.listed(e.args)}", PRODUCT
        else:
            head = f"<mi>{escape(e.func)}</mi>" if "_" not in e.func else f"<mtext>{escape(e.func)}</mtext>"
        return f"{head}<mo>(</mo>{self.listed(e.args)}<mo>)</mo>", ATOM

    def fraction(self, e: ast.Binary) -> tuple[str, int]:
        return f"<mfrac>{self.formula(e.left)}{self.formula(e.right)}</mfrac>", ATOM

    def power(self, e: ast.Binary) -> str:
        return f"<msup>{self.write(e.left, ATOM)}{self.formula(e.right)}</msup>"

    def choice(self, e: ast.Conditional) -> tuple[str, int]:
        rows = f"<mtr><mtd>{self.write(e.then, OR)}</mtd><mtd><mtext>if</mtext><mspace width='0.3em'/>{self.write(e.cond, OR)}</mtd></mtr>"
        rows += f"<mtr><mtd>{self.formula(e.other)}</mtd><mtd><mtext>else</mtext></mtd></mtr>"
        return f"<mrow><mo>{{</mo><mtable columnalign='left'>{rows}</mtable></mrow>", CHOICE
