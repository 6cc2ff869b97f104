"""Rollouts from a file: safetensors, JSON Lines or parquet, under the names that trainers dump.

Shapes, in safetensors: [B, T] per token with `mask` [B, T], or packed [N] with `seq_ids` [N]; [B] per answer; [.., V] or
[.., k] per token and vocabulary entry; `lm_head` [V, H]. In JSON Lines and parquet: one answer a row, lists per token
(ragged), numbers per answer. Only live tokens are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..errors import Diagnostic, SpecError, suggest
from ..reference import Array, Batch

# Our name -> the names under which trainers keep the same thing. The first that a file has is taken; two are an error.
ALIASES: dict[str, tuple[str, ...]] = {
    "logp": ("log_prob", "new_logp", "train_log_probs", "per_token_logps"),
    "prox_logp": ("old_log_probs", "old_log_prob", "old_per_token_logps", "prev_logprobs"),
    "mu_logp": ("rollout_log_probs", "rollout_logprobs", "sampling_per_token_logps", "generation_logprobs"),
    "ref_logp": ("ref_log_prob", "ref_log_probs", "ref_per_token_logps", "reference_policy_logprobs"),
    "mask": ("response_mask", "loss_mask", "loss_masks", "completion_mask", "action_mask", "token_mask"),
    "advantages": ("advantage",),
    "rewards": ("reward", "score", "scores"),
    "groups": ("group", "group_id", "uid", "prompt_id"),
    "tokens": ("responses", "completion_ids", "token_ids", "input_ids"),
    "hidden": ("hidden_states",),
    "lm_head": ("lm_head_weight",),
    "seq_ids": (),
    "mu_logprobs": (),
    "mu_topk_ids": (),
    "mu_topk_logprobs": (),
}
LOGPS = {"logp": "pi", "prox_logp": "prox", "mu_logp": "mu", "ref_logp": "ref"}
FORMATS = {".safetensors", ".jsonl", ".json", ".parquet"}


@dataclass(frozen=True)
class Rollouts:
    """A batch of real or made answers.

    Attributes:
        batch: flat over the live tokens; `values["A"]` is per answer or per token.
        tokens: [N] ids of the sampled tokens; position: [N] place of each in its answer, from 0, masked ones counted.
        topk: the sampler's (ids [N, k], log-probs [N, k]); hidden: [N, H]; head: [V, H].
        source: what it is, in words; notes: what was made up on the way.
    """

    batch: Batch
    position: Array
    source: str
    tokens: Array | None = None
    topk: tuple[Array, Array] | None = None
    hidden: Array | None = None
    head: Array | None = None
    notes: tuple[str, ...] = ()


@dataclass
class _Table:
    """What a file holds: per token (flat, live or not), per answer, and the rest."""

    path: str
    lengths: Array  # tokens of each answer, masked ones counted
    token: dict[str, Array] = field(default_factory=dict)
    answer: dict[str, Array] = field(default_factory=dict)
    other: dict[str, Array] = field(default_factory=dict)

    def where(self, answer: int) -> str:
        return f"answer {answer}"


def load_rollouts(path: str | Path, columns: Mapping[str, str] | None = None) -> Rollouts:
    """Read rollouts.

    Args:
        columns: our name -> the file's name, where it is not one of the usual ones.

    Raises:
        SpecError: E0604, saying which row and column, for whatever is wrong with the file.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        _fail(f"{path.name}: rollouts are read from {', '.join(sorted(FORMATS))}", "convert the file, or rename it")
    if not path.is_file():
        _fail(f"there is no file {path}", "")
    read = {".safetensors": _safetensors, ".parquet": _parquet}.get(path.suffix, _json_lines)
    arrays = read(path)
    named = _rename(arrays, columns or {}, path)
    table = _safetensors_table(named, path) if path.suffix == ".safetensors" else _rows_table(named, path)
    return _rollouts(table, path)


def _fail(message: str, help: str) -> NoReturn:
    raise SpecError((Diagnostic("E0604", message, None, help),))


# --- files ------------------------------------------------------------------------------------------------------------


def _safetensors(path: Path) -> dict[str, Any]:
    try:
        from safetensors.numpy import load_file
    except ImportError:
        _fail(f"{path.name}: the package safetensors is not installed", "pip install 'lossdsl[data]'")
    try:
        return dict(load_file(path))
    except Exception as error:  # the library raises its own kinds, and TypeError for types that numpy lacks
        _fail(
            f"{path.name} is not a safetensors file that numpy can hold: {error}", "bfloat16 must be saved as float32"
        )


def _parquet(path: Path) -> dict[str, Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        _fail(f"{path.name}: the package pyarrow is not installed", "pip install 'lossdsl[data]'")
    try:
        table = parquet.read_table(path)
    except Exception as error:
        _fail(f"{path.name} is not a parquet file: {error}", "")
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _json_lines(path: Path) -> dict[str, Any]:
    """Columns of rows; every line is an object with the same keys."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                _fail(f"{path.name}:{number}: this line is not JSON: {error}", "one answer a line, each an object")
            if not isinstance(row, dict):
                _fail(f"{path.name}:{number}: this line is not an object", 'one answer a line: {"logp": [...], ...}')
            rows.append((number, row))
    if not rows:
        _fail(f"{path.name} holds no answers", "one answer a line, each a JSON object")
    keys = rows[0][1].keys()
    for number, row in rows:
        missing = [k for k in keys if k not in row]
        if missing:
            _fail(
                f"{path.name}:{number}: `{missing[0]}` is missing, which line {rows[0][0]} has",
                "every line needs the same keys",
            )
    return {key: [row[key] for _, row in rows] for key in keys}


def _rename(arrays: dict[str, Any], columns: Mapping[str, str], path: Path) -> dict[str, Any]:
    """The file's columns under our names; unknown ones keep theirs (they may be declared inputs)."""
    found = dict(arrays)
    listed = ", ".join(sorted(arrays))
    for ours, theirs in columns.items():
        if theirs not in arrays:
            _fail(f"{path.name} has no column `{theirs}`", suggest(theirs, arrays) or f"it has {listed}")
        found[ours] = arrays[theirs]
    for ours, others in ALIASES.items():
        present = [name for name in others if name in arrays and name not in columns.values()]
        if ours in found:
            continue
        if len(present) > 1:
            names = " and ".join(f"`{name}`" for name in present)
            _fail(f"{path.name}: {names} may both be {ours}", f"say which: --columns {ours}={present[0]}")
        if present:
            found[ours] = arrays[present[0]]
    if "logp" not in found:
        _fail(
            f"{path.name} has no log-probs of the policy being trained",
            f"map one: --columns logp=NAME; it has {listed}",
        )
    return found


# --- one shape for all ------------------------------------------------------------------------------------------------------


def _safetensors_table(named: dict[str, Array], path: Path) -> _Table:
    logp = named["logp"]
    if logp.ndim == 2:
        lead: tuple[int, ...] = logp.shape
        lengths = np.full(logp.shape[0], logp.shape[1])
    elif logp.ndim == 1 and "seq_ids" in named:
        lead = logp.shape
        ids, lengths = np.unique(named["seq_ids"], return_counts=True)
        order = np.argsort(np.searchsorted(ids, named["seq_ids"]), kind="stable")
        named = {k: v[order] if v.shape[:1] == logp.shape else v for k, v in named.items()}
    else:
        _fail(
            f"{path.name}: `logp` has shape {list(logp.shape)}",
            "it must be [answers, tokens], or [tokens] with seq_ids",
        )
    if logp.ndim == 2 and "mask" not in named:
        _fail(f"{path.name} is padded and has no mask", "map one: --columns mask=NAME; padding would count as tokens")
    if logp.ndim == 1 and named.get("groups", logp[:0]).shape == logp.shape:  # repeated at each token of an answer
        starts = np.cumsum(lengths) - lengths
        if not (named["groups"] == np.repeat(named["groups"][starts], lengths)).all():
            _fail(f"{path.name}: `groups` changes within an answer", "an answer belongs to one prompt")
        named = {**named, "groups": named["groups"][starts]}
    table = _Table(path.name, lengths)
    for name, array in named.items():
        if array.shape[: len(lead)] == lead:
            table.token[name] = array.reshape(-1, *array.shape[len(lead) :])
        elif array.shape == (len(lengths),):
            table.answer[name] = array
        elif name in (*LOGPS, "mask", "tokens", "hidden"):
            _fail(
                f"{path.name}: `{name}` has shape {list(array.shape)}, `logp` has {list(logp.shape)}", "they must agree"
            )
        else:
            table.other[name] = array
    return table


def _rows_table(named: dict[str, list[Any]], path: Path) -> _Table:
    logp = named["logp"]
    lengths = np.array([len(x) if isinstance(x, list) else -1 for x in logp])
    if (lengths < 0).any():
        row = int(np.argmin(lengths))
        _fail(f"{path.name}: answer {row + 1}: `logp` is not a list", "one number per token")
    table = _Table(path.name, lengths)
    for name, column in named.items():
        if isinstance(column[0], list):
            sizes = [len(x) if isinstance(x, list) else -1 for x in column]
            for row, (size, wanted) in enumerate(zip(sizes, lengths, strict=True)):
                if size != wanted:
                    has = f"has {size} values" if size >= 0 else "is not a list"
                    _fail(f"{path.name}: answer {row + 1}: `{name}` {has}, `logp` has {wanted}", "one value per token")
            table.token[name] = _numbers(list(chain.from_iterable(column)), name, lengths, path)
        elif all(isinstance(x, int | float) and not isinstance(x, bool) for x in column):
            table.answer[name] = np.array(column, dtype=np.float64)
        else:
            table.other[name] = np.array([str(x) for x in column])
    return table


def _numbers(flat: list[Any], name: str, lengths: Array, path: Path) -> Array:
    try:
        return np.array([math.nan if x is None else x for x in flat] if None in flat else flat, dtype=np.float64)
    except (TypeError, ValueError):
        for i, x in enumerate(flat):
            if not isinstance(x, int | float):
                row = int(np.searchsorted(np.cumsum(lengths), i, side="right"))
                _fail(f"{path.name}: answer {row + 1}: `{name}` holds {x!r}, which is not a number", "")
        raise


def _rollouts(table: _Table, path: Path) -> Rollouts:
    n_seqs = len(table.lengths)
    seq = np.repeat(np.arange(n_seqs), table.lengths)
    starts = np.repeat(np.cumsum(table.lengths) - table.lengths, table.lengths)
    position = np.arange(len(seq)) - starts
    mask = table.token.get("mask", np.ones(len(seq), bool))
    if not np.isin(mask, (0, 1)).all():
        row = int(seq[np.argmin(np.isin(mask, (0, 1)))])
        _fail(f"{path.name}: answer {row + 1}: `mask` holds something else than 0 and 1", "was another column meant?")
    live = mask.astype(bool)
    if not live.any():
        _fail(f"{path.name} has no live token", "`mask` is 0 everywhere")
    tokens = {k: v[live] for k, v in table.token.items()}
    seq, position = seq[live], position[live]
    logp = {}
    for name, policy in LOGPS.items():
        if name in tokens:
            x = tokens[name].astype(np.float64)
            bad = ~np.isfinite(x) | (x > 1e-6)
            if bad.any():
                t = int(np.argmax(bad))
                what = "a log-prob above 0" if x[t] > 0 else f"{x[t]:g}"
                _fail(
                    f"{path.name}: answer {seq[t] + 1}, token {position[t]}: `{name}` is {what}",
                    "mask that token, or mend the dump",
                )
            logp[policy] = np.minimum(x, 0.0)
    group = _groups(table, n_seqs)
    values: dict[str, Array | float] = {}
    notes = []
    known = {*ALIASES, *(a for names in ALIASES.values() for a in names)}
    values |= {k: v.astype(np.float64) for k, v in tokens.items() if k not in known and v.ndim == 1}
    values |= {k: v.astype(np.float64) for k, v in table.answer.items() if k not in known}
    if "rewards" in table.answer:
        values["R"] = table.answer["rewards"].astype(np.float64)
    if "advantages" in table.answer or "advantages" in tokens:
        values["A"] = {**tokens, **table.answer}["advantages"].astype(np.float64)
    elif "advantages" in table.other:
        _fail(
            f"{path.name}: `advantages` is not one number per answer or per token", "an entry is missing or misshapen"
        )
    elif "R" in values and not any("groups" in source for source in (table.answer, table.other)):
        _fail(f"{path.name} has rewards but no groups to take their mean over", "map one: --columns groups=NAME")
    elif "R" in values:
        R = np.asarray(values["R"])
        size = np.bincount(group, minlength=group.max(initial=-1) + 1)
        values["A"] = R - (np.bincount(group, weights=R) / size)[group]
        notes.append("the file has no advantages; R - mean_g(R) was taken for both")
    else:
        _fail(f"{path.name} has neither advantages nor rewards", "map one: --columns advantages=NAME")
    A = np.asarray(values["A"])
    if not np.isfinite(A).all():
        at = int(np.argmin(np.isfinite(A)))
        row = at if A.shape == (n_seqs,) else int(seq[at])
        _fail(
            f"{path.name}: answer {row + 1}: the advantage or reward is {A[at]:g}",
            "drop the answer or give it a number",
        )
    logp_v = {"mu": tokens["mu_logprobs"].astype(np.float64)} if "mu_logprobs" in tokens else {}
    topk = None
    if "mu_topk_ids" in tokens and "mu_topk_logprobs" in tokens:
        topk = tokens["mu_topk_ids"].astype(np.int64), tokens["mu_topk_logprobs"].astype(np.float64)
    batch = Batch(seq, n_seqs, group=group, logp=logp, logp_v=logp_v, values=values)
    made = Rollouts(
        batch, position, f"{path.name}: {n_seqs} answers, {len(seq)} live tokens",
        tokens["tokens"].astype(np.int64) if "tokens" in tokens and tokens["tokens"].ndim == 1 else None,
        topk, tokens.get("hidden"), table.other.get("lm_head"), tuple(notes),
    )  # fmt: skip
    return with_distributions(made)


def _groups(table: _Table, n_seqs: int) -> Array:
    """0..G-1, in order of first appearance; every answer in one group where the file has none."""
    for source in (table.answer, table.other):
        if "groups" in source and source["groups"].shape == (n_seqs,):
            _, first, inverse = np.unique(source["groups"], return_index=True, return_inverse=True)
            return np.argsort(np.argsort(first))[inverse]
    return np.zeros(n_seqs, np.int64)


def with_distributions(r: Rollouts) -> Rollouts:
    """With pi's whole distribution from hidden states and head, and mu's from its top-k, where they can be had.

    Outside the top-k, mu(v) = gamma * pi(v) with gamma = (1 - sum of mu over the head) / (1 - sum of pi over it).
    """
    logp_v = dict(r.batch.logp_v)
    if r.hidden is not None and r.head is not None and "pi" not in logp_v:
        logits = r.hidden.astype(np.float64) @ r.head.astype(np.float64).T
        logp_v["pi"] = log_softmax(logits)
    if r.topk is not None and "pi" in logp_v and "mu" not in logp_v:
        ids, head = r.topk
        rows = np.arange(len(ids))[:, None]
        pi = np.exp(logp_v["pi"])
        left = np.maximum(1 - np.exp(head).sum(-1), 0.0) / np.maximum(1 - pi[rows, ids].sum(-1), 1e-6)
        with np.errstate(divide="ignore"):
            mu = logp_v["pi"] + np.log(left)[:, None]
        mu[rows, ids] = head
        logp_v["mu"] = mu
    return replace(r, batch=replace(r.batch, logp_v=logp_v))


def log_softmax(z: Array) -> Array:
    """log softmax over the last axis."""
    z = z - z.max(-1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(-1, keepdims=True)))


def columns_of(pairs: Sequence[str]) -> dict[str, str]:
    """`logp=policy_logprobs,mask=loss_mask` as a mapping.

    Raises:
        SpecError: E0604 for something else, or a name that is not ours.
    """
    found = {}
    for pair in (p for text in pairs for p in text.split(",")):
        ours, equals, theirs = (x.strip() for x in pair.partition("="))
        if not equals or not ours or not theirs:
            _fail(f"--columns takes NAME=COLUMN, not {pair!r}", "for example --columns logp=policy_logprobs")
        if ours not in ALIASES and not ours.isidentifier():
            _fail(f"--columns: `{ours}` is not a name", suggest(ours, ALIASES))
        found[ours] = theirs
    return found
