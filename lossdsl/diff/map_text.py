"""A map for the terminal: the classes, then the matrix of few methods or the nearest neighbour of each of many."""

from __future__ import annotations

import numpy as np

from .map import MATRIX, Map
from .text import Paint, painter, table


def map_text(m: Map, colour: bool = False) -> str:
    """The whole report."""
    paint = painter(colour)
    under = f" under {m.assumption}" if m.assumption else ""
    lines = [paint(f"Equal gradients for equal advantages{under}", "head")]
    for c in m.classes:
        lines.append(f"{' = '.join(c.names)}{'' if c.proved else '  (sampled, not proved)'}")
    if not m.classes:
        lines.append("no two of them")
    lines += ["", paint(f"Cosines of the gradients ({m.source})", "head")]
    lines += _matrix(m, paint) if len(m.names) <= MATRIX else _neighbours(m, paint)
    return "\n".join([*lines, *(f"note: {note}" for note in m.notes)])


def _matrix(m: Map, paint: Paint) -> list[str]:
    rows = [
        (name, *("-" if np.isnan(x) else f"{x:.3f}" for x in row)) for name, row in zip(m.names, m.cosines, strict=True)
    ]
    return table(("", *m.names), rows, paint)


def _neighbours(m: Map, paint: Paint) -> list[str]:
    lines = []
    for heading, names in m.groups:
        rows = []
        for name in names:
            near = m.nearest(name)
            rows.append((name, *(("-", "-") if near is None else (near[0], f"{near[1]:.3f}"))))
        lines += ["", heading, *table(("method", "nearest that differs", "cosine"), rows, paint)]
    return lines[1:]
