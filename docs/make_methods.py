"""Writes methods.md from the specs: run it after adding one (`make docs`); a test holds that it is current."""

from __future__ import annotations

from pathlib import Path

import lossdsl
from lossdsl.text import infix

PAGE = Path(__file__).parent / "methods.md"


def page() -> str:
    """Every built-in: its weights, normaliser, source, and the choices made where sources disagree."""
    lines = [
        "# The built-in methods",
        "",
        "Written by `docs/make_methods.py` from the specs. `lossdsl show NAME` has more. *The review* is the post",
        '"From REINFORCE to one master equation, grouping policy-gradient methods by the ratio each one controls", whose',
        "objectives, gradients and table the first five groups follow.",
    ]
    for heading, names in lossdsl.groups():
        lines += ["", f"## {heading}"]
        for name in names:
            lines += ["", *entry(lossdsl.load(name))]
    return "\n".join(lines) + "\n"


def entry(method: lossdsl.Method) -> list[str]:
    doc, row = method.doc, lossdsl.describe(method)
    cite = ", ".join(x for x in (doc.cite.paper, doc.cite.where) if x) if doc.cite else ""
    lines = [f"### {method.title} · `{method.name}`", ""]
    if cite:
        lines += [f"{cite}. {row.level.capitalize()} level, {row.treatment}.", ""]
    weights = [f"T = {doc.T.value}"] if doc.T else []
    weights += [f"f = {doc.f.value}"] if doc.f else []
    weights += [f"kappa = {doc.kappa.value}"] if doc.kappa else []
    weights += [f"{d.signature.value} = {d.body.value}" for d in doc.where]
    weights += [f"term {t.name.value if t.name else ''}: {t.add.value}" for t in doc.terms]
    weights.append(f"lambda = {infix(method.normaliser)}")
    lines += [f"    {line}" for line in weights]
    shown = [f"{p.name.value} = {'required' if p.default is None else f'{p.default.value:g}'}" for p in doc.params]
    if shown:
        lines += ["", f"Parameters: {', '.join(shown)}."]
    if doc.note:
        lines += ["", " ".join(doc.note.split())]
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8", newline="\n")
