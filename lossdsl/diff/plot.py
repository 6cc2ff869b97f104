"""Two weights as a picture: curves where one quantity decides, maps where two do. matplotlib is an optional extra."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Diagnostic, SpecError
from ..reference import Array
from .paper import SIGNS, Axis, Paper, Stretch, paper, stretches
from .report import Diff
from .words import number_text, sign_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
WIDTH = 3.4  # inches: one column of a two-column paper
POINTS = 601  # of a curve
GRID = 161  # of a map, each way
SHOWN = 3000  # tokens drawn on a map
# Told apart in grey by line style and hatching, not only by colour (Okabe and Ito's, safe for the colour-blind).
LINES = ({"color": "#0072B2", "ls": "-"}, {"color": "#D55E00", "ls": (0, (4, 1.5))})
HATCHES = ("////", "\\\\\\\\")
STYLE: dict[Any, Any] = {
    "font.size": 7, "axes.titlesize": 7, "axes.labelsize": 7, "xtick.labelsize": 6, "ytick.labelsize": 6,
    "legend.fontsize": 6.5, "axes.linewidth": 0.5, "xtick.major.width": 0.5, "ytick.major.width": 0.5,
    "xtick.major.size": 2, "ytick.major.size": 2, "xtick.minor.size": 1, "hatch.linewidth": 0.4, "lines.linewidth": 1.2,
    "font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans", "svg.hashsalt": "lossdsl", "svg.fonttype": "path",
    "pdf.fonttype": 42, "axes.unicode_minus": True, "figure.dpi": 100, "savefig.dpi": 300,
}  # fmt: skip
_NO_DATE: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def plot(diff: Diff, path: Path | str) -> None:
    """Write the picture of a diff as .png, .svg or .pdf; the same diff gives the same bytes.

    Curves of W against the quantity that both weights read, A > 0 above A < 0, with what is masked or capped below each;
    or, where they read two, maps of both weights and of their difference. The live tokens of the rollouts that were
    measured on are drawn where they lie.

    Raises:
        SpecError: E0606, if matplotlib is not installed or the file's ending is not one of the three.
    """
    kind = format_of(Path(path))
    save(figure(diff), Path(path), kind)


def format_of(path: Path) -> str:
    """The format that a file's ending asks for.

    Raises:
        SpecError: E0606, if it is none of the three.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        help = f"name it {path.stem or 'diff'}.png, .svg or .pdf"
        raise SpecError((Diagnostic("E0606", f"{path.name}: a picture is a .png, .svg or .pdf file", None, help),))
    return kind


def save(made: Figure, path: Path, kind: str) -> None:
    """Write a figure without dates or versions."""
    with style():
        made.savefig(path, format=kind, metadata=_NO_DATE[kind])


@contextmanager
def style() -> Iterator[None]:
    """Our settings on matplotlib's own defaults, whatever the user's are."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that draws without a screen.

    Raises:
        SpecError: E0606, if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        help = "pip install 'lossdsl[plot]'"
        raise SpecError(
            (Diagnostic("E0606", "pictures need matplotlib, which is not installed", None, help),)
        ) from None
    return Figure(figsize=(width, height))


def figure(diff: Diff) -> Figure:
    """The picture of a diff, not yet written."""
    made = new_figure(WIDTH, 1)  # before anything else: it says so where matplotlib is missing
    on = paper(diff)
    tokens = None if diff.rollouts is None else on.tokens(diff, diff.rollouts)
    with style():
        if len(on.axes) == 1:
            _curves(made, diff, on, tokens)
        else:
            _maps(made, diff, on, tokens)
    return made


# --- axes -----------------------------------------------------------------------------------------------------------

# Ratios and probabilities as the papers write them; other quantities keep the language's spelling.
_SYMBOLS = {
    "r": r"$r=\pi_\theta/\pi_{\mathrm{prox}}$", "c": r"$c=\pi_{\mathrm{prox}}/\mu$", "rho": r"$\rho=\pi_\theta/\mu$",
    "pi": r"$\pi_\theta(y)$", "mu": r"$\mu(y)$", "prox": r"$\pi_{\mathrm{prox}}(y)$", "ref": r"$\pi_{\mathrm{ref}}(y)$",
}  # fmt: skip
_NICE = (1, 2, 5, 1.5, 3, 7)  # times powers of ten: ticks of a log axis, the first ones preferred


Tokens = tuple[list[Array], Array]  # of the live tokens: their place on each axis, the sign of A


@dataclass(frozen=True)
class Scale:
    """An axis with its length in inches."""

    axis: Axis
    size: float

    @property
    def label(self) -> str:
        return _SYMBOLS.get(self.axis.label, _fit(self.axis.label, 2.2))

    def inches(self, low: float, high: float) -> float:
        ends = self.axis.t(np.array(self.axis.range))
        return float((self.axis.t(high) - self.axis.t(low)) / (ends[1] - ends[0])) * self.size

    def nice(self) -> list[float]:
        """Round numbers for ticks, the roundest first."""
        from matplotlib.ticker import MaxNLocator

        low, high = self.axis.range
        if self.axis.is_log and high / low > 3:
            found = [n * 10.0**k for n in _NICE for k in (0, -1, 1, -2, 2, -3, 3)]
        else:
            found = [float(x) for x in MaxNLocator(4).tick_values(low, high)]
        return [x for x in found if low * (1 - 1e-9) <= x <= high * (1 + 1e-9)]

    def edges(self) -> list[float]:
        low, high = self.axis.range
        return [e for e in self.axis.edges if low < e < high]

    def ticks(self, values: Sequence[float], room: float) -> list[float]:
        """Those values that keep `room` inches from each other and half of it from the ends, the first ones preferred."""
        kept: list[float] = []
        low, high = self.axis.range
        for x in values:
            inside = x in self.axis.edges or min(self.inches(low, x), self.inches(x, high)) > 0.4 * room
            if inside and all(abs(self.inches(x, y)) >= room for y in kept):
                kept.append(x)
        return sorted(kept)


def _ticks(axis: Any, scale: Scale, values: Sequence[float]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_ticks([float(scale.axis.t(x)) for x in values], [f"{x:.6g}" for x in values])
    axis.set_minor_locator(NullLocator())


def _width(text: str, points: float) -> float:
    """About how wide a text is, in inches."""
    return len(text) * points * 0.6 / 72


# --- curves ---------------------------------------------------------------------------------------------------------


def _curves(made: Figure, diff: Diff, on: Paper, tokens: Tokens | None) -> None:
    left, right = 0.12, 0.97
    scale = Scale(on.axes[0], WIDTH * (right - left))
    labels = _levels(scale)
    head = 0.3 + 0.12 * (1 + max(labels.values(), default=0))  # inches, for the legend and the numbers of the edges
    height = 3.45 + head
    made.set_size_inches(WIDTH, height)
    rows = made.add_gridspec(
        4, 1, height_ratios=(5, 1.1, 5, 1.1), hspace=0.1, left=left, right=right, top=1 - head / height, bottom=0.1
    )
    grid = scale.axis.grid(POINTS)
    weights = {(side, sign): on.weight(side, sign, grid) for side in (0, 1) for sign in SIGNS}
    top = max(float(w.max()) for w in weights.values()) or 1.0
    bottom = min(0.0, *(float(w.min()) for w in weights.values()))
    bottom, top = bottom - 0.05 * (top - bottom), top + 0.1 * (top - bottom)
    panels = []
    for row, sign in enumerate(SIGNS):
        curve, strip = made.add_subplot(rows[2 * row]), made.add_subplot(rows[2 * row + 1])
        panels.append(curve)
        pieces = [list(stretches(on, side, sign)) for side in (0, 1)]
        for side, s in enumerate((diff.a, diff.b)):
            w = weights[side, sign]
            curve.plot(scale.axis.t(grid), w, label=f"{'ab'[side]}: {s.label}", zorder=3 + side, **LINES[side])
            _strip(strip, side, pieces[side], scale)
        curve.set_ylim(bottom, top)
        curve.set_ylabel("W", rotation=0, labelpad=6)
        curve.text(0.015, 0.95, sign_text(sign), transform=curve.transAxes, va="top", fontweight="bold")
        if tokens is not None:
            _density(curve, tokens[0][0][tokens[1] == sign], scale)
        strip.set_ylim(2, 0)
        strip.set_yticks([0.5, 1.5], ["a", "b"])
        strip.tick_params(axis="y", length=0)
        for ax in (curve, strip):
            ax.set_xlim(*scale.axis.t(np.array(scale.axis.range)))
            _ticks(ax.xaxis, scale, scale.ticks(scale.nice(), 0.3))
            ax.tick_params(labelbottom=ax is strip and row == 1)
            for edge in scale.edges():
                ax.axvline(float(scale.axis.t(edge)), color="0.55", lw=0.5, ls=":", zorder=1)
    strip.set_xlabel(scale.label)
    for edge, level in labels.items():
        panels[0].annotate(
            f"{edge:.6g}", (float(scale.axis.t(edge)), 1), (0, 2 + 8 * level), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", va="bottom", fontsize=6.5,
        )  # fmt: skip
    made.legend(
        *panels[0].get_legend_handles_labels(), loc="upper left", ncols=2, bbox_to_anchor=(left - 0.01, 1.0),
        frameon=False, borderpad=0.3, handlelength=2.6,
    )  # fmt: skip


def _levels(scale: Scale) -> dict[float, int]:
    """Edge -> the line that its number stands on above the panel: 0, or higher where it would meet another."""
    found: dict[float, int] = {}
    for edge in scale.edges():
        near = {
            level
            for other, level in found.items()
            if abs(scale.inches(other, edge)) < (_width(f"{edge:.6g}", 6.5) + _width(f"{other:.6g}", 6.5)) / 2 + 0.04
        }
        found[edge] = next(level for level in range(len(near) + 1) if level not in near)
    return found


def _strip(ax: Axes, side: int, pieces: Sequence[Stretch], scale: Scale) -> None:
    """One method's row below the curves: what is masked is hatched, what is capped dotted, what counts stays white."""
    from matplotlib.patches import Rectangle

    for piece in pieces:
        masked = piece.kind == "masked"
        low, high = (float(scale.axis.t(x)) for x in (piece.low, piece.high))
        look: dict[str, Any] = {"fc": "0.8", "hatch": HATCHES[side]} if masked else {"fc": "0.96", "hatch": "...."}
        ax.add_patch(Rectangle((low, side), high - low, 1, lw=0.4, ec="0.4", zorder=2, **look))
        words = (piece.kind if masked else f"{piece.kind} at {number_text(piece.weight)}", piece.kind)
        fitting = [word for word in words if _width(word, 5.5) + 0.06 < scale.inches(piece.low, piece.high)]
        if fitting:
            middle = (low + high) / 2
            box = {"fc": "white", "ec": "none", "pad": 0.5}
            ax.text(middle, side + 0.53, fitting[0], ha="center", va="center", fontsize=5.5, bbox=box, zorder=3)


def _density(ax: Axes, values: Array, scale: Scale) -> None:
    """Where the live tokens of this sign lie, as a histogram along the floor of the panel."""
    ends = scale.axis.t(np.array(scale.axis.range))
    counts, borders = np.histogram(scale.axis.t(values), bins=60, range=(float(ends[0]), float(ends[1])))
    heights = 0.25 * counts / max(int(counts.max()), 1)
    ax.fill_between(
        borders, np.append(heights, 0), step="post", transform=ax.get_xaxis_transform(), color="0.87", lw=0, zorder=0
    )
    inside = counts.sum() / max(len(values), 1)
    note = f"{len(values)} tokens" + (f", {inside:.0%} here" if inside < 0.995 else "")
    ax.text(0.985, 0.95, note, transform=ax.transAxes, ha="right", va="top", fontsize=5.5, color="0.4")


# --- maps -----------------------------------------------------------------------------------------------------------


def _maps(made: Figure, diff: Diff, on: Paper, tokens: Tokens | None) -> None:
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    made.set_size_inches(WIDTH, 2.95)
    x, y = (Scale(a, 0.9) for a in on.axes)
    rows = y.ticks([*y.edges(), *y.nice()], 0.11)
    left, right, top, bottom = (0.24 + max(_width(f"{t:.6g}", 6) for t in rows)) / WIDTH, 0.99, 0.94, 0.27
    boxes = made.add_gridspec(2, 3, hspace=0.1, wspace=0.1, left=left, right=right, top=top, bottom=bottom)
    across, up = np.meshgrid(x.axis.grid(GRID), y.axis.grid(GRID))
    W = {
        (side, sign): on.weight(side, sign, across.ravel(), up.ravel()).reshape(GRID, GRID)
        for side in (0, 1)
        for sign in SIGNS
    }
    everything = np.concatenate([w.ravel() for w in W.values()])
    highest, lowest = _most(everything), min(0.0, float(np.quantile(everything, 0.02)))
    gaps = np.concatenate([np.abs(W[0, sign] - W[1, sign]).ravel() for sign in SIGNS])
    widest = _most(gaps)
    extent = (*x.axis.t(np.array(x.axis.range)), *y.axis.t(np.array(y.axis.range)))
    images: list[Any] = []
    for row, sign in enumerate(SIGNS):
        shown = (W[0, sign], W[1, sign], W[0, sign] - W[1, sign])
        for column, w in enumerate(shown):
            ax = made.add_subplot(boxes[row, column])
            if column == 2:
                look: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -widest, "vmax": widest}
            else:  # a weight is a ratio: what lies between 0 and 1 matters as much as what lies above
                look = {"cmap": "YlGnBu", "norm": PowerNorm(0.5 if lowest == 0 else 1.0, lowest, highest)}
            images.append(ax.imshow(w, origin="lower", extent=extent, aspect="auto", interpolation="nearest", **look))
            if column < 2:
                _hatch(ax, w == 0, extent, HATCHES[column])
            else:
                _signs(ax, w, extent, 0.02 * widest)
            if tokens is not None:
                _dots(ax, tokens, sign, x, y, extent)
            for scale, axis, line in ((x, ax.xaxis, ax.axvline), (y, ax.yaxis, ax.axhline)):
                for edge in scale.edges():
                    line(float(scale.axis.t(edge)), color="0.3", lw=0.4, ls=":")
                _ticks(axis, scale, rows if scale is y else x.ticks([*x.edges(), *x.nice()], 0.24))
            ax.set_xlim(extent[:2])
            ax.set_ylim(extent[2:])
            ax.tick_params(labelbottom=row == 1, labelleft=column == 0)
            if row == 0:
                names = [_fit(s.label, 0.93) for s in (diff.a, diff.b)]
                ax.set_title([f"$W$ {names[0]}", f"$W$ {names[1]}", "difference"][column], pad=3)
            if row == 1:
                ax.set_xlabel(x.label if column == 1 else "", labelpad=1)
            if column == 0:
                ax.text(0.05, 0.95, sign_text(sign), transform=ax.transAxes, va="top", fontsize=6, fontweight="bold",
                        bbox={"fc": "white", "ec": "none", "pad": 0.8})  # fmt: skip
    for image, place, most, limit in (
        (images[0], (left, 0.1, 0.66 - left, 0.022), everything.max(), highest),
        (images[2], (right - 0.255, 0.1, 0.255, 0.022), gaps.max(), widest),
    ):
        beyond = "neither" if most <= limit * (1 + 1e-9) else "max" if image is images[0] else "both"
        bar = made.colorbar(image, cax=made.add_axes(place), orientation="horizontal", extend=beyond)
        bar.ax.tick_params(pad=1)
        bar.ax.xaxis.set_major_locator(MaxNLocator(5 if image is images[0] else 3))
        bar.ax.minorticks_off()
    made.text(0.01, (top + bottom) / 2, y.label, rotation=90, va="center", fontsize=7)
    rest = ", ".join(f"{c.label} = {number_text(c.start)}" for c in on.resting)
    made.text(left, 0.005, "hatched: masked" + (f"; {rest}" if rest else ""), fontsize=6, va="bottom")
    made.text(0.99, 0.005, "left − middle, + − its sign", fontsize=6, va="bottom", ha="right")


def _most(values: Array) -> float:
    """The largest value that a scale must show: all but the outermost fiftieth of what is not 0."""
    there = values[values != 0]
    return max(float(np.quantile(there, 0.98)), 1e-9) if len(there) else 1.0


def _fit(text: str, inches: float) -> str:
    most = int(inches / _width("x", 7)) - 2
    return text if len(text) <= most else text[: most - 1] + "…"


def _hatch(ax: Axes, masked: Array, extent: tuple[float, ...], hatch: str) -> None:
    if masked.any():
        ax.contourf(masked, levels=[0.5, 1.5], colors="none", hatches=[hatch], extent=extent, origin="lower")


def _signs(ax: Axes, gap: Array, extent: tuple[float, ...], least: float) -> None:
    """The sign of the difference on a coarse grid: readable without colours."""
    at = np.arange(GRID // 14, GRID, GRID // 7)
    xs, ys = np.linspace(extent[0], extent[1], GRID), np.linspace(extent[2], extent[3], GRID)
    for i in at:
        for j in at:
            if abs(gap[i, j]) > least:
                ax.text(
                    xs[j], ys[i], "+" if gap[i, j] > 0 else "−", ha="center", va="center", fontsize=4.5, color="0.15"
                )


def _dots(ax: Axes, tokens: Tokens, sign: int, x: Scale, y: Scale, extent: tuple[float, ...]) -> None:
    (across, up), signs = tokens
    mine = signs == sign
    points = np.stack([x.axis.t(across[mine]), y.axis.t(up[mine])])
    points = points[:, :: max(1, points.shape[1] // SHOWN)]
    ax.scatter(points[0], points[1], s=1, c="black", edgecolors="white", linewidths=0.15, zorder=5)
