"""Errors for people: a code, a place in the file with a caret under it, one line that says what is wrong, one that helps."""

from __future__ import annotations

import difflib
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .specdoc import Text

WIDTH = 100  # columns of a source line shown around the caret


@dataclass(frozen=True)
class Source:
    """A text and the name it goes by in messages."""

    name: str
    text: str

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        starts.extend(i + 1 for i, c in enumerate(self.text) if c == "\n")
        return starts

    def line_col(self, offset: int) -> tuple[int, int]:
        """1-based line and column of an offset."""
        line = bisect_right(self._starts, min(offset, len(self.text)))
        return line, offset - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        start = self._starts[number - 1]
        end = self.text.find("\n", start)
        return self.text[start : len(self.text) if end < 0 else end].rstrip("\r")


@dataclass(frozen=True)
class Span:
    """A place in a source: offsets [start, end)."""

    source: Source
    start: int
    end: int


@dataclass(frozen=True)
class Diagnostic:
    """One finding. `message` stands alone in one line; `help` says what to write instead."""

    code: str
    message: str
    span: Span | None
    help: str = ""
    notes: tuple[str, ...] = ()
    severity: str = "error"

    @property
    def place(self) -> tuple[str, int, int]:
        """(file, line, column), for sorting and for programs; line and column are 0 where there is none."""
        if self.span is None:
            return ("", 0, 0)
        return (self.span.source.name, *self.span.source.line_col(self.span.start))

    def json(self) -> dict[str, object]:
        file, line, column = self.place
        return {"code": self.code, "severity": self.severity, "message": self.message, "help": self.help, "notes": list(self.notes),
                "file": file, "line": line, "column": column}  # fmt: skip


class SpecError(Exception):
    """A spec, or a request about one, that cannot be carried out: all diagnostics of the stage that found them."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(sorted(diagnostics, key=lambda d: (d.place, d.code, d.message)))
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return render(self.diagnostics)


def place(text: Text, start: int, end: int) -> Span:
    """The span in the file of characters [start, end) of a scalar's value."""
    chars = text.chars
    first = chars[min(start, len(chars) - 1)]
    last = chars[min(max(end - 1, start), len(chars) - 1)] + 1
    return Span(text.span.source, first, max(last, first + 1))


def suggest(name: str, candidates: Iterable[str]) -> str:
    """`did you mean ...?` for the nearest candidate, or nothing."""
    near = difflib.get_close_matches(name, sorted(candidates), 1, 0.6)
    return f"did you mean `{near[0]}`?" if near else ""


def render(diagnostics: Iterable[Diagnostic], colour: bool = False) -> str:
    """All diagnostics as text, in the order of their places."""
    ordered = sorted(diagnostics, key=lambda d: (d.place, d.code, d.message))
    return "\n".join(_render(d, colour) for d in ordered)


def _render(d: Diagnostic, colour: bool) -> str:
    paint = (lambda text, code: f"\x1b[{code}m{text}\x1b[0m") if colour else (lambda text, code: text)
    file, line, column = d.place
    head = f"{file}:{line}:{column}: " if d.span is not None else ""
    tint = "31;1" if d.severity == "error" else "33;1"
    lines = [f"{head}{paint(f'{d.severity}[{d.code}]', tint)}: {d.message}"]
    help = d.help
    if d.span is not None:
        shown, before, width = _window(d.span, line, column)
        margin = f"{line:>4}"
        lines.append(f"{margin} | {shown}")
        lines.append(f"     | {' ' * before}{paint('^' * width, tint)}{f' {help}' if help else ''}")
        help = ""
    if help:
        lines.append(f"     = {help}")
    lines += [f"     = {note}" for note in d.notes]
    return "\n".join(lines)


def _window(span: Span, line: int, column: int) -> tuple[str, int, int]:
    """The source line, cut around the span if long; the columns before the caret; the caret's width."""
    text = span.source.line(line)
    start = column - 1
    end = min(start + max(span.end - span.start, 1), max(len(text), start + 1))
    cut = max(0, start - WIDTH // 3) if len(text) > WIDTH else 0
    shown = text[cut : cut + WIDTH]
    lead = "..." if cut else ""
    tail = "..." if cut + WIDTH < len(text) else ""
    clean = "".join(" " if c == "\t" else c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    before = len(lead) + _columns(text[cut:start])
    width = max(1, _columns(text[start : min(end, cut + WIDTH)]))
    return lead + clean + tail, before, width


def _columns(text: str) -> int:
    """Terminal columns: East Asian wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


# --- the page of each code -------------------------------------------------------------------------------------------


def codes() -> tuple[str, ...]:
    """All diagnostic codes."""
    return tuple(sorted(path.stem for path in _pages().glob("*.md")))


def explain(code: str) -> str:
    """The page of a code: what it means, why it is an error, a bad and a good spec.

    Raises:
        SpecError: E0603, there is no such code.
    """
    path = _pages() / f"{code.upper()}.md"
    if not code.isalnum() or not path.is_file():
        raise SpecError(
            (
                Diagnostic(
                    "E0603",
                    f"there is no code `{code}`",
                    None,
                    suggest(code.upper(), codes()) or "codes look like E0401",
                ),
            )
        )
    return path.read_text(encoding="utf-8")


def _pages() -> Path:
    return Path(__file__).parent / "codes"
