"""A map as a picture: the cosines of all pairs, grouped by heading, equal ones marked."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .map import Map
from .plot import WIDTH, format_of, new_figure, save, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = 7.0  # inches: the width of a page's text
COLUMN_HOLDS = 16  # methods that a column's width can hold
WRITTEN = 8  # methods whose numbers fit into the squares


def plot_map(m: Map, path: Path | str) -> None:
    """Write the picture of a map as .png, .svg or .pdf; the same map gives the same bytes.

    Raises:
        SpecError: E0606, as for the picture of a diff.
    """
    kind = format_of(Path(path))
    save(map_figure(m), Path(path), kind)


def map_figure(m: Map) -> Figure:
    """The picture, not yet written. Dark is near 1; a dot marks equal gradients; crossed squares could not be measured."""
    n = len(m.names)
    made = new_figure(WIDTH, 1)  # before anything else: it says so where matplotlib is missing
    from matplotlib.colors import FuncNorm

    width = WIDTH if n <= COLUMN_HOLDS else PAGE
    letters = min(7.0, 0.8 * 72 * (width - 1.2) / n)
    margin = (0.1 + 0.6 * letters / 72 * max(map(len, m.names))) / width
    bar = 0.45  # inches below the squares
    side = 0.98 - margin
    height = width + bar
    made.set_size_inches(width, height)
    with style():
        ax = made.add_axes((margin, bar / height, side, side * width / height))
        known = np.ma.masked_invalid(m.cosines)
        low = float(min(0.0, known.min())) if known.count() else 0.0
        angle = FuncNorm((np.arcsin, np.sin), low, 1)  # equal steps of the angle: what is near 1 is told apart
        image = ax.imshow(known, cmap="YlGnBu", norm=angle, interpolation="nearest")
        for i in range(n):
            for j in range(n):
                if np.isnan(m.cosines[i, j]):
                    ax.plot(j, i, "x", color="0.6", ms=0.5 * letters, mew=0.4)
                elif n <= WRITTEN:
                    dark = m.cosines[i, j] > 0.75
                    ax.text(
                        j, i, f"{m.cosines[i, j]:.2f}", ha="center", va="center", color="w" if dark else "k", fontsize=6
                    )
                own = m.class_of(m.names[i])
                if i != j and own is not None and m.names[j] in own.names:
                    ax.plot(
                        j, i - (0.3 if n <= WRITTEN else 0), "o", color="white", mec="black", mew=0.3, ms=0.35 * letters
                    )
        for border in list(accumulate(len(names) for _, names in m.groups))[:-1]:
            ax.axhline(border - 0.5, color="white", lw=1.2)
            ax.axvline(border - 0.5, color="white", lw=1.2)
        ax.set_xticks(range(n), m.names, rotation=90, fontsize=letters)
        ax.set_yticks(range(n), m.names, fontsize=letters)
        ax.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0, pad=1.5)
        ax.spines[:].set_visible(False)
        colours = made.add_axes((margin, 0.24 / height, 0.4 * side, 0.08 / height))
        ticks = [x for x in (-1, -0.5, 0, 0.5, 0.8, 0.95, 1) if x >= low]
        made.colorbar(image, cax=colours, orientation="horizontal", ticks=ticks, format="%g")
        under = f", {m.assumption}" if m.assumption else ""
        made.text(0.99, 0.3 / height, f"cosine of the gradients{under}", ha="right", fontsize=6.5)
        made.text(0.99, 0.12 / height, "dot: equal for equal advantages", ha="right", fontsize=6.5)
    return made
