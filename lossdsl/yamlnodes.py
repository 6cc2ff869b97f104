"""YAML text -> a plain tree with places. The only room where yaml is used.

Nothing is ever constructed: every scalar stays text (so `3e-4`, `no` and `off` are what was written), and what could
surprise a reader or a machine is refused: anchors and aliases, tags, several documents, repeated keys, control and
bidirectional characters, great size or depth.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from .errors import Diagnostic, Source, Span, SpecError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 8
MAX_EVENTS = 5000


@dataclass(frozen=True)
class Scalar:
    """Text; chars[i] is the offset in the source of value[i], with one more entry for the end."""

    value: str
    span: Span
    chars: tuple[int, ...]


@dataclass(frozen=True)
class Mapping:
    entries: tuple[tuple[Scalar, Node], ...]
    span: Span


@dataclass(frozen=True)
class Sequence:
    items: tuple[Node, ...]
    span: Span


Node = Scalar | Mapping | Sequence


def read_source(path: Path) -> Source:
    """The text of a file.

    Raises:
        SpecError: E0101, the file is missing, a folder, too large or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(1024 * 1024 + 1)
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise _plain(
            "E0101",
            f"there is no file {path}",
            "`lossdsl new NAME` starts a spec; built-ins go by name: `lossdsl list`",
        ) from None
    except IsADirectoryError:
        raise _plain("E0101", f"{path} is a folder", "name a spec file in it") from None
    except UnicodeDecodeError as error:
        raise _plain("E0101", f"{path} is not UTF-8 text (byte {error.start})", "save the file as UTF-8") from None
    except OSError as error:
        raise _plain("E0101", f"{path} cannot be read: {(error.strerror or str(error)).lower()}", "") from None
    return Source(str(path), text)


def read_tree(source: Source) -> Mapping:
    """The tree of a spec's text.

    Raises:
        SpecError: E01xx, with everything found.
    """
    _check_text(source)
    errors: list[Diagnostic] = []
    events = _events(source)
    root = _Reader(source, events, errors).document()
    if errors:
        raise SpecError(errors)
    if not isinstance(root, Mapping):
        raise SpecError(
            (Diagnostic("E0106", "a spec is a mapping of keys to values", _at(source, 0), "start with `lossdsl: 1`"),)
        )
    return root


def _plain(code: str, message: str, help: str) -> SpecError:
    return SpecError((Diagnostic(code, message, None, help),))


def _at(source: Source, offset: int) -> Span:
    return Span(source, offset, offset + 1)


def _check_text(source: Source) -> None:
    size = len(source.text.encode("utf-8", "replace"))
    if size > MAX_BYTES:
        raise _plain(
            "E0102", f"{source.name} has {size} bytes; a spec has at most {MAX_BYTES}", "a method fits on a page"
        )
    for offset, char in enumerate(source.text):
        if char in "\n\r" or (char.isprintable() and not 0xD800 <= ord(char) <= 0xDFFF):
            continue
        what = (
            "a tab"
            if char == "\t"
            else f"the character U+{ord(char):04X} ({unicodedata.name(char, 'control').lower()})"
        )
        help = "indent with spaces" if char == "\t" else "remove it: it is invisible or changes what a reader sees"
        raise SpecError((Diagnostic("E0103", f"{what} is not allowed in a spec", _at(source, offset), help),))


# libyaml's parser where PyYAML was built with it (every wheel is): the same events, ten times faster.
_FAST: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _events(source: Source) -> list[yaml.Event]:
    """All parser events; refuses what a spec has no use for before any tree is built."""
    try:
        return list(_checked(source, yaml.parse(source.text, Loader=_FAST)))
    except yaml.YAMLError:
        pass
    try:  # the Python parser's words and marks, which are the same on every machine
        return list(_checked(source, yaml.parse(source.text, Loader=yaml.SafeLoader)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        offset = min(mark.index, max(len(source.text) - 1, 0)) if mark else 0
        found = Diagnostic("E0105", f"not YAML: {_one_line(error)}", _at(source, offset), _yaml_help(error))
    except yaml.YAMLError as error:
        found = Diagnostic("E0105", f"not YAML: {' '.join(str(error).split())[:120]}", _at(source, 0), "")
    raise SpecError((found,))


def _checked(source: Source, events: Iterable[yaml.Event]) -> Iterator[yaml.Event]:
    depth = documents = 0
    for number, event in enumerate(events):
        start, end = _marks(event)
        where = Span(source, start, max(end, start + 1))
        tag = getattr(event, "tag", None)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        refused = None
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            what = "anchors and aliases (& and *) are not allowed in a spec"
            help = "write the value out; put an expression that starts with * or & in quotes"
            refused = Diagnostic("E0104", what, where, help)
        elif tag is not None:
            help = "values are plain text; the expression `not x` is written so, `!x` is a tag"
            refused = Diagnostic("E0104", f"the tag `{tag}` is not allowed in a spec", where, help)
        elif documents > 1:
            what = "a file holds one spec; here a second document starts"
            refused = Diagnostic("E0104", what, where, "one file per method")
        elif depth > MAX_DEPTH or number > MAX_EVENTS:
            what = "this is nested too deep or holds too many values for a spec"
            refused = Diagnostic("E0102", what, where, "a method fits on a page")
        if refused is not None:
            raise SpecError((refused,))
        yield event


def _marks(event: yaml.Event) -> tuple[int, int]:
    assert event.start_mark is not None and event.end_mark is not None
    return event.start_mark.index, event.end_mark.index


def _one_line(error: yaml.MarkedYAMLError) -> str:
    parts = [" ".join(str(part).split()) for part in (error.context, error.problem) if part]
    return ", ".join(parts)[:160] or "syntax error"


def _yaml_help(error: yaml.MarkedYAMLError) -> str:
    problem = str(error.problem)
    if "mapping values are not allowed" in problem:
        return 'a `: ` inside an expression needs "quotes" around the whole expression'
    if "found character" in problem and "cannot start any token" in problem:
        return 'put this value in "quotes"'
    if "',' or '}'" in problem or "',' or ']'" in problem:
        return 'inside { } an expression with commas or brackets needs "quotes"'
    return "compare with the examples of `lossdsl new NAME`"


class _Reader:
    """Events -> tree. Recursion is bounded by MAX_DEPTH."""

    def __init__(self, source: Source, events: list[yaml.Event], errors: list[Diagnostic]) -> None:
        self.source, self.errors = source, errors
        self.events: Iterator[yaml.Event] = iter(events)

    def document(self) -> Node | None:
        for event in self.events:
            if isinstance(event, yaml.NodeEvent):
                return self.node(event)
        return None

    def node(self, event: yaml.Event) -> Node:
        start = _marks(event)[0]
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
                items.append(self.node(event))
            return Sequence(tuple(items), Span(self.source, start, max(_marks(event)[1], start + 1)))
        entries: list[tuple[Scalar, Node]] = []
        seen: dict[str, Scalar] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.node(event)
            value = self.node(next(self.events))
            if not isinstance(key, Scalar):
                self.errors.append(Diagnostic("E0106", "a key must be a name", key.span, "write `key: value`"))
            elif key.value in seen:
                line = self.source.line_col(seen[key.value].span.start)[0]
                self.errors.append(
                    Diagnostic(
                        "E0107",
                        f"the key `{key.value}` is given twice",
                        key.span,
                        f"it is already on line {line}; remove one",
                    )
                )
            else:
                seen[key.value] = key
                entries.append((key, value))
        return Mapping(tuple(entries), Span(self.source, start, max(_marks(event)[1], start + 1)))

    def scalar(self, event: yaml.ScalarEvent) -> Scalar:
        start, end = _marks(event)
        return Scalar(
            event.value,
            Span(self.source, start, max(end, start + 1)),
            _characters(event.value, self.source.text, start, end),
        )


def _characters(value: str, text: str, start: int, end: int) -> tuple[int, ...]:
    """For each character of a scalar's value its offset in the source.

    Whatever the style, a value's visible characters stand in the source in order; YAML only folds white space, adds
    quotes or indentation, and (in double quotes) escapes.
    """
    at = start
    found: list[int] = []
    for char in value:
        if not char.isspace():
            hit = text.find(char, at, end)
            if hit >= 0:
                at = hit
                found.append(at)
                at += 1
                continue
        found.append(min(at, max(end - 1, start)))
        if char.isspace() and at < end and text[at].isspace():
            at += 1
    found.append(min(at, end))
    return tuple(found)
