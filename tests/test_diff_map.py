"""The map: classes are the identities of the review, cosines those of the pairs."""

from __future__ import annotations

import json

import pytest
from helpers import DATA
from lossdsl.cli import main

import lossdsl

REAL = DATA / "rollouts.safetensors"


def test_where_c_is_1_the_two_ratio_family_is_grpo() -> None:
    found = lossdsl.map_methods(assume=["c = 1"])
    family = {"grpo", "decoupled_ppo", "token_tis", "icepop", "seq_tis", "seq_mis", "geo_mis"}
    (mine,) = [c for c in found.classes if "grpo" in c.names]
    assert family <= set(mine.names) and mine.proved
    # its other member differs in the advantage alone
    assert set(mine.names) - family == {"grpo_loo"}
    assert found.names == lossdsl.builtins()


def test_on_policy_only_normaliser_and_terms_are_left() -> None:
    """On-policy every weight is 1 (but for those with constant factors), so a class is a normaliser."""
    found = lossdsl.map_methods(["grpo", "gspo", "token_tis", "dapo", "cispo", "dppo_tv", "sao", "topr", "reinforce", "tis_sc", "grpo_entropy"],
                                assume=["on_policy"])  # fmt: skip
    assert [set(c.names) for c in found.classes] == [
        {"grpo", "gspo", "token_tis"}, {"dapo", "cispo", "dppo_tv", "sao"}, {"topr", "reinforce"},
    ]  # fmt: skip


def test_without_an_assumption_the_review_s_methods_are_all_different() -> None:
    names = [n for heading, group in lossdsl.groups()[:5] for n in group]
    found = lossdsl.map_methods(names)
    assert found.classes == ()


def test_an_open_and_a_closed_bound_are_two_classes() -> None:
    found = lossdsl.map_methods(["rec_twoside", "rollout_is"], assume=["c = 1"])
    assert found.classes == ()


def test_cosines_on_real_rollouts_are_those_of_the_diff() -> None:
    found = lossdsl.map_methods(["grpo", "dapo", "tis_sc"], data=REAL)
    diff = lossdsl.compare("grpo", "tis_sc", data=REAL)
    assert diff.measured is not None
    logits = {s.name: s.cosine for s in diff.measured.spaces}["logits"]
    assert found.cosines[0, 2] == pytest.approx(logits)
    assert found.nearest("dapo") == ("grpo", pytest.approx(float(found.cosines[0, 1])))


def test_what_cannot_be_measured_is_a_note_and_a_hole() -> None:
    found = lossdsl.map_methods(["grpo", "erc"], data=REAL)
    assert any("old_entropy" in note for note in found.notes)
    assert found.json()["cosines"][1] == [None, None]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["map", "grpo", "token_tis", "dapo", "--assume", "c=1"]) == 0
    out = capsys.readouterr().out
    assert "grpo = token_tis" in out and "std of log r 0.2" in out
    assert main(["map", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "lossdsl.map/1" and len(found["cosines"]) == len(lossdsl.builtins())
    assert main(["map", "grpoo"]) == 2
