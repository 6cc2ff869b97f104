"""A map as one self-contained HTML page: the classes, a heat map of the cosines, a table that can be sorted."""

from __future__ import annotations

import json
from html import escape

import numpy as np

from .map import Map
from .page import document, file, fill, table


def map_page(m: Map) -> str:
    """The whole page."""
    under = f" under {m.assumption}" if m.assumption else ""
    classes = [(" = ".join(c.names), "proved" if c.proved else "sampled, not proved") for c in m.classes]
    data = {
        "names": m.names,
        "groups": [[heading, len(names)] for heading, names in m.groups],
        "cosines": [[None if np.isnan(x) else round(float(x), 4) for x in row] for row in m.cosines],
        "classes": [c.names for c in m.classes],
    }
    script = f"const DATA = {json.dumps(data).replace('<', chr(92) + 'u003c')};\n{file('map.js')}"
    title = escape(f"{len(m.names)} methods{under}")
    none = "<p>No two of them have equal gradients for equal advantages.</p>"
    main = fill(
        "map.html",
        title=title,
        notes="\n".join(f"<p class='note'>{escape(note)}</p>" for note in m.notes),
        classes=table("Equal gradients for equal advantages", ("methods", ""), classes) or none,
        source=escape(m.source),
        table=table("", ("method", "group", "equal to", "nearest that differs", "cosine"), _rows(m)),
    )
    return document(title, main, script)


def _rows(m: Map) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for heading, names in m.groups:
        for name in names:
            own, near = m.class_of(name), m.nearest(name)
            equal = ", ".join(n for n in own.names if n != name) if own else "-"
            found.append((name, heading, equal, *(("-", "-") if near is None else (near[0], f"{near[1]:.4f}"))))
    return found
