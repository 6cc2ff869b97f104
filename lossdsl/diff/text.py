"""A diff for the terminal: verdict, knobs, cases; each part short enough to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import ir
from .knobs import normaliser_text
from .measure import Measured
from .naming import spell
from .report import Diff
from .words import number_text, region_text, sample_text, sign_text, weight_text

WIDTH = 46  # a cell longer than this is folded
SHOWN = 3  # tokens and answers of the measured part
ROWS = 24  # cases beyond this are counted, not shown

Paint = Callable[[str, str], str]
STYLES = {"head": "1", "equal": "32", "differ": "33"}


def verdict_text(diff: Diff) -> str:
    """The verdict in one line."""
    v, a, b = diff.verdict, diff.a.label, diff.b.label
    under = f" under {diff.a.assumption}" if diff.a.assumption.texts else ""
    proof = "proved" if v.proved else f"sampled, {v.points} points, not proved"
    also = f"; equal if {' or if '.join(v.also)}" if v.also else ""
    match v.kind:
        case "equal":
            return f"equal{under} ({proof})"
        case "factor":
            assert v.factor is not None
            return f"equal{under} up to a constant factor: {a} = {spell(v.factor)} times {b} ({proof})"
        case "bound":
            assert v.witness is not None
            at = ", ".join(f"{name} = {number_text(value)}" for name, value in v.witness.at)
            x, y = (number_text(g) for g in v.witness.gradients)
            return f"differ{under}, but only on a bound itself: at {at} the gradients are {x} and {y}{also}"
        case "data":
            parts = ", ".join(v.differing)
            return f"differ{under} only in the data side ({parts}): equal for equal advantages ({proof}){also}"
    first = diff.first
    if first is not None and "weight" in v.differing:
        what = " against ".join(weight_text(w) for w in first.weights)
        where = ", ".join(x for x in (sign_text(first.sign), region_text(first)) if x)
        rest = [part for part in v.differing if part != "weight"]
        more = f"; also in {', '.join(rest)}" if rest else ""
        return f"differ{under}, first where {where}: weight {what}{more}{also}"
    if v.differing == ("normaliser",):
        sides = " against ".join(normaliser_text(s.normaliser) for s in (diff.a, diff.b))
        return f"differ{under} only in the normaliser: {sides}{also}"
    return f"differ{under} in {', '.join(v.differing)}{also}"


def painter(colour: bool) -> Paint:
    """What puts a style on text; nothing where colour is off."""
    return lambda text, style: f"\x1b[{STYLES[style]}m{text}\x1b[0m" if colour else text


def as_text(diff: Diff, colour: bool = False) -> str:
    """The whole report."""
    paint = painter(colour)
    equal = diff.verdict.kind == "equal"
    lines = [
        paint(f"{diff.a.label}  |  {diff.b.label}", "head"),
        paint(verdict_text(diff), "equal" if equal else "differ"),
    ]
    lines += [f"note: {note}" for note in diff.notes]
    if diff.knobs:
        lines += ["", paint("Knobs that differ", "head")]
        rows = [(k.name, k.a, k.b) for k in diff.knobs]
        lines += table(("", diff.a.label, diff.b.label), rows, paint)
    if diff.cases and not equal:
        lines += ["", paint("Cases: the weight W of A · ∇log π(y)", "head"), *_cases(diff, paint), *_centring(diff)]
    if not equal:
        lines += ["", paint("Properties", "head"), *table(("", diff.a.label, diff.b.label), property_rows(diff), paint)]
    if diff.measured is not None:
        lines += ["", paint(f"On rollouts ({diff.measured.source})", "head"), *_measured(diff, diff.measured, paint)]
    return "\n".join(lines)


def property_rows(diff: Diff) -> list[tuple[str, str, str]]:
    """(name, of a, of b), the same or not."""
    a, b = diff.properties
    rows = [("trust region", a.trust_region, b.trust_region)]
    rows.append(("weight unbounded", "; ".join(a.unbounded) or "nowhere", "; ".join(b.unbounded) or "nowhere"))
    rows.append(("zero gradient", "; ".join(a.silent) or "nowhere", "; ".join(b.silent) or "nowhere"))
    rows.append(("drift", a.drift, b.drift))
    rows.append(("bias", a.bias, b.bias))
    rows.append(("needs", ", ".join(a.needs) or "nothing", ", ".join(b.needs) or "nothing"))
    rows.append(("passes over the logits", a.passes, b.passes))
    return rows


def measured_rows(diff: Diff, m: Measured) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """(header, rows) of each table of the measured part; empty tables are left out."""
    a, b = diff.a.label, diff.b.label
    spaces = [
        (
            s.name,
            "-" if s.cosine is None else f"{s.cosine:.4f}",
            "-" if s.norm_ratio is None else number_text(s.norm_ratio),
        )
        for s in m.spaces
    ]
    silenced = [
        (sign_text(s.sign), str(s.tokens), *(f"{x:.1%}" for x in (s.only_a, s.only_b, s.both)))
        for s in m.silenced
        if s.only_a or s.only_b or s.both
    ]
    names = {"W_a": f"W {a}", "W_b": f"W {b}"}
    found = [(f"answer {w.answer}, token {w.token}", w) for w in m.tokens[:SHOWN]]
    found += [(f"answer {w.answer}", w) for w in m.answers[:SHOWN]]
    most = [
        (name, f"{w.share:.1%}", ", ".join(f"{names.get(k, k)} = {number_text(v)}" for k, v in w.values.items()))
        for name, w in found
    ]
    tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [
        (("gradient of", "cosine", f"|{a}| / |{b}|"), [*spaces]),
        (("silenced", "tokens", f"by {a} alone", f"by {b} alone", "by both"), [*silenced]),
        (("most of the difference", "share", ""), [*most]),
    ]
    return [(header, rows) for header, rows in tables if rows]


def _measured(diff: Diff, m: Measured, paint: Paint) -> list[str]:
    lines = [f"note: {note}" for note in m.notes]
    for header, rows in measured_rows(diff, m):
        lines += [*([""] if lines else []), *table(header, rows, paint)]
    return lines


def _cases(diff: Diff, paint: Paint) -> list[str]:
    rows = [c for c in diff.cases if not c.same] if len(diff.cases) > ROWS else list(diff.cases)
    header = ("A", "where", diff.a.label, diff.b.label, "at", "W", "W", "")
    cells = []
    for c in rows[:ROWS]:
        weights = [f"{weight_text(w)}  {action}" for w, action in zip(c.weights, c.actions, strict=True)]
        mark = "same" if c.proved else "same (sampled)" if c.same else "differ"
        cells.append(
            (
                sign_text(c.sign)[2:],
                region_text(c) or "everywhere",
                *weights,
                sample_text(c),
                *map(number_text, c.values),
                mark,
            )
        )
    left = len(diff.cases) - len(cells)
    return [*table(header, cells, paint), *([f"and {left} more cases; --json has all"] if left else [])]


def _centring(diff: Diff) -> list[str]:
    """The part over the vocabulary, which no row of the table shows."""
    lines = []
    for side in (diff.a, diff.b):
        if side.kappa is not ir.ZERO:
            k = "" if side.kappa is ir.ONE else f"{spell(side.kappa)} · "
            lines.append(
                f"{side.label} also subtracts {k}Σ_v μ(v) · W_v · ∇log π(v): the same weight, averaged under the sampler"
            )
        if side.terms_entry is not ir.ZERO or side.terms_coef is not ir.ZERO:
            lines.append(f"{side.label} also adds {', '.join(side.terms)} (see the knobs)")
    return lines


def table(header: Sequence[str], rows: Sequence[Sequence[str]], paint: Paint) -> list[str]:
    """Aligned columns; long cells are folded at word ends."""
    folded = [[_fold(cell) for cell in row] for row in rows]
    widths = [max(len(header[i]), *(len(line) for row in folded for line in row[i]), 0) for i in range(len(header))]
    lines = ["  ".join(h.ljust(w) for h, w in zip(header, widths, strict=True)).rstrip()] if any(header) else []
    for original, row in zip(rows, folded, strict=True):
        for k in range(max(len(cell) for cell in row)):
            line = "  ".join((cell[k] if k < len(cell) else "").ljust(w) for cell, w in zip(row, widths, strict=True))
            lines.append(paint(line.rstrip(), "differ") if original[-1] == "differ" else line.rstrip())
    return lines


def _fold(cell: str) -> list[str]:
    lines = [""]
    for word in cell.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("  " + word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines
