"""Rollouts are read as they are, in every layout, and a mistake in a file is named by row and column."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DATA
from safetensors.numpy import load_file, save_file

import lossdsl
from lossdsl.diff.rollouts import Rollouts, columns_of, load_rollouts
from lossdsl.errors import SpecError

REAL = DATA / "rollouts.safetensors"


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
    """Four answers of two tokens, the third one changed; `...` takes a column away."""
    good = {"logp": [-1.0, -2.0], "mu_logp": [-1.0, -2.5], "advantage": 1.0, "tokens": [1, 2], "group": 0}
    good |= {"mu_logprobs": [[-0.6931472, -0.6931472, -99.0]] * 2}
    rows = [dict(good) for _ in range(4)]
    rows[2] |= changes
    return [{k: v for k, v in row.items() if v is not ...} for row in rows]


def every(**changes: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in (row | changes).items() if v is not ...} for row in broken()]


WRONG: list[tuple[list[dict[str, Any]], str]] = [
    (broken(mu_logp=[-1.0]), ":3: answer 3: `mu_logp` has 1 values, `logp` has 2"),
    (broken(mu_logp=...), ":3: answer 3: `mu_logp` is missing"),
    (broken(mu_logp=-1.0), ":3: answer 3: `mu_logp` is not a list"),
    (broken(mu_logp=[-1.0, "x"]), ":3: answer 3: `mu_logp` holds 'x', which is not a number"),
    (broken(mu_logp=["-1", "-2"]), ":3: answer 3: `mu_logp` holds '-1', which is not a number"),
    (broken(mu_logp=[0.5, -1.0]), ":3: answer 3, token 0: `mu_logp` is 0.5"),
    (broken(mu_logp=[-1.0, float("-inf")]), ":3: answer 3, token 1: `mu_logp` is -inf"),
    (every(mu_logp=-1.0), "`mu_logp` holds one value per answer"),
    (every(mu_logp=[[-1.0, -1.0]] * 2), "`mu_logp` holds 2 numbers per token"),
    (broken(logp=[-1.0, float("nan")]), ":3: answer 3, token 1: `logp` is nan"),
    (broken(logp=[-1.0, None]), ":3: answer 3, token 1: `logp` is nan"),
    (broken(logp=-1.0), ":3: answer 3: `logp` is not a list"),
    (broken(logp=["a", "b"]), ":3: answer 3: `logp` holds 'a', which is not a number"),
    (broken(mu_logprobs=[[-1.0, -1.0]] * 2), ":3: answer 3: `mu_logprobs` has 2 numbers per token, the answers before 3"),
    (broken(mu_logprobs=[[-1.0], [-1.0, -1.0]]), ":3: answer 3: `mu_logprobs` holds [-1.0], which is not a number: its tokens have 1 and 2 values"),
    (broken(mu_logprobs=[[0.5, -1.0, -1.0]] * 2), ":3: answer 3, token 0: `mu_logprobs` is 0.5"),
    (broken(mu_logprobs=[[-1.0, -1.0, -9.0]] * 2), ":3: answer 3, token 0: `mu_logprobs` is 0.73588"),
    (every(mu_logprobs=[-1.0, -1.0]), "`mu_logprobs` holds one number per token"),
    (broken(tokens=[1, -1]), ":3: answer 3, token 1: `tokens` is -1"),
    (broken(tokens=[1, 0.5]), ":3: answer 3, token 1: `tokens` is 0.5"),
    (broken(tokens=[1, 3]), ":3: answer 3, token 1: `tokens` is 3"),
    (every(mu_topk_ids=[[0], [3]], mu_topk_logprobs=[[-1.0], [-1.0]]), ":1: answer 1, token 1: `mu_topk_ids` is 3"),
    (every(mu_topk_ids=[[0], [1]], mu_topk_logprobs=[[-1.0], [1.0]]), ":1: answer 1, token 1: `mu_topk_logprobs` is 1"),
    (every(mu_topk_ids=[[0, 1]] * 2, mu_topk_logprobs=[[-1.0]] * 2), "`mu_topk_ids` holds 2 per token, `mu_topk_logprobs` 1"),
    (every(mask=[1, 0.5]), ":1: answer 1, token 1: `mask` is 0.5"),
    (every(mask=[0, 0]), "no live token"),
    (every(advantage=...), "neither advantages nor rewards"),
    (every(advantage=..., group=..., reward=1.0), "no groups to take their mean over"),
    (every(advantage="high"), "`advantage` holds words"),
    (broken(advantage=float("nan")), ":3: answer 3: `advantage` is nan"),
    (broken(advantage=None), ":3: answer 3: `advantage` is nan"),
    (broken(advantage=[1.0, float("inf")]), ":1: answer 1: `advantage` is not a list"),
    (every(advantage=[1.0, float("inf")]), ":1: answer 1, token 1: `advantage` is inf"),
    (every(group=[0, 1]), ":1: answer 1: `group` changes within an answer"),
    (every(old_log_probs=[-1.0, -1.0], old_log_prob=[-1.0, -1.0]), "`old_log_probs` and `old_log_prob` may both be prox_logp"),
    (every(logp=..., logprobs=[-1.0, -1.0]), "no log-probs of the policy being trained"),
    ([], "holds no answers"),
]  # fmt: skip


def refused(path: Path) -> str:
    with pytest.raises(SpecError) as error:
        load_rollouts(path)
    (found,) = error.value.diagnostics
    assert found.code == "E0604" and path.name in found.message
    return found.message


@pytest.mark.parametrize(("rows", "message"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_file_is_named_by_row_and_column(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    found = refused(write_lines(tmp_path / "r.jsonl", rows))
    assert message in found, found


def test_the_unchanged_file_is_read(tmp_path: Path) -> None:
    """Otherwise the errors above could all have one cause."""
    r = load_rollouts(write_lines(tmp_path / "r.jsonl", broken()))
    assert r.notes == () and len(r.batch.seq) == 8 and r.batch.logp_v["mu"].shape == (8, 3)


def test_parquet_names_answer_and_column(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "r.parquet"
    for rows, words in (
        (broken(mu_logp=[-1.0]), "r.parquet: answer 3: `mu_logp` has 1 values, `logp` has 2"),
        (broken(mu_logp=None), "r.parquet: answer 3: `mu_logp` is missing"),
        (broken(mu_logp=[-1.0, None]), "r.parquet: answer 3, token 1: `mu_logp` is nan"),
        (every(logp=["a", "b"]), "r.parquet: answer 1: `logp` holds 'a'"),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        assert words in refused(path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(broken()).slice(0, 0), path)
    assert "holds no answers" in refused(path)


def padded(**changes: Any) -> dict[str, np.ndarray[Any, Any]]:
    good: dict[str, Any] = {"logp": -np.ones((4, 3)), "mask": np.ones((4, 3)), "advantage": np.ones(4)}
    return {k: v for k, v in (good | changes).items() if v is not None}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (padded(mask=None), "is padded and has no mask"),
        (padded(mu_logp=-np.ones((4, 2))), "`mu_logp` has shape [4, 2], `logp` has [4, 3]"),
        (padded(advantage=np.ones(3)), "`advantage` has shape [3], `logp` has [4, 3]"),
        (padded(logp=-np.ones(12)), "`logp` has shape [12]"),
        (padded(logp=-np.ones(12), seq_ids=np.zeros(11)), "`logp` has shape [12] and seq_ids [11]"),
        (padded(hidden=np.zeros((4, 3, 3)), lm_head=np.zeros((5, 2))), "`hidden` is 3 wide, `lm_head` is [5, 2]"),
        (padded(hidden=np.zeros((4, 3, 3)), lm_head=np.zeros(5)), "`hidden` is 3 wide, `lm_head` is [5]"),
        (padded(hidden=np.zeros((4, 3, 3)), lm_head=np.zeros((5, 3)), tokens=np.full((4, 3), 5)), "answer 1, token 0: `tokens` is 5"),
        (padded(hidden=np.zeros((4, 3, 3)), lm_head=np.zeros((2, 3)), mu_logprobs=np.full((4, 3, 4), np.log(0.25))),
         "`mu_logprobs` has 4 entries, `lm_head` has 2 rows"),
    ],
)  # fmt: skip
def test_tensors_of_the_wrong_shape(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    save_file(arrays, tmp_path / "r.safetensors")
    found = refused(tmp_path / "r.safetensors")
    assert message in found, found


def test_files_that_are_no_rollouts(tmp_path: Path) -> None:
    header = json.dumps({"logp": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}}).encode()
    for name, content, words in (
        ("a.jsonl", b'{"logp": [-1]}\n{', "a.jsonl:2: this line is not JSON"),
        ("a.jsonl", b"[1]", "a.jsonl:1: this line is not an object"),
        ("a.jsonl", b"\xff\xfe\n", "a.jsonl:1: this line is not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: this line is nested too deeply"),
        ("a.jsonl", b"\n\n", "holds no answers"),
        ("b.safetensors", b"junk", "not a safetensors file"),
        ("b.safetensors", b"", "not a safetensors file"),
        ("b.safetensors", struct.pack("<Q", len(header)) + header + bytes(12), "not a safetensors file"),
        ("b.safetensors", struct.pack("<Q", 1 << 60) + b"{}", "not a safetensors file"),
        ("c.parquet", b"junk", "not a parquet file"),
        ("d.csv", b"x", "rollouts are read from"),
    ):
        (tmp_path / name).write_bytes(content)
        found = refused(tmp_path / name)
        assert words in found, (name, content[:20], found)
    assert "there is no file" in refused(tmp_path / "none.jsonl")


def test_bfloat16_tensors_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file as save_torch

    tensors = {k: torch.from_numpy(v).contiguous() for k, v in padded(groups=np.array([5, 5, 6, 6])).items()}
    save_torch(tensors | {"logp": tensors["logp"].bfloat16()}, tmp_path / "r.safetensors")
    r = load_rollouts(tmp_path / "r.safetensors")
    assert (r.batch.logp["pi"] == -1).all() and r.batch.group.tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]


def test_a_column_that_is_not_used_cannot_spoil_the_file(tmp_path: Path) -> None:
    """Prompts, metadata and half-filled columns come with most dumps; what a method reads of them is asked for by name."""
    rows = broken(note="a", prompt_ids=[1, 2, 3], old_entropy=[0.5])
    path = write_lines(tmp_path / "r.jsonl", rows)
    assert load_rollouts(path).notes == ()
    m = lossdsl.compare("erc", "erc", data=path).measured
    assert m is not None and any(
        "it reads `old_entropy`, r.jsonl:1: answer 1: `old_entropy` is missing" in n for n in m.notes
    )


def test_rewards_per_token_and_advantages_of_nothing(tmp_path: Path) -> None:
    rows = [{"logp": [-1.0, -1.0], "rewards": r, "uid": "x"} for r in ([0, 1], [0, 0])]
    r = load_rollouts(write_lines(tmp_path / "r.jsonl", rows))
    np.testing.assert_allclose(r.batch.values["A"], [0.5, -0.5])
    assert "summed" in r.notes[0]
    m = lossdsl.compare(
        "grpo", "dapo", data=write_lines(tmp_path / "r.jsonl", every(advantage=0.0, prox_logp=[-1, -1]))
    ).measured
    assert m is not None and any("every advantage is 0" in note for note in m.notes)
    assert m.spaces[0].cosine is None and m.spaces[0].norm_ratio is None  # 0 / 0: neither is defined


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
