"""What is measured on rollouts is the gradient: by hand, and by autograd."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DATA, method
from safetensors.numpy import load_file

import lossdsl
from lossdsl.api import find
from lossdsl.diff.assume import NOTHING
from lossdsl.diff.measure import cosines, logit_gradient, measure
from lossdsl.diff.rollouts import Rollouts, load_rollouts
from lossdsl.diff.side import Side, sides
from lossdsl.diff.synthetic import synthetic_rollouts
from lossdsl.method import Method, lower_spec
from lossdsl.specdoc import read_spec

REAL = DATA / "rollouts.safetensors"


def builtin(name: str) -> Method:
    return lower_spec(read_spec(find(name)))


def pair(a: Method, b: Method) -> tuple[Side, Side]:
    return sides(a, b, NOTHING)


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
