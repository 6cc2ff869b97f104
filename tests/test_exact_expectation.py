"""Bias and drift of every method in a world small enough to enumerate: vocabulary 3, length 2, nine answers.

E_mu[gradient] and the drift (the mean gradient under a constant advantage) are sums over all answers, so the expected
numbers are exact. The norms are a table worked out independently; the vectors of some rows are in oracle.yaml.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import DATA, instance, loss_class

ORACLE = yaml.safe_load((DATA / "oracle.yaml").read_text())["exact_expectation"]
POLICIES = {p: np.array(ORACLE[p]) for p in ("pi", "prox", "mu")}  # contexts: root, after 0, after 1, after 2
R, BASELINE = np.array(ORACLE["R"]), ORACLE["baseline"]
CLIP = {"eps": 0.2}

SEQUENCE_IS = "where:\n  S: prod_t(rho)\nf: S\nobjective: sg(S) * A * log(pi)\n"
TIS = "params:\n  C: 2\nf: min(rho, C)\nobjective: sg(f) * A * log(pi)\n"
MIS = "params:\n  a: 0.5\n  b: 5\nf: rho * 1[a <= rho <= b]\nobjective: sg(f) * A * log(pi)\n"

# row: (built-in or spec, parameters, top-k or None, setting A: bias, cosine, drift +, drift -; setting B: bias, drift +, drift -)
ROWS: dict[str, tuple[str, dict[str, float], int | None, tuple[float, ...]]] = {
    "reinforce": ("reinforce", {}, None, (0.116011, 0.829808, 0.332746, 0.332746, 0.126914, 0.185821, 0.185821)),
    "raw_token_is": ("raw_is", {}, None, (0.114195, 0.835781, 0, 0, 0.099197, 0, 0)),
    "grpo_0.8_1.2": ("grpo", CLIP, None, (0.091968, 0.913208, 0.288294, 0.269039, 0.099358, 0.123967, 0.097601)),
    "dual_clip_0.8_1.2_c3": ("dual_clip_ppo", CLIP | {"dual": 3}, None, (0.095042, 0.904317, 0.288294, 0.272975, 0.105337, 0.123967, 0.097601)),
    "dapo_0.8_1.28": ("dapo", {}, None, (0.091968, 0.913208, 0.287599, 0.269039, 0.099358, 0.104103, 0.097601)),
    "gspo_3e-4_4e-4": ("gspo", {}, None, (0.225814, -0.044566, 0.309404, 0.231082, 0.207619, 0.224486, 0.161249)),
    "gspo_0.8_1.28": ("gspo", {"eps_low": 0.2, "eps_high": 0.28}, None, (0.076679, 0.935154, 0.302586, 0.333933, 0.061761, 0.149658, 0.116156)),
    "cispo_0.8_1.28": ("cispo", {}, None, (0.093594, 0.898127, 0.315756, 0.315756, 0.104788, 0.114917, 0.114917)),
    "cispo_m1mask_0.8_1.28": ("cispo_masked", {"mask_low": 0.8, "mask_high": 1.28, "clip_low": 0.8, "clip_high": 1.28}, None,
                              (0.093364, 0.898735, 0.318773, 0.271354, 0.104928, 0.151966, 0.083441)),
    "decoupled_ppo_0.8_1.2": ("decoupled_ppo", CLIP, None, (0.114139, 0.835958, 0.099684, 0.103905, 0.099358, 0.123967, 0.097601)),
    "token_tis_C2": ("token_tis", CLIP, None, (0.115254, 0.833064, 0.134299, 0.129469, 0.099358, 0.123967, 0.097601)),
    "icepop_0.5_5": ("icepop", CLIP, None, (0.120608, 0.814627, 0.122833, 0.103905, 0.099358, 0.123967, 0.097601)),
    "seq_tis_C2": ("seq_tis", CLIP, None, (0.115529, 0.855947, 0.145302, 0.123004, 0.099358, 0.123967, 0.097601)),
    "seq_mis_C2": ("seq_mis", CLIP, None, (0.132601, 0.785161, 0.222389, 0.218027, 0.099358, 0.123967, 0.097601)),
    "geo_mis_0.8_1.25": ("geo_mis", CLIP | {"band_low": 0.8, "band_high": 1.25}, None,
                         (0.113737, 0.845708, 0.229454, 0.223243, 0.099358, 0.123967, 0.097601)),
    "dsv32_mask_d0.1": ("deepseek_v32_mask", CLIP | {"delta": 0.1}, None, (0.123613, 0.819776, 0.288294, 0.264361, 0.134087, 0.123967, 0.217258)),
    "scalerl_dapo_0.8_1.26": ("scalerl_dapo", {}, None, (0.131359, 0.794664, 0.274785, 0.122833, 0.099358, 0.104103, 0.097601)),
    "scalerl_gspo_0.8_1.26": ("scalerl_gspo", {"eps_low": 0.2, "eps_high": 0.26}, None,
                              (0.106176, 0.866283, 0.250942, 0.207356, 0.061761, 0.149658, 0.116156)),
    "scalerl_cispo_max4": ("scalerl_cispo", {"eps_max": 4}, None, (0.117607, 0.825440, 0.078384, 0.078384, 0.099197, 0, 0)),
    "pipelinerl_1.02": ("pipelinerl", {}, None, (0.115553, 0.854272, 0.170723, 0.170723, 0.110618, 0.081112, 0.081112)),
    "sao_0.7_6": ("sao", {}, None, (0.134723, 0.761638, 0.072086, 0.072086, 0.105927, 0.097601, 0.097601)),
    "topr": ("topr", {}, None, (0.124022, 0.804245, 0.332746, 0.169365, 0.132391, 0.185821, 0.084479)),
    "dppo_tv_0.15": ("dppo_tv", {}, None, (0.134405, 0.826584, 0.190543, 0.121640, 0.099197, 0.104103, 0.079510)),
    "dppo_kl_0.05": ("dppo_kl", {}, None, (0.131359, 0.794664, 0.274785, 0.121640, 0.099197, 0.104103, 0.079510)),
    "dppo_tv_0.15_cap5": ("dppo_tv_cap5", {}, None, (0.132653, 0.904113, 0.190543, 0.076134, 0.099197, 0.104103, 0.079510)),
    "trm_max_0.3": ("trm_max", {"delta": 0.3}, None, (0.113446, 0.840204, 0.264953, 0.264953, 0.093362, 0.264953, 0.264953)),
    "trm_avg_0.152": ("trm_avg", {"delta": 0.152}, None, (0.117688, 0.825282, 0.308221, 0.308221, 0.093362, 0.264953, 0.264953)),
    "trm_both_0.3_0.152": ("trm_combined", {"delta_max": 0.3, "delta_avg": 0.152}, None,
                           (0.117688, 0.825282, 0.308221, 0.308221, 0.093362, 0.264953, 0.264953)),
    "raw_seq_is": (SEQUENCE_IS, {}, None, (0, 1.0, 0, 0, 0, 0, 0)),
    "score_centering": ("score_centering", {}, None, (0.136378, 0.759898, 0, 0, 0.111395, 0, 0)),
    "tis_sc_C2": ("tis_sc", {}, None, (0.125640, 0.797033, 0, 0, 0.100419, 0, 0)),
    "mis_sc_0.5_5": ("mis_sc", {}, None, (0.136163, 0.755758, 0, 0, 0.102229, 0, 0)),
    "ppo_sc_0.8_1.2": ("ppo_sc", {"eps": 0.2}, None, (0.124231, 0.855360, 0, 0, 0.105774, 0, 0)),
    "tis_uncentred_C2": (TIS, {}, None, (0.117608, 0.825320, 0.118524, 0.118524, 0.099566, 0.041641, 0.041641)),
    "mis_uncentred_0.5_5": (MIS, {}, None, (0.135817, 0.757026, 0.103905, 0.103905, 0.105940, 0.079510, 0.079510)),
    "score_centering_top2": ("score_centering", {}, 2, (0.136378, 0.759898, 0, 0, 0.111395, 0, 0)),
    "tis_sc_C2_top2": ("tis_sc", {}, 2, (0.125640, 0.797033, 0, 0, 0.100419, 0, 0)),
    "mis_sc_0.5_5_top2": ("mis_sc", {}, 2, (0.136163, 0.755758, 0, 0, 0.102229, 0, 0)),
    "score_centering_top1": ("score_centering", {}, 1, (0.136217, 0.763950, 0.236711, 0.236711, 0.109196, 0.076536, 0.076536)),
    "tis_sc_C2_top1": ("tis_sc", {}, 1, (0.117608, 0.825320, 0.118524, 0.118524, 0.099566, 0.041641, 0.041641)),
    "mis_sc_0.5_5_top1": ("mis_sc", {}, 1, (0.131535, 0.774378, 0.121640, 0.121640, 0.102229, 0, 0)),
}  # fmt: skip

TOKENS = np.array([[i, j] for i in range(3) for j in range(3)])
CONTEXTS = np.array([[0, 1 + i] for i in range(3) for j in range(3)])
ZERO = 1e-12


def expectation(name: str, A: np.ndarray, setting: str) -> np.ndarray:
    """E_mu[dJ/dlogits], [4, 3], with weight 1 per token: all nine answers at once, each times its probability under mu."""
    spec, params, k, _ = ROWS[name]
    pi, prox, mu = (POLICIES[p] for p in ("pi", "prox", "mu"))
    mu = prox if setting == "B" else mu
    prox, mu = (pi, pi) if setting == "C" else (prox, mu)
    loss_fn = instance(spec, **params) if ":" not in spec else loss_class(spec)(compile=False, **params)
    at = {p: torch.tensor(np.log(x[CONTEXTS])) for p, x in (("pi", pi), ("prox", prox), ("mu", mu))}
    tokens = torch.tensor(TOKENS)
    sampled = {p: x.gather(-1, tokens[..., None])[..., 0] for p, x in at.items()}
    logits = at["pi"].clone().requires_grad_()
    given: dict[str, Any] = {"mu_logprobs": at["mu"]}
    if k is not None:
        ids = torch.tensor(np.argsort(-mu[CONTEXTS], axis=-1, kind="stable")[..., :k].copy())
        given = {"mu_topk_ids": ids, "mu_topk_logprobs": at["mu"].gather(-1, ids)}
    advantages = torch.tensor(A) if loss_fn.ADVANTAGES != "token" else torch.tensor(A)[:, None].expand(9, 2)
    counts = dict.fromkeys(("n_tokens", "n_seqs", "n_groups"), 1.0)
    out = loss_fn.from_logits(logits, tokens, mask=torch.ones(9, 2, dtype=torch.bool), advantages=advantages, prox_logp=sampled["prox"],
                              mu_logp=sampled["mu"], counts=counts, **given)  # fmt: skip
    out.loss.backward()
    assert logits.grad is not None
    gradient = -logits.grad.numpy()
    per_token = 2.0 if loss_fn_divides_by_length(loss_fn) else 1.0  # all lengths are 2: lambda = 1 per token
    probability = np.exp(sampled["mu"].sum(-1).numpy())
    total = np.zeros((4, 3))
    for answer in range(9):
        for t in range(2):
            total[CONTEXTS[answer, t]] += probability[answer] * per_token * gradient[answer, t]
    return total


def loss_fn_divides_by_length(loss_fn: Any) -> bool:
    return "length" in loss_fn._arguments["before"]


def true_gradient() -> np.ndarray:
    return np.array(ORACLE["true_gradient"])


REWARD = (R - BASELINE)[TOKENS[:, 0], TOKENS[:, 1]]


@pytest.mark.parametrize("name", ROWS)
def test_bias_and_drift(name: str) -> None:
    expected = ROWS[name][3]
    found = []
    for setting in ("A", "B"):
        mean = expectation(name, REWARD, setting)
        bias = np.linalg.norm(mean - true_gradient())
        cosine = (
            [(mean * true_gradient()).sum() / np.linalg.norm(mean) / np.linalg.norm(true_gradient())]
            if setting == "A"
            else []
        )
        drift = [np.linalg.norm(expectation(name, np.full(9, sign), setting)) for sign in (1.0, -1.0)]
        found += [bias, *cosine, *drift]
    assert found == pytest.approx(expected, abs=6e-7)
    for value, wanted in zip(found, expected, strict=True):
        assert wanted != 0 or value < ZERO


@pytest.mark.parametrize("name", ORACLE["rows"])
def test_vectors(name: str) -> None:
    row = ORACLE["rows"][name]
    assert expectation(name, REWARD, "A") == pytest.approx(np.array(row["E_grad"]), abs=1e-10)
    assert expectation(name, np.ones(9), "A") == pytest.approx(np.array(row["drift_pos"]), abs=1e-10)


@pytest.mark.parametrize("name", ROWS)
def test_on_policy_there_is_no_bias_and_no_drift(name: str) -> None:
    assert np.abs(expectation(name, REWARD, "C") - true_gradient()).max() < 1e-15
    assert np.abs(expectation(name, np.ones(9), "C")).max() < 1e-15


def test_with_c_equal_to_one_the_two_ratio_methods_are_the_first_one() -> None:
    reference = expectation("grpo_0.8_1.2", REWARD, "B")
    for name in (
        "decoupled_ppo_0.8_1.2",
        "token_tis_C2",
        "icepop_0.5_5",
        "seq_tis_C2",
        "seq_mis_C2",
        "geo_mis_0.8_1.25",
    ):
        assert np.array_equal(expectation(name, REWARD, "B"), reference)
    assert expectation("scalerl_dapo_0.8_1.26", REWARD, "B") == pytest.approx(
        expectation("dapo_0.8_1.28", REWARD, "B"), abs=1e-15
    )
    assert expectation("scalerl_gspo_0.8_1.26", REWARD, "B") == pytest.approx(
        expectation("gspo_0.8_1.28", REWARD, "B"), abs=1e-15
    )


def test_positive_answers_are_reinforced_plainly_by_the_tapered_method() -> None:
    assert np.array_equal(expectation("topr", np.ones(9), "A"), expectation("reinforce", np.ones(9), "A"))


def test_centring_is_blind_to_a_constant_reward() -> None:
    shifted = expectation("score_centering", REWARD + 3, "A")
    assert shifted == pytest.approx(expectation("score_centering", REWARD, "A"), abs=1e-15)
    assert np.abs(expectation("reinforce", REWARD + 3, "A") - expectation("reinforce", REWARD, "A")).max() > 0.1
