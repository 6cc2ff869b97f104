"""Properties and warnings: what the review and the exact expectations say of each method, as data."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from helpers import method
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_fuzz import expressions

import lossdsl
from lossdsl.api import find
from lossdsl.diff.assume import NOTHING, assume
from lossdsl.diff.properties import properties
from lossdsl.diff.side import Side, sides
from lossdsl.errors import SpecError
from lossdsl.lint import lint
from lossdsl.method import lower_spec
from lossdsl.reference import Batch, per_token
from lossdsl.specdoc import read_spec


def side(name: str, *assumptions: str) -> Side:
    m = lower_spec(read_spec(find(name))) if name in lossdsl.builtins() else method(name)
    return sides(m, m, assume(assumptions, m.doc))[0]


# Drift under three policies that all differ, and where c = 1: the exact-expectation table of the fidelity notes.
ZERO = ["raw_is", "score_centering", "tis_sc", "mis_sc", "ppo_sc"]
NOT_ZERO = ["reinforce", "grpo", "dual_clip_ppo", "dapo", "gspo", "cispo", "cispo_masked", "decoupled_ppo", "token_tis", "icepop",
            "seq_tis", "seq_mis", "geo_mis", "deepseek_v32_mask", "scalerl_dapo", "scalerl_gspo", "scalerl_cispo", "pipelinerl",
            "sao", "topr", "dppo_tv", "dppo_kl", "dppo_tv_cap5", "trm_max", "trm_avg", "trm_combined"]  # fmt: skip


@pytest.mark.parametrize("name", ZERO)
def test_importance_sampling_and_centring_have_no_drift(name: str) -> None:
    assert properties(side(name)).drift == "zero"


@pytest.mark.parametrize("name", NOT_ZERO)
def test_a_cap_or_a_mask_has_drift_unless_on_policy(name: str) -> None:
    assert properties(side(name)).drift == "zero on-policy only"


def test_raw_decoupled_weights_have_no_drift_without_the_clip() -> None:
    assert properties(side("f: c\nT: r")).drift == "zero"
    assert properties(side("f: r")).drift == "zero if c = 1"


def test_only_the_product_over_the_answer_is_unbiased() -> None:
    """Rule 3 of the table: off-policy, no other row is unbiased; on-policy all are."""
    assert properties(side("f: prod_t(rho)")).bias == "unbiased"
    assert properties(side("f: prod_t(r)")).bias == "unbiased if c = 1"
    for name in (*ZERO, *NOT_ZERO):
        assert properties(side(name)).bias == "unbiased on-policy only"


# |W| grows without end: read off each method's gradient in the review.
CORNERS = {
    **dict.fromkeys(["reinforce", "cispo", "scalerl_cispo", "pipelinerl", "sao", "sao_swe", "topr", "score_centering", "tis_sc", "mis_sc",
                     "dual_clip_ppo", "dppo_tv_cap5", "dppo_kl_cap5", "cispo_masked", "sapo", "rec_twoside"], ()),
    **dict.fromkeys(["grpo", "dapo", "gspo", "token_tis", "icepop", "seq_tis", "seq_mis", "geo_mis", "gspo_token", "dr_grpo", "rloo"],
                    ("A < 0, r → ∞",)),
    **dict.fromkeys(["scalerl_dapo", "scalerl_gspo", "ppo_sc"], ("A < 0, rho → ∞",)),
    **dict.fromkeys(["dppo_tv", "dppo_kl", "trm_max", "trm_avg", "ipo", "raw_is"], ("rho → ∞",)),
    "decoupled_ppo": ("A < 0, r → ∞", "c → ∞"),
}  # fmt: skip


@pytest.mark.parametrize("name", CORNERS)
def test_the_corners_in_which_a_weight_is_unbounded(name: str) -> None:
    assert tuple(sorted(properties(side(name)).unbounded)) == CORNERS[name]


TRUST = {
    **dict.fromkeys(["reinforce", "cispo", "scalerl_cispo", "pipelinerl", "topr", "score_centering", "tis_sc", "raw_is", "sapo"], "none"),
    **dict.fromkeys(["grpo", "dapo", "gspo", "decoupled_ppo", "token_tis", "icepop", "seq_mis", "dual_clip_ppo"], "masks r"),
    **dict.fromkeys(["scalerl_dapo", "sao", "dppo_tv", "dppo_kl", "trm_max", "mis_sc"], "masks rho"),
    "f: r if A > 0 or r > 0.8 else 0": "masks r for A < 0 only",
}  # fmt: skip


@pytest.mark.parametrize("name", TRUST)
def test_where_a_far_token_is_silenced(name: str) -> None:
    assert properties(side(name)).trust_region == TRUST[name]


def test_an_assumption_restricts_the_question() -> None:
    assert properties(side("decoupled_ppo", "c = 1")).unbounded == ("A < 0, r → ∞",)
    assert properties(side("scalerl_dapo", "c = 1")).needs == ("advantages", "mu_logp")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(expressions(["r", "c", "rho", "1", "0.5", "2", "A", "prod_t(c)", "geomean_t(r)"]), st.integers(0, 10**6))
def test_a_weight_called_bounded_does_not_grow_far_out(f: str, seed: int) -> None:
    """One ratio anywhere beyond e**9, the other anywhere near 1: |W| stays what it is at e**9."""
    try:
        s = side(f"f: {f}")
    except SpecError:
        return
    if properties(s).unbounded:
        return
    rng = np.random.default_rng(seed)
    near, n = rng.uniform(-0.5, 0.5, 200), 200
    for ratio, direction, sign in product(("r", "c"), (1, -1), (1, -1)):
        sizes = []
        for far in (np.full(n, 9.0), rng.uniform(9, 18, n)):
            log_r, log_c = (direction * far, near) if ratio == "r" else (near, direction * far)
            mu = -np.maximum(np.maximum(log_c, log_r + log_c), 0.0) - 0.1
            logp = {"pi": mu + log_c + log_r, "prox": mu + log_c, "mu": mu, "ref": mu}
            batch = Batch(np.arange(n), n, logp=logp, values={"A": np.ones(n)})
            sizes.append(float(np.abs(per_token(s.weight(sign), batch, {})).max()))
        assert sizes[1] <= 2 * max(sizes[0], 1.0)


# --- warnings ------------------------------------------------------------------------------------------------------------------


def codes(text: str) -> list[str]:
    return [d.code for d in lossdsl.check_text(f"lossdsl: 1\nname: probe\n{text}\nnormaliser: token_mean\n")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("f: rho", ["W0702"]),
        ("# lossdsl: allow W0702  meant\nf: rho", []),
        ("f: rho  # lossdsl: allow W0702 meant", []),
        ("# lossdsl: allow W0703\nf: rho", ["W0702"]),
        ("f: min(rho, 5)", []),
        ("f: c\nT: clip(r, 0.8, 1.2)", ["W0702"]),
        ("T: M(r, 0.8, 1.2) * r * 1[not (A < 0 and r > 3)]", []),
        ("f: min(rho, 2) * 1[A > 0]", ["W0703"]),
        ("f: clip(rho, 0, 1.28)", ["W0704"]),
        ("f: clip(rho, 0.1, 1.28)", []),
        ("f: min(c, 10) * 1[c <= 5]", ["W0704"]),
        ("f: min(c, 4) * 1[c <= 5]", []),
        ("f: min(rho, 2)\nkappa: 0.5", ["W0705"]),
        ("f: min(rho, 2)\nkappa: 1", []),
        ("f: clip(r * c, 0.1, 2)", ["W0706"]),
        ("f: clip(c, 0.1, 2)\nT: min(r, 2)", []),
        ("f: min(rho, 2) * (pi / pi)", ["W0706"]),
        ("f: min(rho, 2) + k1(ref, ref)", ["W0706"]),
        ("params: {eps: 0.2}\nf: min(rho, 2) ** (eps / eps)", ["W0707"]),
        ("params: {eps: 0.2}\nf: min(rho, 2) if rho > -eps else eps", ["W0707"]),
        ("params: {eps: 0.2}\nf: min(rho, 2 + eps)", []),
    ],
)
def test_a_warning_is_given_for_what_is_true_and_for_nothing_else(text: str, found: list[str]) -> None:
    assert codes(text) == found


@pytest.mark.parametrize("name", lossdsl.builtins())
def test_built_ins_have_no_warning_that_is_not_allowed_with_a_reason(name: str) -> None:
    assert lossdsl.check(name) == ()
    text = find(name).text
    for line in text.splitlines():
        if "lossdsl: allow" in line:
            assert len(line.split("allow", 1)[1].split()) > 4, f"{name}: an allowance without a reason: {line}"


@pytest.mark.parametrize("name", lossdsl.builtins())
def test_every_allowance_of_a_built_in_is_needed(name: str) -> None:
    m = lower_spec(read_spec(find(name)))
    given = {(code, line) for code, line in m.doc.allow}
    raised = {(d.code, d.place[1] - 1) for d in lint(m)}
    assert given == raised


def test_lint_and_properties_do_not_depend_on_the_order_of_calls() -> None:
    s = side("grpo")
    assert properties(s) == properties(side("grpo")) and Side(s.label, s.method, NOTHING, False).free == ()
