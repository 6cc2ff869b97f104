"""One self-contained HTML page of a diff: the same content, formulas typeset, the curves alive.

Everything that comes from a spec is text to the page, never markup: it passes through `escape` or through JSON in which
`<` cannot occur. The page loads nothing.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from ..ir import leaves
from .javascript import functions
from .mathml import formulas
from .naming import spell
from .report import Diff
from .side import Side
from .text import measured_rows, property_rows, verdict_text
from .view import SIDES, Coordinate, View, view
from .words import number_text, region_text, sample_text, sign_text, weight_text

SPAN = math.log(10)  # how far a ratio is drawn to either side of 1 where nothing is tested


def page(diff: Diff) -> str:
    """The whole page."""
    a, b = (escape(side.label) for side in (diff.a, diff.b))
    verdict = [f"<p class='verdict {'equal' if diff.equal else 'differ'}'>{escape(verdict_text(diff))}</p>"]
    verdict += [f"<p class='note'>{escape(note)}</p>" for note in diff.notes]
    body = [
        "<h2>Formulas</h2>",
        f"<div class='pair'>{_formulas(diff.a, 'a')}{_formulas(diff.b, 'b')}</div>",
        table("Knobs that differ", ("", diff.a.label, diff.b.label), [(k.name, k.a, k.b) for k in diff.knobs]),
        _cases(diff),
        table("Properties", ("", diff.a.label, diff.b.label), property_rows(diff)),
    ]
    if diff.measured is not None:
        body.append(f"<h2>On rollouts</h2><p class='note'>{escape(diff.measured.source)}</p>")
        body += [table("", header, rows) for header, rows in measured_rows(diff, diff.measured)]
        body += [f"<p class='note'>{escape(note)}</p>" for note in diff.measured.notes]
    script = _script(diff, view((diff.a, diff.b)))
    main = fill("page.html", a=a, b=b, verdict="\n".join(verdict), body="\n".join(body))
    return document(f"{a} | {b}", main, script)


def document(title: str, main: str, script: str) -> str:
    """A page with its style and script inside, and a policy that allows these two texts and nothing else."""
    style = file("page.css")
    hashes = {"style_hash": _hash(f"\n{style}"), "script_hash": _hash(f"\n{script}")}
    return fill("document.html", title=title, main=main, style=style, script=script, **hashes)


def fill(template: str, **markup: str) -> str:
    return Template(file(template)).substitute(**markup)


def _hash(text: str) -> str:
    """What the page's policy allows: this very text, and nothing that came with a spec."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def file(name: str) -> str:
    """One of the page's sources."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _formulas(side: Side, name: str) -> str:
    method = side.method
    rows = "".join(math_ for _, math_ in formulas(method))
    title = escape(method.title)
    return f"<section class='formulas'><h3 class='{name}'>{title}</h3>{rows}</section>"


def _cases(diff: Diff) -> str:
    header = ("A", "where", diff.a.label, diff.b.label, "at", "W", "W")
    rows = []
    for c in diff.cases:
        weights = [f"{weight_text(w)} ({action})" for w, action in zip(c.weights, c.actions, strict=True)]
        rows.append(
            (
                sign_text(c.sign)[2:],
                region_text(c) or "everywhere",
                *weights,
                sample_text(c),
                *map(number_text, c.values),
            )
        )
    return table("Cases", header, rows, [not c.same for c in diff.cases])


def table(title: str, header: tuple[str, ...], rows: Any, marked: list[bool] | None = None) -> str:
    """A table of texts under a heading; `marked` rows stand out."""
    if not rows:
        return ""
    head = "".join(f"<th scope='col'>{escape(h)}</th>" for h in header)
    body = "".join(
        f"<tr{' class=differ' if marked and marked[i] else ''}>"
        + "".join(f"<td>{escape(str(c))}</td>" for c in row)
        + "</tr>"
        for i, row in enumerate(rows)
    )
    heading = f"<h2>{escape(title)}</h2>" if title else ""
    return f"{heading}<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


# --- the live part ----------------------------------------------------------------------------------------------------------


def _script(diff: Diff, v: View) -> str:
    """The emitted functions, what they are drawn over, and the page's own script."""
    names = {
        f"{side}_{'pos' if sign > 0 else 'neg'}{suffix}": node
        for suffix, nodes in (("", v.weights), ("_plain", v.plain))
        for (side, sign), node in nodes.items()
    }
    coordinates = [_coordinate(c, diff) for c in v.coordinates]
    data = {
        "labels": dict(zip(SIDES, (diff.a.label, diff.b.label), strict=True)),
        "coordinates": coordinates,
        "axis": max(coordinates, key=lambda c: _gap(v, c), default={"key": ""})["key"],
        "parameters": {name: _parameters(side, name, v) for name, side in zip(SIDES, (diff.a, diff.b), strict=True)},
    }
    text = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c")
    code = functions(names).replace("</", "<\\/")
    return f"{code}\nconst W = {{ {', '.join(names)} }};\nconst DATA = {text};\n{file('page.js')}"


def _coordinate(c: Coordinate, diff: Diff) -> dict[str, Any]:
    """With how far it is drawn: three times as far from 1 as the farthest bound on it."""
    ends = [
        abs(math.log(end[0]))
        for case in diff.cases
        for quantity, i in case.where.items()
        if spell(quantity, 60) == c.label
        for end in (i.low, i.high)
        if end is not None and end[0] > 0
    ]
    span = 2.5 * max(ends, default=0.0) or SPAN
    return {"key": c.key, "label": c.label, "kind": c.kind, "logged": c.logged, "start": c.start, "span": span}


def _gap(v: View, c: dict[str, Any]) -> float:
    """How far the two weights come apart along one coordinate, the others at rest; ratios before all else."""
    if c["kind"] != "ratio":
        return -1.0
    along = np.exp(np.linspace(-c["span"], c["span"], 201))
    apart = [
        np.abs(v.values("a", sign, {c["key"]: along}) - v.values("b", sign, {c["key"]: along})) for sign in (1, -1)
    ]
    return float(np.max(np.concatenate([np.atleast_1d(x) for x in apart])))


def _parameters(side: Side, name: str, v: View) -> list[dict[str, Any]]:
    """The parameters that this side's weight reads, with a range for their sliders."""
    read = {str(n.attr) for (s, _), node in v.weights.items() if s == name for n in leaves(node) if n.op == "param"}
    found = []
    for p in side.method.params:
        key = f"{name}.{p.name.value}"
        if key in read:
            value = v.parameters[key]
            low = p.min.value if p.min else min(0.0, 2 * value)
            high = (
                p.max.value
                if p.max and math.isfinite(p.max.value)
                else max(2.5 * value, low + 1e-3)
                if value
                else low + 1.0
            )
            found.append({"key": key, "name": p.name.value, "value": value, "low": low, "high": high, "doc": p.doc})
    return found
