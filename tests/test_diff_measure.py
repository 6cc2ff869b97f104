"""Rollouts are read as they are, mistakes are named by row and column, and what is measured is the gradient."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DATA, method
from safetensors.numpy import load_file, save_file

import lossdsl
from lossdsl.api import find
from lossdsl.diff.assume import NOTHING
from lossdsl.diff.measure import cosines, logit_gradient, measure
from lossdsl.diff.rollouts import Rollouts, columns_of, load_rollouts
from lossdsl.diff.side import Side, sides
from lossdsl.diff.synthetic import synthetic_rollouts
from lossdsl.errors import SpecError
from lossdsl.method import Method, lower_spec
from lossdsl.specdoc import read_spec

REAL = DATA / "rollouts.safetensors"


def builtin(name: str) -> Method:
    return lower_spec(read_spec(find(name)))


def pair(a: Method, b: Method) -> tuple[Side, Side]:
    return sides(a, b, NOTHING)


# --- reading ----------------------------------------------------------------------------------------------------------------


def rows_of(path: Path, trainer_names: bool = False) -> list[dict[str, Any]]:
    """The real rollouts as one object per answer, masked tokens cut off."""
    d = load_file(path)
    names = {"logp": "log_prob", "prox_logp": "old_log_probs", "mu_logp": "rollout_log_probs"} if trainer_names else {}
    rows = []
    for i, mask in enumerate(d["mask"].astype(bool)):
        row: dict[str, Any] = {
            names.get(k, k): d[k][i][mask].astype(float).tolist() for k in ("logp", "prox_logp", "mu_logp")
        }
        row |= {
            "advantage": float(d["advantage"][i]),
            "uid": f"prompt-{d['group'][i]}",
            "tokens": d["tokens"][i][mask].tolist(),
        }
        rows.append(row)
    return rows


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_same(x: Rollouts, y: Rollouts) -> None:
    assert x.batch.n_seqs == y.batch.n_seqs
    for name in ("seq", "group"):
        np.testing.assert_array_equal(getattr(x.batch, name), getattr(y.batch, name))
    for policy in ("pi", "prox", "mu"):
        np.testing.assert_allclose(x.batch.logp[policy], y.batch.logp[policy])
    np.testing.assert_allclose(x.batch.values["A"], y.batch.values["A"])
    assert x.tokens is not None and y.tokens is not None
    np.testing.assert_array_equal(x.tokens, y.tokens)


def test_three_formats_and_two_layouts_hold_the_same(tmp_path: Path) -> None:
    whole = load_rollouts(REAL)
    assert whole.batch.n_seqs == 96 and len(whole.batch.seq) == 2827
    assert_same(whole, load_rollouts(write_lines(tmp_path / "r.jsonl", rows_of(REAL))))
    assert_same(whole, load_rollouts(write_lines(tmp_path / "t.jsonl", rows_of(REAL, trainer_names=True))))
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows_of(REAL)), tmp_path / "r.parquet")
    assert_same(whole, load_rollouts(tmp_path / "r.parquet"))
    d = load_file(REAL)
    live = d["mask"].astype(bool)
    ids = np.repeat(np.arange(96), live.sum(1))
    packed = {k: d[k][live] for k in ("logp", "prox_logp", "mu_logp", "tokens")} | {"seq_ids": ids}
    save_file(packed | {"advantage": d["advantage"], "group": d["group"]}, tmp_path / "p.safetensors")
    assert_same(whole, load_rollouts(tmp_path / "p.safetensors"))


def test_hidden_states_and_head_give_the_policy(tmp_path: Path) -> None:
    r = load_rollouts(REAL)
    assert r.tokens is not None
    found = r.batch.logp_v["pi"][np.arange(len(r.tokens)), r.tokens]
    np.testing.assert_allclose(found, r.batch.logp["pi"], atol=1e-5)


def test_a_column_of_another_name_is_mapped(tmp_path: Path) -> None:
    rows = [{"mine": x.pop("logp"), **x} for x in rows_of(REAL)]
    path = write_lines(tmp_path / "r.jsonl", rows)
    with pytest.raises(SpecError, match="--columns logp=NAME"):
        load_rollouts(path)
    assert_same(load_rollouts(REAL), load_rollouts(path, columns_of(["logp=mine"])))


def broken(**changes: Any) -> list[dict[str, Any]]:
    rows = [{"logp": [-1.0, -2.0], "mu_logp": [-1.0, -2.5], "advantage": 1.0} for _ in range(4)]
    rows[2] |= changes
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (broken(mu_logp=[-1.0]), "answer 3: `mu_logp` has 1 values, `logp` has 2"),
        (broken(logp=[-1.0, float("nan")]), "answer 3, token 1: `logp` is nan"),
        (broken(mu_logp=[0.5, -1.0]), "answer 3, token 0: `mu_logp` is a log-prob above 0"),
        (broken(mu_logp=[-1.0, "x"]), "answer 3: `mu_logp` holds 'x', which is not a number"),
        (broken(mu_logp=-1.0), "answer 3: `mu_logp` is not a list"),
        ([{"logp": [-1.0]}], "neither advantages nor rewards"),
        ([{"logp": [-1.0], "mask": [0.5], "advantage": 1}], "answer 1: `mask` holds something else than 0 and 1"),
        ([{"logp": [-1.0], "mask": [0], "advantage": 1}], "no live token"),
        ([{"logp": [-1.0], "old_log_probs": [-1.0], "old_log_prob": [-1.0], "advantage": 1}], "may both be prox_logp"),
        ([*broken()[:1], {"logp": [-1.0]}], "r.jsonl:2: `mu_logp` is missing"),
        ([], "holds no answers"),
        (broken(advantage=float("nan")), "answer 3: the advantage or reward is nan"),
        (broken(advantage=None), "`advantages` is not one number per answer"),
        ([{"logp": [-1.0], "reward": 1.0}], "no groups to take their mean over"),
        ([{"logprobs": [-1.0], "advantage": 1.0}], "no log-probs of the policy being trained"),
    ],
)
def test_a_wrong_file_is_named_by_row_and_column(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(SpecError) as error:
        load_rollouts(write_lines(tmp_path / "r.jsonl", rows))
    (found,) = error.value.diagnostics
    assert found.code == "E0604" and message in found.message, found.message


def test_files_that_are_no_rollouts(tmp_path: Path) -> None:
    for name, content in {
        "a.jsonl": b"{",
        "b.safetensors": b"junk",
        "c.parquet": b"junk",
        "d.csv": b"x",
        "e.jsonl": b"[1]",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SpecError) as error:
            load_rollouts(tmp_path / name)
        assert [d.code for d in error.value.diagnostics] == ["E0604"]
    with pytest.raises(SpecError, match="there is no file"):
        load_rollouts(tmp_path / "none.jsonl")


def test_rewards_stand_in_for_advantages(tmp_path: Path) -> None:
    rows = [{"logp": [-1.0], "reward": r, "uid": g} for r, g in ((1, "x"), (0, "x"), (1, "y"), (1, "y"))]
    r = load_rollouts(write_lines(tmp_path / "r.jsonl", rows))
    np.testing.assert_allclose(r.batch.values["A"], [0.5, -0.5, 0, 0])
    assert "R - mean_g(R)" in r.notes[0]


@pytest.mark.slow
def test_a_million_tokens_take_seconds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    logs = -rng.exponential(1.0, (3, 2000, 500))
    arrays = {"logp": logs[0], "prox_logp": logs[1], "mu_logp": logs[2], "advantage": rng.normal(size=2000)}
    arrays["mask"] = np.ones((2000, 500))
    save_file(arrays, tmp_path / "r.safetensors")
    rows = [
        {k: (v[i].round(4).tolist() if v.ndim == 2 else float(v[i])) for k, v in arrays.items()} for i in range(2000)
    ]
    for path in (tmp_path / "r.safetensors", write_lines(tmp_path / "r.jsonl", rows)):
        start = time.perf_counter()
        found = lossdsl.compare("seq_tis", "grpo", data=path)
        assert time.perf_counter() - start < 30  # seconds, not minutes, on a busy machine
        assert found.measured is not None and len(found.measured.tokens) == 10


# --- measuring ----------------------------------------------------------------------------------------------------------------


def tiny() -> Rollouts:
    """Two answers of one token: r = 1.5 with A = 1, r = 1.1 with A = -1."""
    logp = {"pi": np.log([0.3, 0.22]), "prox": np.log([0.2, 0.2]), "mu": np.log([0.2, 0.2])}
    batch = lossdsl.reference.Batch(np.array([0, 1]), 2, logp=logp, values={"A": np.array([1.0, -1.0])})
    return Rollouts(batch, np.zeros(2, int), "tiny")


def test_two_tokens_by_hand() -> None:
    """Weights under grpo (0, -1.1) / 2 and without a clip (1.5, -1.1) / 2."""
    m = measure(pair(builtin("grpo"), method("f: r\nnormaliser: seq_mean_token_mean")), tiny())
    (space,) = m.spaces
    assert space.cosine == pytest.approx(1.1 / math.hypot(1.5, 1.1))
    assert space.norm_ratio == pytest.approx(1.1 / math.hypot(1.5, 1.1))
    up, down = m.silenced
    assert (up.tokens, up.only_a, up.only_b, up.both) == (1, 1.0, 0.0, 0.0)
    assert (down.tokens, down.only_a, down.only_b, down.both) == (1, 0.0, 0.0, 0.0)
    (token,) = m.tokens
    assert (token.answer, token.token, token.share) == (1, 0, 1.0)
    assert token.values["W_a"] == 0 and token.values["W_b"] == pytest.approx(1.5)
    assert any("logit space needs" in note for note in m.notes)


@pytest.mark.parametrize("name", ["grpo", "gspo", "tis_sc", "trm_avg", "grpo_k3", "grpo_entropy"])
def test_the_head_s_gradient_is_autograd_s(name: str) -> None:
    """Through hidden states and head, against torch's own backward of the generated module."""
    r = load_rollouts(REAL)
    side = pair(builtin(name), builtin(name))[0]
    found = logit_gradient(side, r).T @ np.asarray(r.hidden, dtype=np.float64)
    d = {k: torch.from_numpy(v) for k, v in load_file(REAL).items()}
    head = d["lm_head"].double().requires_grad_()
    given = {"mask": d["mask"].bool(), "advantages": d["advantage"].double(), "groups": d["group"]}
    given |= {k: d[k].double() for k in ("prox_logp", "mu_logp", "ref_logp", "mu_logprobs")}
    loss_fn = lossdsl.compile(name, compile=False)
    out = loss_fn.from_logits(d["hidden"].double() @ head.T, d["tokens"], shift=False, **given)
    out.loss.backward()
    assert head.grad is not None
    scale = np.abs(found).max()
    np.testing.assert_allclose(-head.grad.numpy(), found, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ["dapo", "topr", "score_centering"])
def test_a_method_measured_against_itself_and_its_double(name: str) -> None:
    m = builtin(name)
    for space in measure(pair(m, m), load_rollouts(REAL)).spaces:
        assert space.cosine == pytest.approx(1) and space.norm_ratio == pytest.approx(1)
    half = method("f: rho\nnormaliser: token_mean"), method("f: rho / 2\nnormaliser: token_mean")
    for space in measure(pair(*half), load_rollouts(REAL)).spaces:
        assert space.cosine == pytest.approx(1) and space.norm_ratio == pytest.approx(2)


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    m = measure(pair(builtin("erc"), builtin("grpo")), load_rollouts(REAL))
    assert m.spaces == () and any("erc cannot be measured: it reads `old_entropy`" in n for n in m.notes)


def test_the_synthetic_batch_is_as_stale_as_it_says() -> None:
    r = synthetic_rollouts(3, staleness=0.3, mismatch=0.05)
    logp = r.batch.logp
    assert np.std(logp["pi"] - logp["prox"]) == pytest.approx(0.3, rel=1e-3)
    assert np.std(logp["prox"] - logp["mu"]) == pytest.approx(0.05, rel=1e-3)
    assert r.source == synthetic_rollouts(3, 0.3, 0.05).source
    on_policy = synthetic_rollouts(0, 0, 0)
    np.testing.assert_array_equal(on_policy.batch.logp["pi"], on_policy.batch.logp["mu"])


def test_cosines_of_many_are_the_cosines_of_pairs() -> None:
    r = load_rollouts(REAL)
    methods = [builtin(n) for n in ("grpo", "dapo", "tis_sc")]
    matrix, notes = cosines([Side(m.name, m, NOTHING, False) for m in methods], r)
    assert notes == () and np.allclose(np.diag(matrix), 1)
    found = {s.name: s.cosine for s in measure(pair(methods[0], methods[2]), r).spaces}
    assert matrix[0, 2] == matrix[2, 0] == pytest.approx(found["logits"])


def test_a_padded_file_needs_its_mask_and_a_packed_group_is_one_per_answer(tmp_path: Path) -> None:
    save_file({"logp": -np.ones((2, 3)), "advantage": np.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(SpecError, match="has no mask"):
        load_rollouts(tmp_path / "a.safetensors")
    packed = {"logp": -np.ones(5), "seq_ids": np.array([0, 0, 1, 1, 2]), "advantage": np.ones(3)}
    save_file(packed | {"group": np.array([7, 7, 9, 9, 7])}, tmp_path / "b.safetensors")
    assert load_rollouts(tmp_path / "b.safetensors").batch.group.tolist() == [0, 1, 0]  # type: ignore[union-attr]
    save_file(packed | {"group": np.array([7, 9, 9, 9, 7])}, tmp_path / "c.safetensors")
    with pytest.raises(SpecError, match="changes within an answer"):
        load_rollouts(tmp_path / "c.safetensors")
