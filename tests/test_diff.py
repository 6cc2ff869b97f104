"""The diff tells the stories that the review tells, finds what trainers' users asked about, and claims only what holds.

Expected weights, bounds and identities are those of the review's tables, of the field cases and of the exact
identities between methods; none comes from the diff itself.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from helpers import method
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_fuzz import GROUP, SEQUENCE, TOKEN, VOCAB, expressions

import lossdsl
from lossdsl import ir
from lossdsl.api import find
from lossdsl.axes import Axis
from lossdsl.diff.assume import NOTHING, assume
from lossdsl.diff.naming import spell
from lossdsl.diff.report import Diff, compare
from lossdsl.diff.side import Side, sides
from lossdsl.diff.verdict import find_witness, judge, random_batch
from lossdsl.diff.words import region_text
from lossdsl.errors import SpecError
from lossdsl.method import Method, advantage_of, lower_spec
from lossdsl.reference import Batch, evaluate, per_token
from lossdsl.simplify import simplify
from lossdsl.specdoc import read_spec

METHODS = {name: lower_spec(read_spec(find(name))) for name in lossdsl.builtins()}


def spec(name: str, *changes: tuple[str, str]) -> Method:
    """A built-in with parts of its text replaced; every part must be there."""
    text = find(name).text
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return method(text)


def knobs(diff: Diff) -> dict[str, tuple[str, str]]:
    return {k.name: (k.a, k.b) for k in diff.knobs}


def rows(diff: Diff, sign: int) -> dict[str, tuple[str, str]]:
    return {region_text(c): c.actions for c in diff.cases if c.sign == sign}


def weights(diff: Diff, sign: int, **at: float) -> tuple[float, float]:
    """Both weights where the quantities have these values, from the one row that holds there."""
    found = []
    for case in diff.cases:
        named = {region_text(replace(case, where={q: i}, also=frozenset())): (q, i) for q, i in case.where.items()}
        inside = True
        for q, interval in named.values():
            x = at[spell(q)]
            low, high = interval.low, interval.high
            inside &= low is None or x > low[0] or (low[2] and x == low[0])
            inside &= high is None or x < high[0] or (high[2] and x == high[0])
        if case.sign == sign and inside:
            found.append(case)
    (case,) = found
    batch = _one_token(**{k: v for k, v in at.items() if k in ("r", "c", "rho")})
    return tuple(float(per_token(w, batch, {})[0]) for w in case.weights)  # type: ignore[return-value]


def _one_token(r: float = 1.0, c: float = 1.0, rho: float | None = None) -> Batch:
    r = rho / c if rho is not None else r
    mu = math.log(0.1) - max(0.0, math.log(c), math.log(r * c))
    logs = {"mu": mu, "prox": mu + math.log(c), "pi": mu + math.log(c) + math.log(r), "ref": mu}
    return Batch(np.zeros(1, int), 1, logp={k: np.array([v]) for k, v in logs.items()})


# --- the review's stories ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sign", "r", "dapo", "cispo"),
    [(1, 1.1, 1.1, 1.1), (1, 1.5, 0.0, 1.28), (1, 0.6, 0.6, 0.8), (-1, 0.6, 0.0, 0.8), (-1, 3.0, 3.0, 1.28)],
)
def test_the_review_s_table_of_masked_and_truncated(sign: int, r: float, dapo: float, cispo: float) -> None:
    diff = compare(METHODS["dapo"], METHODS["cispo"])
    assert weights(diff, sign, r=r) == pytest.approx((dapo, cispo))


def test_masked_and_truncated_in_six_rows() -> None:
    diff = compare(METHODS["dapo"], METHODS["cispo"])
    inside = ("kept", "kept")
    assert rows(diff, 1) == {"r < 0.8": ("kept", "raised"), "0.8 ≤ r ≤ 1.28": inside, "r > 1.28": ("masked", "capped")}
    assert rows(diff, -1) == {"r < 0.8": ("masked", "raised"), "0.8 ≤ r ≤ 1.28": inside, "r > 1.28": ("kept", "capped")}


def test_dual_clip_differs_only_for_bad_tokens_that_went_up() -> None:
    diff = compare(METHODS["grpo"], METHODS["dual_clip_ppo"])
    (row,) = [c for c in diff.cases if not c.same]
    assert (row.sign, region_text(row), row.actions) == (-1, "r > 3", ("kept", "masked"))
    assert compare(METHODS["grpo"], METHODS["dual_clip_ppo"], ["A > 0"]).equal
    assert compare(METHODS["grpo"], METHODS["dual_clip_ppo"], ["r <= 3"]).equal


def test_a_test_on_probabilities_against_a_test_on_the_ratio() -> None:
    """The review's two examples: 0.001 -> 0.003 is clipped by the ratio though it barely moved; 0.99 -> 0.80 is not."""
    diff = compare(METHODS["grpo"], METHODS["dppo_tv"], ["c = 1"])
    found = {(c.sign, round(dict(c.sample)["prox"], 6), round(dict(c.sample)["pi"], 6)): c for c in diff.cases}
    assert found[1, 0.001, 0.003].actions == ("masked", "kept")
    assert found[1, 0.001, 0.003].values == pytest.approx((0.0, 3.0))
    assert found[-1, 0.99, 0.8].actions == ("kept", "masked")
    assert found[-1, 0.99, 0.8].values == pytest.approx((0.80808, 0.0), abs=1e-5)


def test_a_capped_and_a_banded_correction() -> None:
    diff = compare(METHODS["token_tis"], METHODS["icepop"])
    assert weights(diff, 1, r=1.1, c=3.0) == pytest.approx((2 * 1.1, 3 * 1.1))
    assert weights(diff, 1, r=1.1, c=9.0) == pytest.approx((2 * 1.1, 0.0))
    assert weights(diff, -1, r=0.9, c=0.4) == pytest.approx((0.4 * 0.9, 0.0))
    assert diff.verdict.also == ("c = 1", "on_policy")


def test_tapering_against_truncation() -> None:
    diff = compare(METHODS["topr"], METHODS["pipelinerl"])
    assert rows(diff, 1) == {"rho ≤ 1.02": ("kept", "kept"), "rho > 1.02": ("kept", "capped")}
    assert {c.values[0] for c in diff.cases if c.sign == 1} == {1.0}  # no importance weight for good answers
    assert all("prod_t(rho)" in region_text(c) for c in diff.cases if c.sign == -1)


def test_a_cap_and_a_rejection_of_answers() -> None:
    diff = compare(METHODS["seq_tis"], METHODS["seq_mis"])
    differing = {(c.sign, region_text(c)): c.actions for c in diff.cases if not c.same}
    assert differing == {
        (1, "r ≤ 1.2, prod_t(c) > 2"): ("capped", "masked"),
        (-1, "r ≥ 0.8, prod_t(c) > 2"): ("capped", "masked"),
    }


def test_centring_is_shown_as_such() -> None:
    diff = compare(METHODS["tis_sc"], METHODS["scalerl_cispo"])
    assert "centring" in diff.verdict.differing and knobs(diff)["kappa"] == ("1", "0")
    assert "tis_sc also subtracts Σ_v μ(v) · W_v · ∇log π(v)" in lossdsl.diff_text(diff)


# --- identities ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decoupled_ppo", "token_tis", "icepop", "seq_tis", "seq_mis", "geo_mis"])
def test_where_c_is_1_the_two_ratio_methods_are_grpo(name: str) -> None:
    diff = compare(METHODS["grpo"], METHODS[name], ["c = 1"])
    assert diff.equal and diff.verdict.proved
    assert not compare(METHODS["grpo"], METHODS[name]).equal


@pytest.mark.parametrize(
    ("one", "other"), [("scalerl_dapo", "dapo"), ("scalerl_gspo", "gspo"), ("scalerl_cispo", "cispo_cap")]
)
def test_where_c_is_1_rho_is_r(one: str, other: str) -> None:
    """With the same bounds, the one-ratio losses are those of r; what is left is on the data side."""
    values = {"scalerl_dapo": {"eps_low": 0.2, "eps_high": 0.28}, "scalerl_gspo": {"eps_low": 3e-4, "eps_high": 4e-4}}
    cap = next(iter(lossdsl.params("cispo_cap")))
    values["scalerl_cispo"] = {"eps_max": lossdsl.params("cispo_cap")[cap] or 0.0}
    diff = lossdsl.compare(one, other, assume=["c = 1"], params_a=values[one])
    assert diff.verdict.kind in ("equal", "data") and diff.verdict.proved


def test_a_good_answer_has_no_ratio_in_topr() -> None:
    diff = compare(METHODS["topr"], METHODS["reinforce"], ["A > 0"])
    assert diff.verdict.kind == "data" and diff.verdict.proved and diff.verdict.differing == ("advantage",)


def test_one_token_mean_or_one_per_prompt_is_one_knob() -> None:
    """Field case N4."""
    diff = compare(METHODS["dapo"], spec("dapo", ("normaliser: token_mean", "normaliser: group_token_mean")))
    assert diff.verdict.differing == ("normaliser",)
    assert list(knobs(diff)) == ["normaliser"]
    a, b = knobs(diff)["normaliser"]
    assert "token_mean" in a and "group_token_mean" in b


def test_the_denominator_after_a_rejection_is_one_knob() -> None:
    """Field case N7: the same loss over the kept tokens."""
    kept = ("normaliser: seq_mean_token_mean", "normaliser: 1 / (n_seqs * sum_t(1[f != 0]))")
    diff = compare(METHODS["icepop"], spec("icepop", kept))
    assert diff.verdict.differing == ("normaliser",)
    a, b = knobs(diff)["normaliser"]
    assert "rejected tokens stay counted" in a and "kept tokens only" in b


def test_the_sign_of_the_advantage_is_named() -> None:
    """Field case G3: pi = 0.80, mu = 0.99, A > 0 is kept by one and masked by the other."""
    diff = lossdsl.compare("dppo_tv", "ipo", params_b={"eps": 0.15, "tau": 0})
    assert knobs(diff)["sign of A"] == ("matters", "does not matter")
    (row,) = [c for c in diff.cases if c.sign == 1 and not c.same]
    assert row.actions == ("kept", "masked") and region_text(row) == "rho ≤ 1, binary_tv(pi, mu) > 0.15"


def test_product_or_geometric_mean_is_named() -> None:
    """Field case G4."""
    diff = compare(METHODS["topr"], spec("topr", ("prod_t(rho)", "geomean_t(rho)")))
    a, b = knobs(diff)["ratios"]
    assert a.startswith("product of rho") and b.startswith("geometric mean of rho")


def test_a_missing_bound_is_visible() -> None:
    """Field case G7: a band without its lower end keeps what lies below it."""
    only_above = spec(
        "icepop",
        ("1[alpha <= c <= beta]", "1[c <= beta]"),
        ("1[c in [alpha, beta]]", "1[c <= beta]"),
        ("  alpha: {default: 0.5, min: 0, doc: lower end of the band on c}\n", ""),
    )
    diff = compare(METHODS["icepop"], only_above)
    assert {region_text(c) for c in diff.cases if not c.same} == {"c < 0.5, r ≤ 1.2", "c < 0.5, r ≥ 0.8"}


@pytest.mark.parametrize(
    "objective",
    [
        "-max(-r * A, -clip(r, 0.8, 1.2) * A)",
        "-max(-A * exp(log(pi) - log(prox)), -A * clip(exp(log(pi) - log(prox)), 0.8, 1.2))",
        "r * A if (A > 0 and r <= 1.2) or (A < 0 and r >= 0.8) else (1.2 * A if A > 0 else 0.8 * A)",
        "min(pi / prox, 1.2) * A if A > 0 else max(pi / prox, 0.8) * A",
        "sg(r * 1[not (A > 0 and r > 1.2) and not (A < 0 and r < 0.8)]) * A * log(pi)",
        "sg(r) * A * log(pi) * 1[log(r) <= log(1.2) if A > 0 else log(r) >= log(0.8)]",
        "(A + abs(A)) / 2 * min(r, 1.2) - (abs(A) - A) / 2 * max(r, 0.8)",
        "rho / c * A if r in [0.8, 1.2] else (r * A if (r - 1) * A < 0 else sg(r) * A)",
    ],
)
def test_ways_to_write_the_clipped_surrogate_are_one(objective: str) -> None:
    text = f"objective: {objective}\nnormaliser: 1 / len / n_seqs"
    verdict = compare(
        method("objective: min(r * A, clip(r, 0.8, 1.2) * A)\nnormaliser: 1 / (n_seqs * len)"), method(text)
    ).verdict
    assert verdict.equal and verdict.proved


def test_spelling_is_no_difference() -> None:
    one = method("objective: sg(clip(r, 0.8, 1.2)) * A * log(pi)")
    other = method("params: {eps: 0.2}\nobjective: sg(min(max(r, 1 - eps), 1 + eps)) * A * log(pi)")
    diff = compare(one, other)
    assert diff.equal and diff.verdict.proved and not diff.knobs


def test_an_open_and_a_closed_interval_differ_on_the_bound_alone() -> None:
    closed = spec("sao", ("low < rho < high", "low <= rho <= high"), ("(low, high)", "[low, high]"))
    diff = compare(METHODS["sao"], closed)
    assert diff.verdict.kind == "bound"
    assert {region_text(c) for c in diff.cases if not c.same} == {"rho = 0.7", "rho = 6"}


def test_a_constant_factor_is_named() -> None:
    diff = compare(method("f: min(rho, 2)"), method("f: 3 * min(rho, 2)"))
    assert diff.verdict.kind == "factor" and diff.json()["verdict"]["factor"] == repr(1 / 3)
    diff = compare(method("f: rho\nnormaliser: sum"), method("f: rho\nnormaliser: token_mean"))
    assert diff.json()["verdict"]["factor"] == "n_tokens"


# --- all pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_method_equals_itself_and_its_own_objective(name: str) -> None:
    m = METHODS[name]
    assert compare(m, m).equal
    if m.W is not None and m.doc.objective is not None:
        by_objective = replace(m, T=None, f=None, W=None)
        verdict = judge(sides(m, by_objective, NOTHING))
        assert verdict.kind == "equal" and verdict.proved


def pair(a: str, b: str) -> None:
    one, other = compare(METHODS[a], METHODS[b]), compare(METHODS[b], METHODS[a])
    assert one.verdict.kind == other.verdict.kind
    assert set(one.verdict.differing) == set(other.verdict.differing)
    assert one.verdict.also == other.verdict.also
    back = {(c.sign, region_text(c), c.actions[::-1], c.same) for c in other.cases}
    assert {(c.sign, region_text(c), c.actions, c.same) for c in one.cases} == back
    assert lossdsl.diff_text(one) and one.json()["schema"] == "lossdsl.diff/1"
    if one.verdict.witness is not None:
        confirm(one)


def confirm(diff: Diff) -> None:
    """The reference evaluator gives both gradients of the witness again, from the methods themselves."""
    w = diff.verdict.witness
    assert w is not None
    found = [
        _coefficient(side, w.batch, w.token) if w.entry is None else _entry(side, w.batch, w.token, w.entry)
        for side in (diff.a, diff.b)
    ]
    assert found == pytest.approx(w.gradients, rel=1e-9)
    assert abs(found[0] - found[1]) > 1e-8 * max(map(abs, found))


def _coefficient(side: Side, batch: Batch, t: int) -> float:
    """d J / d log pi of the sampled token t."""
    own = advantage_of(side.method) is side.A  # else the other side's advantage is per token
    root = side.method.gradient.coef if own else side.coef
    return float(per_token(root, batch, {**side.values, **_numbers(side.method)})[t])


def _entry(side: Side, batch: Batch, t: int, v: int) -> float:
    """d J / d log pi(v) at token t, of the sums over the vocabulary."""
    params = {**side.values, **_numbers(side.method)}
    total = 0.0
    for term in side.method.gradient.sums:
        slope = batch.spread(evaluate(term.slope, batch, params), term.slope.axis, Axis.VOCAB)
        slope = np.broadcast_to(slope, batch.logp_v["pi"].shape)
        total += float(per_token(term.cotangent, batch, params)[t] * slope[t, v])
    return total


def _numbers(m: Method) -> dict[str, float]:
    return {k: v for k, v in m.defaults.items() if v is not None}


NEIGHBOURS = [(a, b) for i, (a, b) in enumerate(combinations(METHODS, 2)) if i % 23 == 0]


@pytest.mark.parametrize(("a", "b"), NEIGHBOURS)
def test_a_pair_diffs_without_trouble_and_symmetrically(a: str, b: str) -> None:
    pair(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("a", METHODS)
def test_every_pair_diffs_without_trouble_and_symmetrically(a: str) -> None:
    for b in list(METHODS)[list(METHODS).index(a) + 1 :]:
        pair(a, b)


# --- laws -----------------------------------------------------------------------------------------------------------------

EQUALS = [
    *((("grpo", name), "c = 1") for name in ("decoupled_ppo", "token_tis", "icepop", "seq_tis", "seq_mis", "geo_mis")),
    (("grpo", "dual_clip_ppo"), "A > 0"),
    (("grpo", "dual_clip_ppo"), "r <= 3"),
    (("lite_ppo", "reinforce_pp_baseline"), ""),
]


@pytest.mark.parametrize(("names", "assumption"), EQUALS)
def test_what_is_called_equal_survives_a_hundred_thousand_samples(names: tuple[str, str], assumption: str) -> None:
    a, b = (METHODS[n] for n in names)
    pair = sides(a, b, assume([assumption] if assumption else [], a.doc))
    assert judge(pair).kind in ("equal", "data")
    rng = np.random.default_rng(0)
    batch = random_batch(pair, 0)
    seen = 0
    while seen < 100_000:
        n = 5000
        # many answers of wild lengths and ratios, some exactly on a bound or at 1
        lengths = rng.integers(1, 9, n)
        seq = np.repeat(np.arange(n), lengths)
        size = len(seq)
        logs = {"mu": -rng.exponential(2.0, size)}
        jump = np.array([0.0, 0.0, math.log(0.8), math.log(1.2), math.log(2), math.log(0.5), math.log(3)])
        for above, below in (("prox", "mu"), ("pi", "prox")):
            move = np.where(
                rng.random(size) < 0.3, rng.choice(jump, size), rng.normal(0, rng.choice([0.01, 0.4, 3.0]), size)
            )
            logs[above] = np.minimum(logs[below] + move, 0.0)
        logs["ref"] = logs["mu"]
        merged = pair[0].assumption.merged
        wild = replace(
            batch, seq=seq, n_seqs=n, group=np.arange(n) // 8, segment=None, counts={},
            logp={p: logs[merged[p]] for p in logs}, values={"A": rng.choice([-2.0, -0.5, 0.0, 1.0, 3.0], n)},
        )  # fmt: skip
        one, other = (per_token(s.coef, wild, {}) for s in pair)
        held = np.ones(size, bool)
        for condition in pair[0].conditions:
            held &= per_token(ir.where(condition, ir.ONE, ir.ZERO), wild, {}) > 0
        np.testing.assert_allclose(one[held], other[held], rtol=1e-9, atol=0)
        seen += int(held.sum())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(expressions([*TOKEN, *SEQUENCE, *GROUP, *VOCAB]))
def test_a_random_weight_equals_itself_and_the_claims_about_its_double_hold(f: str) -> None:
    try:
        one = method(f"params:\n  eps: 0.3\nf: {f} + 0 * eps\n")
        double = method(f"params:\n  eps: 0.3\nf: 2 * ({f}) + 0 * eps\n")
    except SpecError:
        return
    assert compare(one, one).equal
    diff = compare(one, double)
    if diff.verdict.witness is not None:
        confirm(diff)
    else:  # only a weight of 0 equals its double
        batch = random_batch((diff.a, diff.b), 3)
        assert not per_token(diff.a.coef, batch, {"eps": 0.3}).any()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(expressions([*TOKEN, *SEQUENCE, *VOCAB]))
@example("-(sigmoid((r if 2 < r else pi)))")
@example("1[log(r) in [log(0.5), len / 7)] * sigmoid(r)")
def test_a_random_weight_equals_its_simplified_self(f: str) -> None:
    """The rewrites of the emitter keep the meaning, so no diff may tell the two apart."""
    try:
        m = method(f"params:\n  eps: 0.3\nf: {f} + 0 * eps\n")
    except SpecError:
        return
    assert m.W is not None
    (simple,) = simplify((m.W,), {}, {})
    assert compare(m, replace(m, W=simple)).equal


def test_a_weight_that_depends_on_the_size_of_the_advantage_says_so() -> None:
    diff = compare(method("f: tanh(A) * rho"), method("f: rho"))
    assert diff.notes == ("the weight of probe (a) depends on the size of A; shown at |A| = 1",)
    assert diff.verdict.kind == "differ"


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([0.7, 0.8, 0.95, 1.05, 1.2, 2.0, 4.0]),
    st.sampled_from([0.9, 1.01, 1.3]),
    st.sampled_from(["1[x <= {}] * x", "min(x, {})", "x if x < {} else 0", "clip(x, 0.01, {})"]),
    st.sampled_from(["r", "c", "rho", "prod_t(c)", "geomean_t(r)"]),
)
def test_a_changed_bound_is_found_and_the_edge_reported_is_the_changed_one(
    bound: float, factor: float, form: str, quantity: str
) -> None:
    moved = round(bound * factor, 6)
    one, other = (method(f"f: {form.format(x).replace('x', quantity)}") for x in (bound, moved))
    diff = compare(one, other)
    assert diff.verdict.kind == "differ"
    edges = {
        round(end[0], 9) for c in diff.cases if not c.same for i in c.where.values() for end in (i.low, i.high) if end
    }
    assert {bound, moved} <= edges
    assert all(
        not c.same
        or all(
            not (i.low and i.high and {round(i.low[0], 9), round(i.high[0], 9)} == {bound, moved})
            for i in c.where.values()
        )
        for c in diff.cases
    )


def test_no_witness_is_found_where_both_are_the_same() -> None:
    points, witness = find_witness(sides(METHODS["vaco"], METHODS["vaco"], NOTHING))
    assert witness is None and points > 300
