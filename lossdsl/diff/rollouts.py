"""Rollouts from a file, under the names that trainers dump: live tokens as a batch of the reference, every value checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import suggest
from ..reference import Array, Batch
from .tables import Table, fail, lay_out_rows, lay_out_tensors, read_json_lines, read_parquet, read_safetensors

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
ABOVE_ZERO = 1e-3  # what rounding may put a log-prob above 0
SUMS_TO_ONE = 0.02  # how far rounding may put a distribution's sum from 1
FORMATS = {".safetensors", ".jsonl", ".json", ".parquet"}


@dataclass(frozen=True)
class Rollouts:
    """A batch of real or made answers.

    Attributes:
        batch: flat over the live tokens; `values["A"]` is per answer or per token.
        tokens: [N] ids of the sampled tokens; position: [N] place of each in its answer, from 0, masked ones counted.
        topk: the sampler's (ids [N, k], log-probs [N, k]); hidden: [N, H]; head: [V, H].
        source: what it is, in words; notes: what was made up on the way; unread: a column -> why it fits no axis.
    """

    batch: Batch
    position: Array
    source: str
    tokens: Array | None = None
    topk: tuple[Array, Array] | None = None
    hidden: Array | None = None
    head: Array | None = None
    notes: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)


def load_rollouts(path: str | Path, columns: Mapping[str, str] | None = None) -> Rollouts:
    """Read rollouts.

    Args:
        columns: our name -> the file's name, where it is not one of the usual ones.

    Raises:
        SpecError: E0604, saying which row and column, for whatever is wrong with the file.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        fail(f"{path.name}: rollouts are read from {', '.join(sorted(FORMATS))}", "convert the file, or rename it")
    if not path.is_file():
        fail(f"there is no file {path}")
    columns = columns or {}
    match path.suffix:
        case ".safetensors":
            table = lay_out_tensors(*_rename(read_safetensors(path), columns, path.name), path.name)
        case ".parquet":
            table = lay_out_rows(*_rename(read_parquet(path), columns, path.name), path.name)
        case _:
            arrays, lines = read_json_lines(path)
            if not lines:
                fail(f"{path.name} holds no answers", "one answer a line, each a JSON object")
            table = lay_out_rows(*_rename(arrays, columns, path.name), path.name, lines)
    return _rollouts(table)


def _rename(arrays: dict[str, Any], columns: Mapping[str, str], file: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's columns under our names, and our name -> theirs; unknown ones keep theirs (they may be declared inputs)."""
    found, renamed = dict(arrays), dict(columns)
    listed = ", ".join(sorted(arrays))
    for ours, theirs in columns.items():
        if theirs not in arrays:
            fail(f"{file} has no column `{theirs}`", suggest(theirs, arrays) or f"it has {listed}")
        found[ours] = arrays[theirs]
    for ours, others in ALIASES.items():
        present = [name for name in others if name in arrays and name not in columns.values()]
        if ours in found:
            continue
        if len(present) > 1:
            names = " and ".join(f"`{name}`" for name in present)
            fail(f"{file}: {names} may both be {ours}", f"say which: --columns {ours}={present[0]}")
        if present:
            found[ours], renamed[ours] = arrays[present[0]], present[0]
    if "logp" not in found:
        fail(
            f"{file} has no log-probs of the policy being trained",
            f"map one: --columns logp=NAME; it has {listed}",
        )
    return found, renamed


# --- what the columns mean ----------------------------------------------------------------------------------------------


def _rollouts(table: Table) -> Rollouts:
    tokens = _Tokens(table)
    n_seqs = len(table.lengths)
    logp = {policy: tokens.logp(name) for name, policy in LOGPS.items() if tokens.has(name)}
    group = _in_order(tokens.per_answer("groups")) if tokens.has("groups") else np.zeros(n_seqs, np.int64)
    values, notes = _values(tokens, group)
    hidden, head = tokens.vectors("hidden"), table.head
    if hidden is not None and head is not None and (head.ndim != 2 or head.shape[1] != hidden.shape[1]):
        fail(
            f"{table.name}: {table.called('hidden')} is {hidden.shape[1]} wide, {table.called('lm_head')} is {list(head.shape)}",
            "it must be [V, H]",
        )
    mu = tokens.distribution("mu_logprobs")
    ids, top = tokens.ids("mu_topk_ids", vector=True), tokens.vectors("mu_topk_logprobs")
    if ids is not None and top is not None:
        if ids.shape != top.shape:
            each = f"{table.called('mu_topk_ids')} holds {ids.shape[1]} per token"
            fail(f"{table.name}: {each}, {table.called('mu_topk_logprobs')} {top.shape[1]}")
        tokens.at_most_zero("mu_topk_logprobs", top)
    sampled = tokens.ids("tokens")
    V = head.shape[0] if hidden is not None and head is not None else mu.shape[1] if mu is not None else None
    if mu is not None and mu.shape[1] != V:
        fail(
            f"{table.name}: {table.called('mu_logprobs')} has {mu.shape[1]} entries, {table.called('lm_head')} has {V} rows",
            "one vocabulary for both",
        )
    for name, x in (("tokens", sampled), ("mu_topk_ids", ids)):
        if x is not None and V is not None:
            tokens.first_bad(name, x >= V, x, f"the vocabulary has {V} entries, ids are counted from 0")
    batch = Batch(tokens.seq, n_seqs, group=group, logp=logp, logp_v={} if mu is None else {"mu": mu}, values=values)
    made = Rollouts(
        batch, tokens.position, f"{table.name}: {n_seqs} answers, {len(tokens.seq)} live tokens", sampled,
        None if ids is None or top is None else (ids, top.astype(np.float64)), hidden, head, tuple(notes), table.unread,
    )  # fmt: skip
    return with_distributions(made)


class _Tokens:
    """The live tokens of a table, each of its columns checked as it is taken."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._starts = np.cumsum(table.lengths) - table.lengths
        self.seq = np.repeat(np.arange(len(table.lengths)), table.lengths)
        self.position = np.arange(len(self.seq)) - np.repeat(self._starts, table.lengths)
        self._live = np.ones(len(self.seq), bool)
        if self.has("mask"):
            mask = self.per_token("mask")
            self.first_bad("mask", (mask != 0) & (mask != 1), mask, "a mask is 1 on live tokens and 0 elsewhere")
            self._live = mask.astype(bool)
        self.seq, self.position = self.seq[self._live], self.position[self._live]
        if not len(self.seq):
            fail(
                f"{table.name} has no live token", f"{table.called('mask')} is 0 everywhere" if self.has("mask") else ""
            )

    def has(self, name: str) -> bool:
        return any(name in where for where in (self.table.token, self.table.answer, self.table.unread))

    def first_bad(self, name: str, bad: Array, x: Array, help: str) -> None:
        """Fail at the first live token where `bad` [N] or [N, k] holds."""
        if bad.any():
            t = int(np.argmax(bad.reshape(len(bad), -1).any(1)))
            value = float(x[t][bad[t]].flat[0]) if x.ndim > 1 else float(x[t])
            fail(
                f"{self.table.place(int(self.seq[t]))}, token {self.position[t]}: {self.table.called(name)} is {value:g}",
                help,
            )

    def per_token(self, name: str, vector: bool = False) -> Array:
        table = self.table
        if name in table.unread:
            fail(table.unread[name], f"one value per token, as many as {table.called('logp')} has")
        if name in table.answer:
            fail(
                f"{table.name}: {table.called(name)} holds one value per answer",
                f"one value per token, as many as {table.called('logp')} has",
            )
        x = table.token[name]
        if (x.ndim == 2) != vector:
            has = "one number" if x.ndim == 1 else f"{x.shape[1]} numbers"
            fail(
                f"{table.name}: {table.called(name)} holds {has} per token",
                f"it needs {'a list' if vector else 'one number'}",
            )
        return x[self._live]

    def logp(self, name: str) -> Array:
        x = self.per_token(name).astype(np.float64)
        self.first_bad(name, ~np.isfinite(x), x, "mask that token, or mend the dump")
        self.at_most_zero(name, x)
        return np.minimum(x, 0.0)

    def at_most_zero(self, name: str, x: Array) -> None:
        self.first_bad(name, ~(x <= ABOVE_ZERO), x, "a log-prob is at most 0; is this a probability or a loss?")

    def vectors(self, name: str) -> Array | None:
        return self.per_token(name, vector=True) if self.has(name) else None

    def distribution(self, name: str) -> Array | None:
        x = self.vectors(name)
        if x is None:
            return None
        self.at_most_zero(name, x)
        x = x.astype(np.float64)
        total = np.exp(x).sum(-1)
        self.first_bad(
            name,
            abs(total - 1) > SUMS_TO_ONE,
            total,
            "the sum of its probabilities, which must be 1; a top-k is mu_topk_*",
        )
        return x

    def ids(self, name: str, vector: bool = False) -> Array | None:
        if not self.has(name):
            return None
        x = self.per_token(name, vector)
        self.first_bad(name, ~(x >= 0) | (x != np.floor(x)), x, "ids are whole numbers from 0")
        return x.astype(np.int64)

    def per_answer(self, name: str) -> Array:
        """[S] of a column with one value per answer, or the same value at each of its tokens."""
        if name in self.table.answer:
            return self.table.answer[name]
        flat = self.per_token(name)
        every = self.table.token[name]
        found = every[np.minimum(self._starts, len(every) - 1)]  # of an answer without live tokens: its first token's
        found[self.seq[::-1]] = flat[::-1]
        changes = found[self.seq] != flat
        if changes.any():
            answer = int(self.seq[np.argmax(changes)])
            fail(
                f"{self.table.place(answer)}: {self.table.called(name)} changes within an answer",
                "one value per answer",
            )
        return np.asarray(found)

    def numbers(self, name: str) -> Array:
        """[S] or [N]: finite numbers per answer or per token."""
        if name in self.table.answer:
            x = self.table.answer[name]
            if x.dtype.kind not in "biuf":
                fail(
                    f"{self.table.name}: {self.table.called(name)} holds words, not numbers",
                    "was another column meant?",
                )
            bad = ~np.isfinite(x)
            if bad.any():
                i = int(np.argmax(bad))
                fail(
                    f"{self.table.place(i)}: {self.table.called(name)} is {x[i]:g}",
                    "drop the answer or give it a number",
                )
        else:
            x = self.per_token(name)
            self.first_bad(name, ~np.isfinite(x), x, "mask that token, or mend the dump")
        return x.astype(np.float64)


def _values(tokens: _Tokens, group: Array) -> tuple[dict[str, Array | float], list[str]]:
    """A, R and declared inputs; notes on what was made up."""
    table, n_seqs = tokens.table, len(tokens.table.lengths)
    known = {*ALIASES, *(a for names in ALIASES.values() for a in names)}
    values: dict[str, Array | float] = {}
    notes = []
    for name in (*table.token, *table.answer):
        column = table.token[name] if name in table.token else table.answer[name]
        if name not in known and column.ndim == 1 and column.dtype.kind in "biuf":
            x = (tokens.per_token(name) if name in table.token else column).astype(np.float64)
            if np.isfinite(x).all():
                values[name] = x
            else:
                table.unread[name] = f"{table.name}: `{name}` is not a finite number everywhere"
    if tokens.has("rewards"):
        R = tokens.numbers("rewards")
        if "rewards" in table.token:
            R = np.bincount(tokens.seq, weights=R, minlength=n_seqs)
            notes.append("rewards per token were summed to one per answer")
        values["R"] = R
    if tokens.has("advantages"):
        values["A"] = tokens.numbers("advantages")
    elif "R" not in values:
        fail(f"{table.name} has neither advantages nor rewards", "map one: --columns advantages=NAME")
    elif not tokens.has("groups"):
        fail(f"{table.name} has rewards but no groups to take their mean over", "map one: --columns groups=NAME")
    else:
        values["A"] = R - (np.bincount(group, weights=R) / np.bincount(group))[group]
        notes.append("the file has no advantages; R - mean_g(R) was taken for both")
    if not np.any(values["A"]):
        notes.append("every advantage is 0: there is no gradient to compare")
    return values, notes


def _in_order(ids: Array) -> Array:
    """0..G-1, in order of first appearance."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[inverse])


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
            fail(f"--columns takes NAME=COLUMN, not {pair!r}", "for example --columns logp=policy_logprobs")
        if ours not in ALIASES and not ours.isidentifier():
            fail(f"--columns: `{ours}` is not a name", suggest(ours, ALIASES))
        found[ours] = theirs
    return found
