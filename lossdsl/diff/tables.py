"""Files of rollouts as one table: values per token, per answer, and what fits neither.

Shapes, in safetensors: [B, T] per token, or packed [N] with `seq_ids` [N]; [B] per answer; [.., V] or [.., k] per token
and vocabulary entry; `lm_head` [V, H]. In JSON Lines and parquet: one answer a row, lists per token (ragged), numbers or
words per answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..errors import Diagnostic, SpecError
from ..reference import Array


@dataclass
class Table:
    """What a file holds, under our names.

    Attributes:
        lengths: [S] tokens of each answer, masked ones counted.
        lines: [S] the line of each answer, where the file has lines.
        token: name -> [N] or [N, k], over all tokens; answer: name -> [S], numbers or words.
        head: [V, H]; unread: name -> why it is none of these.
        theirs: name -> what the file calls it, where that is something else.
    """

    name: str
    lengths: Array
    lines: tuple[int, ...] = ()
    theirs: dict[str, str] = field(default_factory=dict)
    token: dict[str, Array] = field(default_factory=dict)
    answer: dict[str, Array] = field(default_factory=dict)
    head: Array | None = None
    unread: dict[str, str] = field(default_factory=dict)

    def place(self, answer: int) -> str:
        """Where an answer (counted from 0) stands, for people."""
        return f"{self.name}{f':{self.lines[answer]}' if self.lines else ''}: answer {answer + 1}"

    def called(self, name: str) -> str:
        """A column of ours, in the file's own words."""
        return f"`{self.theirs.get(name, name)}`"


def fail(message: str, help: str = "") -> NoReturn:
    raise SpecError((Diagnostic("E0604", message, None, help),))


# --- files ------------------------------------------------------------------------------------------------------------


def read_safetensors(path: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    except ImportError:
        fail(f"{path.name}: the package safetensors is not installed", "pip install 'lossdsl[data]'")
    try:
        try:
            return dict(load_file(path))
        except (TypeError, AttributeError):  # a type that numpy lacks: bfloat16
            from safetensors.torch import load_file as load_torch

            return {k: (v.float() if v.is_floating_point() else v).numpy() for k, v in load_torch(path).items()}
    except (SafetensorError, OSError, ValueError) as error:
        fail(f"{path.name} is not a safetensors file: {error}")


def read_parquet(path: Path) -> dict[str, Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        fail(f"{path.name}: the package pyarrow is not installed", "pip install 'lossdsl[data]'")
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        fail(f"{path.name} is not a parquet file: {error}")
    return {name: table.column(name).to_pylist() for name in table.column_names}


def read_json_lines(path: Path) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Columns of rows and the line of each; None where a row lacks a key."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                fail(f"{path.name}:{number}: this line is not JSON: {error}", "one answer a line, each an object")
            except RecursionError:
                fail(f"{path.name}:{number}: this line is nested too deeply", "one answer a line, each an object")
            if not isinstance(row, dict):
                fail(f"{path.name}:{number}: this line is not an object", 'one answer a line: {"logp": [...], ...}')
            rows.append((number, row))
    keys = dict.fromkeys(key for _, row in rows for key in row)
    return {key: [row.get(key) for _, row in rows] for key in keys}, tuple(number for number, _ in rows)


# --- one shape for all ------------------------------------------------------------------------------------------------


def lay_out_tensors(named: dict[str, Array], theirs: dict[str, str], name: str) -> Table:
    logp = named["logp"]
    ids = named.get("seq_ids")
    if logp.ndim == 2:
        lengths = np.full(logp.shape[0], logp.shape[1])
        if "mask" not in named:
            fail(f"{name} is padded and has no mask", "map one: --columns mask=NAME; padding would count as tokens")
    elif logp.ndim == 1 and ids is not None and ids.shape == logp.shape:
        found, lengths = np.unique(ids, return_counts=True)
        order = np.argsort(np.searchsorted(found, ids), kind="stable")
        named = {k: v[order] if k != "lm_head" and v.shape[:1] == logp.shape else v for k, v in named.items()}
    else:
        has = f" and seq_ids {list(ids.shape)}" if ids is not None else ""
        fail(
            f"{name}: `{theirs.get('logp', 'logp')}` has shape {list(logp.shape)}{has}",
            "it must be [answers, tokens], or [tokens] with seq_ids of that shape",
        )
    lead = logp.shape
    table = Table(name, lengths, theirs=theirs, head=named.get("lm_head"))
    for key, array in named.items():
        if array.shape[: len(lead)] == lead and array.ndim <= len(lead) + 1:
            table.token[key] = array.reshape(lengths.sum(), *array.shape[len(lead) :])
        elif array.shape == lengths.shape:
            table.answer[key] = array
        else:
            table.unread[key] = (
                f"{name}: {table.called(key)} has shape {list(array.shape)}, {table.called('logp')} has {list(lead)}"
            )
    return table


def lay_out_rows(named: dict[str, list[Any]], theirs: dict[str, str], name: str, lines: tuple[int, ...] = ()) -> Table:
    logp = named["logp"]
    if not logp:
        fail(f"{name} holds no answers")
    table = Table(name, np.array([len(x) if isinstance(x, list) else -1 for x in logp]), lines, theirs)
    if (table.lengths < 0).any():
        fail(
            f"{table.place(int(np.argmin(table.lengths)))}: {table.called('logp')} is not a list",
            "one number per token",
        )
    for key, column in named.items():
        if any(isinstance(x, list) for x in column):
            flat = _per_token(table, key, column)
            if isinstance(flat, str):
                table.unread[key] = flat
            else:
                table.token[key] = flat
        elif any(x is not None for x in column) and all(isinstance(x, int | float | None) for x in column):
            table.answer[key] = np.array(column, dtype=np.float64 if None in column else None)
        else:
            table.answer[key] = np.array([str(x) for x in column])
    return table


def _per_token(table: Table, key: str, column: list[Any]) -> Array | str:
    """[N] or [N, k] of a column of lists, or why it is neither."""
    parts: list[Array] = []
    for answer, (values, wanted) in enumerate(zip(column, table.lengths, strict=True)):
        here = f"{table.place(answer)}: {table.called(key)}"
        if not isinstance(values, list):
            return f"{here} is {'missing' if values is None else 'not a list'}"
        if len(values) != wanted:
            return f"{here} has {len(values)} values, {table.called('logp')} has {wanted}"
        if not values:
            continue
        try:
            part = np.array(values, dtype=np.float64 if None in values else None)
        except (TypeError, ValueError, OverflowError):
            part = np.array(values, dtype=object)
        if part.dtype.kind not in "biuf" or part.ndim > 2:
            odd = next((x for x in values if not isinstance(x, int | float | None)), values[0])
            return f"{here} holds {_short(odd)}, which is not a number" + _same_width(values)
        if parts and part.shape[1:] != parts[0].shape[1:]:
            return f"{here} has {_width(part)} per token, the answers before {_width(parts[0])}"
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros(0)


def _width(part: Array) -> str:
    return "one number" if part.ndim == 1 else f"{part.shape[1]} numbers"


def _same_width(values: list[Any]) -> str:
    widths = {len(x) for x in values if isinstance(x, list)}
    return f": its tokens have {' and '.join(map(str, sorted(widths)))} values" if len(widths) > 1 else ""


def _short(x: object) -> str:
    text = repr(x)
    return text if len(text) <= 40 else text[:37] + "..."
