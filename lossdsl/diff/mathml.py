"""Formulas of a spec as MathML, which browsers typeset by themselves."""

from __future__ import annotations

from html import escape

from .. import ast, ir
from ..method import Method
from ..parse import parse_expression
from ..specdoc import Text

_CHOICE, _OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _SIGN, _POWER, _ATOM = range(10)

_GREEK = {"mu": "μ", "rho": "ρ", "eps": "ε", "alpha": "α", "beta": "β", "delta": "δ", "tau": "τ", "gamma": "γ", "phi": "φ", "kappa": "κ",
          "lambda": "λ", "sigma": "σ", "eta": "η", "theta": "θ", "entropy": "H"}  # fmt: skip
_POLICY = {"pi": "<msub><mi>π</mi><mi>θ</mi></msub>", "prox": "<msub><mi>π</mi><mtext>prox</mtext></msub>",
           "ref": "<msub><mi>π</mi><mtext>ref</mtext></msub>", "A": "<mover><mi>A</mi><mo>^</mo></mover>"}  # fmt: skip
_SIGNS = {"<=": "≤", ">=": "≥", "!=": "≠", "==": "="}
_OVER = {"t": "t", "s": "turn", "g": "group", "b": "batch", "v": "v"}


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
            rows.append((name, f"{_name(name)}<mo>=</mo>{_of(text)}"))
    rows += [
        (d.signature.value, f"<mtext>{escape(d.signature.value)}</mtext><mo>=</mo>{_of(d.body)}") for d in doc.where
    ]
    return [(name, f"<math display='block'><mrow>{body}</mrow></math>") for name, body in rows]


def _of(text: Text) -> str:
    return _write(parse_expression(text), _CHOICE)


def _name(name: str) -> str:
    if name in _POLICY:
        return _POLICY[name]
    head, _, tail = name.partition("_")
    if (len(head) > 3 and head not in _GREEK) or "_" in tail:
        return f"<mtext>{escape(name)}</mtext>"
    base = f"<mi>{escape(_GREEK.get(head, head))}</mi>"
    return f"<msub>{base}<mtext>{escape(tail)}</mtext></msub>" if tail else base


def _write(e: ast.Expr, outer: int) -> str:
    text, level = _expr(e)
    return f"<mrow><mo>(</mo>{text}<mo>)</mo></mrow>" if level < outer else f"<mrow>{text}</mrow>"


def _list(items: tuple[ast.Expr, ...]) -> str:
    return "<mo>,</mo>".join(_write(a, _CHOICE) for a in items)


def _expr(e: ast.Expr) -> tuple[str, int]:
    match e:
        case ast.Number():
            return f"<mn>{escape(e.text)}</mn>", _ATOM
        case ast.Name():
            return _name(e.id), _ATOM
        case ast.Index():
            return f"{_name(e.id)}<mo>(</mo><mi>{escape(e.axis)}</mi><mo>)</mo>", _ATOM
        case ast.Call():
            return _call(e)
        case ast.Unary(op="not"):
            return f"<mo>¬</mo>{_write(e.arg, _NOT)}", _NOT
        case ast.Unary():
            return f"<mo>−</mo>{_write(e.arg, _SIGN)}", _SIGN
        case ast.Binary(op="div"):
            return f"<mfrac>{_write(e.left, _CHOICE)}{_write(e.right, _CHOICE)}</mfrac>", _ATOM
        case ast.Binary(op="pow"):
            return f"<msup>{_write(e.left, _ATOM)}{_write(e.right, _CHOICE)}</msup>", _POWER
        case ast.Binary():
            level = _PRODUCT if e.op == "mul" else _SUM
            sign = {"add": "<mo>+</mo>", "sub": "<mo>−</mo>", "mul": "<mspace width='0.2em'/>"}[e.op]
            return f"{_write(e.left, level)}{sign}{_write(e.right, level + 1)}", level
        case ast.Compare():
            parts = [_write(e.operands[0], _SUM)]
            for op, x in zip(e.ops, e.operands[1:], strict=True):
                parts += [f"<mo>{escape(_SIGNS.get(op, op))}</mo>", _write(x, _SUM)]
            return "".join(parts), _COMPARE
        case ast.Between():
            ends = "[" if e.low_closed else "(", "]" if e.high_closed else ")"
            body = f"<mo>{ends[0]}</mo>{_list((e.low, e.high))}<mo>{ends[1]}</mo>"
            return f"{_write(e.arg, _SUM)}<mo>∈</mo>{body}", _COMPARE
        case ast.Logic():
            level = _AND if e.op == "and" else _OR
            sign = f"<mspace width='0.3em'/><mtext>{e.op}</mtext><mspace width='0.3em'/>"
            return sign.join(_write(a, level + 1) for a in e.args), level
        case ast.Indicator():
            return f"<mn>𝟏</mn><mo>[</mo>{_write(e.cond, _CHOICE)}<mo>]</mo>", _ATOM
        case ast.Conditional():
            rows = f"<mtr><mtd>{_write(e.then, _OR)}</mtd><mtd><mtext>if</mtext><mspace width='0.3em'/>{_write(e.cond, _OR)}</mtd></mtr>"
            rows += f"<mtr><mtd>{_write(e.other, _CHOICE)}</mtd><mtd><mtext>else</mtext></mtd></mtr>"
            return f"<mrow><mo>{{</mo><mtable columnalign='left'>{rows}</mtable></mrow>", _CHOICE
    raise TypeError(type(e).__name__)


def _call(e: ast.Call) -> tuple[str, int]:
    kind, _, suffix = e.func.rpartition("_")
    if e.func == "abs":
        return f"<mo>|</mo>{_write(e.args[0], _CHOICE)}<mo>|</mo>", _ATOM
    if e.func == "sqrt":
        return f"<msqrt>{_write(e.args[0], _CHOICE)}</msqrt>", _ATOM
    if kind in ("sum", "prod") and suffix in _OVER:
        sign = "∑" if kind == "sum" else "∏"
        return f"<munder><mo>{sign}</mo><mtext>{_OVER[suffix]}</mtext></munder>{_write(e.args[0], _PRODUCT)}", _PRODUCT
    if suffix in _OVER and kind in (*ir.REDUCTIONS, "geomean", "all"):
        head = f"<munder><mi>{escape(kind)}</mi><mtext>{_OVER[suffix]}</mtext></munder>"
    elif e.func == "log" and isinstance(e.args[0], ast.Name | ast.Index):
        return f"<mi>log</mi><mspace width='0.15em'/>{_write(e.args[0], _ATOM)}", _PRODUCT
    else:
        head = f"<mi>{escape(e.func)}</mi>" if "_" not in e.func else f"<mtext>{escape(e.func)}</mtext>"
    return f"{head}<mo>(</mo>{_list(e.args)}<mo>)</mo>", _ATOM
