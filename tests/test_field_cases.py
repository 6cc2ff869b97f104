"""Bugs that people met in the field, each with the right value worked out by hand.

One test per case, in the order of the collection that they come from: what went wrong elsewhere is in the docstring.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import NAN, instance, loss_class, method, run

import lossdsl
from lossdsl.errors import SpecError

LN = math.log


def close(x: object, tolerance: float = 1e-6) -> object:
    return pytest.approx(x, abs=tolerance)


def plain(normaliser: str) -> str:
    """A loss that is minus the advantage of each token: lets a probe give its per-token loss l as A = -l."""
    return f"inputs:\n  A: {{axis: token, doc: per token}}\nT: r\nobjective: r * A\nnormaliser: {normaliser}"


# --- (1) normalisation ------------------------------------------------------------------------------------------------


def test_n1_token_mean_over_micro_batches_uses_the_global_count() -> None:
    """A mean of local means gives 0.0; a division by the number of micro-batches 0.25."""
    dapo = instance("dapo")
    one = run(dapo, [[-1.0, -1.0]], prox=[[-1.0, -1.0]], A=[1.0], counts={"n_tokens": 8})
    two = run(dapo, [[-1.0] * 6], prox=[[-1.0] * 6], A=[-1.0], counts={"n_tokens": 8})
    assert (one.loss, two.loss) == (close(-0.25), close(0.75))


def test_n2_a_global_loss_is_not_divided_again() -> None:
    """The bug gives -0.0625; the module says that it must not be rescaled."""
    dapo = instance("dapo")
    for _ in range(4):
        assert run(dapo, [[-1.0]], prox=[[-1.0]], A=[1.0], counts={"n_tokens": 4}).grad == [[close(-0.25)]]
    assert dapo.rescale is False


@pytest.mark.parametrize("width", [4, 10])
def test_n3_a_constant_divisor_ignores_the_padded_width(width: int) -> None:
    loss_fn = instance("params:\n  L: {doc: longest answer}\n" + plain("seq_mean_token_sum_norm(L)"), L=8)
    zeros, lengths = torch.zeros(2, width, dtype=torch.float64), (2, 4)
    mask = [[t < n for t in range(width)] for n in lengths]
    assert run(loss_fn, zeros, prox=zeros, A=-torch.ones(2, width, dtype=torch.float64), mask=mask).loss == close(0.375)
    with pytest.raises(TypeError, match="L"):
        instance("params:\n  L: {doc: longest answer}\n" + plain("seq_mean_token_sum_norm(L)"))


def test_n4_token_mean_over_the_batch_or_over_each_group() -> None:
    zeros = torch.zeros(2, 6, dtype=torch.float64)
    mask = [[t < n for t in range(6)] for n in (2, 6)]
    A = torch.tensor([[-1.0] * 6, [-3.0] * 6], dtype=torch.float64)
    values = [
        run(instance(plain(n)), zeros, prox=zeros, A=A, mask=mask, groups=[0, 1]).loss
        for n in ("token_mean", "group_token_mean")
    ]
    assert values == [close(2.5), close(2.0)]


def test_n5_the_numerator_is_masked_too() -> None:
    """Unmasked numerators give 23.0."""
    got = run(
        instance(plain("token-mean")),
        torch.zeros(2, 2),
        prox=torch.zeros(2, 2),
        A=[[-2.0, -70.0], [-4.0, 30.0]],
        mask=[[1, 0], [1, 0]],
    )
    assert got.loss == close(3.0)
    assert [row[1] for row in got.grad] == [0.0, 0.0]


def test_n6_masked_tokens_leave_the_denominator() -> None:
    """Dividing by the padded width gives 1.25."""
    zeros = torch.zeros(2, 4, dtype=torch.float64)
    mask = [[1, 1, 0, 0], [1, 1, 1, 1]]
    A = [[-3.0, -3.0, 0.0, 0.0], [-1.0] * 4]
    assert run(instance(plain("token_mean")), zeros, prox=zeros, A=A, mask=mask).loss == close(10 / 6)
    assert run(instance(plain("seq_mean_token_mean")), zeros, prox=zeros, A=A, mask=mask).loss == close(2.0)


KEPT = "params:\n  alpha: 0.5\n  beta: 2\nT: r\nf: c * 1[alpha <= c <= beta]\nobjective: f * r * A\nnormaliser: "


def test_n7_rejected_tokens_count_or_do_not_by_what_the_spec_says() -> None:
    log_c = [[0.2, -1.0, 1.0, 0.1]]
    lp = torch.full((1, 4), -3.0, dtype=torch.float64)
    mu = lp - torch.tensor(log_c, dtype=torch.float64)
    fixed = run(instance("icepop", alpha=0.5, beta=2.0), lp, prox=lp, mu=mu, A=[1.0])
    kept = run(instance(KEPT + "1 / (n_seqs * sum_t(1[f != 0]))"), lp, prox=lp, mu=mu, A=[1.0])
    assert (fixed.loss, kept.loss) == (close(-0.581643), close(-1.163287))


def test_n8_a_count_taken_after_rejection_refuses_counts_taken_before_it() -> None:
    lp = torch.full((3, 1), -3.0, dtype=torch.float64)
    mu = lp - torch.tensor([[1.0], [1.5], [9.0]], dtype=torch.float64).log()
    assert run(instance("seq_mis", C=2.0), lp, prox=lp, mu=mu, A=[1.0, 1.0, 1.0]).loss == close(-2.5 / 3)
    spec = "params:\n  C: 2\nT: r\nf: prod_t(c) * 1[prod_t(c) <= C]\nobjective: f * r * A\nnormaliser: 1 / sum_b(1[f != 0])"
    assert run(instance(spec), lp, prox=lp, mu=mu, A=[1.0, 1.0, 1.0]).loss == close(-1.25)
    with pytest.raises(ValueError, match="batch"):
        run(instance(spec), lp, prox=lp, mu=mu, A=[1.0, 1.0, 1.0], counts={"n_tokens": 3})


@pytest.mark.parametrize("split", [(1, 7), (4, 4), (8,)])
def test_n9_any_split_gives_the_same_total(split: tuple[int, ...]) -> None:
    dapo = instance("dapo")
    parts = [run(dapo, [[-1.0] * n], prox=[[-1.2] * n], A=[1.0], counts={"n_tokens": 8}).loss for n in split]
    assert sum(parts) == close(-math.exp(0.2))


def test_n10_a_term_has_the_same_reducer_as_the_main_part() -> None:
    """lengths 1 and 3, A = 0, beta = 1, KL tokens [1] and [0, 0, 0]."""
    values = []
    for normaliser in ("seq_mean_token_mean", "token_mean"):
        spec = f"T: r\nobjective: r * A\nterms:\n  - add: -k1(pi, ref)\nnormaliser: {normaliser}"
        lp = torch.full((2, 3), -3.0, dtype=torch.float64)
        ref = lp + torch.tensor([[1.0, 0, 0], [0, 0, 0]], dtype=torch.float64)
        values.append(run(instance(spec), lp, prox=lp, ref=ref, A=[0.0, 0.0], mask=[[1, 0, 0], [1, 1, 1]]).loss)
    assert [abs(v) for v in values] == [close(0.5), close(0.25)]


# --- (2) ratios and which log-probs they use ----------------------------------------------------------------------------


def test_r1_on_policy_the_ratio_is_one_and_the_gradient_is_not_zero() -> None:
    grpo = instance("grpo")
    got = run(grpo, [[-0.7, -2.0]], prox=[[-0.7, -2.0]], A=[1.5])
    assert got.loss == close(-1.5) and got.grad == [[close(-0.75), close(-0.75)]]
    with pytest.raises(TypeError, match="prox_logp"):
        grpo(torch.zeros(1, 2), mask=torch.ones(1, 2, dtype=torch.bool), advantages=torch.ones(1))


def test_r2_the_correction_is_built_from_prox_and_is_fixed() -> None:
    """From the current policy it gives -1.936; not detached, a gradient of -3.872."""
    got = run(instance("token_tis"), [[LN(0.44)]], prox=[[LN(0.4)]], mu=[[LN(0.25)]], A=[1.0])
    assert (got.loss, got.grad[0][0]) == (close(-1.76), close(-1.76))


def test_r3_all_terms_share_the_temperature() -> None:
    spec = "T: 1\nobjective: A * log(pi)\nterms:\n  - add: entropy\n"
    logits = torch.tensor([[[2.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    out = instance(spec).from_logits(
        logits, torch.tensor([[0]]), mask=torch.ones(1, 1, dtype=torch.bool), advantages=torch.zeros(1), temperature=2.0
    )
    assert float(out.loss) == close(-0.582203)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_r4_a_temperature_of_zero_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        instance("reinforce").from_logits(
            torch.zeros(1, 1, 2),
            torch.zeros(1, 1, dtype=torch.long),
            mask=torch.ones(1, 1, dtype=torch.bool),
            advantages=torch.ones(1),
            temperature=temperature,
        )


def test_r5_a_missing_sampler_log_prob_has_a_policy() -> None:
    lp, mu = [[-1.0, -0.001]], [[-1.0, NAN]]
    with pytest.raises(ValueError, match="mu_logp"):
        run(instance("token_tis"), lp, prox=lp, mu=mu, A=[1.0])
    neutral = run(instance("token_tis", on_missing="neutral"), lp, prox=lp, mu=mu, A=[1.0])
    drop = run(instance("token_tis", on_missing="drop"), lp, prox=lp, mu=mu, A=[1.0])
    assert (neutral.loss, drop.loss) == (close(-1.0), close(-0.5))
    assert all(math.isfinite(x) for x in (*neutral.metrics.values(), *drop.metrics.values()))
    without = run(
        instance("token_tis"), lp, prox=lp, mu=mu, A=[1.0], mask=[[1, 0]]
    )  # left out of the mask: not counted
    assert without.loss == close(-1.0)


def test_r6_a_live_token_of_probability_zero_is_an_error_and_can_leave_the_mask() -> None:
    """Its log-prob replaced by 0 looks like probability 1: a ratio of 7.389."""
    lp, prox = [[-1.0, float("-inf")]], [[-1.0, -2.0]]
    with pytest.raises(ValueError, match="logp"):
        run(instance("grpo"), lp, prox=prox, A=[1.0])
    got = run(instance("grpo"), lp, prox=prox, A=[1.0], mask=[[1, 0]])
    assert got.loss == close(-1.0) and got.grad[0][1] == 0.0


def test_r7_a_sequence_level_ratio_does_not_weigh_long_answers_more() -> None:
    """Spread over tokens it gives 1.25."""
    lp = torch.zeros(2, 3, dtype=torch.float64)
    assert run(instance("gspo"), lp, prox=lp, A=[1.0, -2.0], mask=[[1, 0, 0], [1, 1, 1]]).loss == close(0.5)


def test_r8_the_logits_entry_owns_the_shift() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 4, 5, dtype=torch.float64)
    tokens = torch.tensor([[0, 3, 1, 2]])
    grpo = instance("grpo")

    def value(z: torch.Tensor) -> float:
        mask = torch.tensor([[0, 1, 1, 1]], dtype=torch.bool)
        prox = torch.full((1, 4), -1.5, dtype=torch.float64)
        return float(grpo.from_logits(z, tokens, mask=mask, advantages=torch.ones(1), prox_logp=prox, shift=True).loss)

    last, second = logits.clone(), logits.clone()
    last[0, 3] += torch.randn(5)
    second[0, 1] += torch.randn(5)
    assert value(last) == value(logits)
    assert value(second) != value(logits)


def test_r9_a_mismatch_that_is_only_noise_shows_in_the_metrics() -> None:
    got = run(instance("gspo"), [[-1.0, -1.0]], prox=[[-1.0039, -1.0039]], A=[1.0])
    assert got.grad == [[0.0, 0.0]]
    assert got.metrics["T/mask_pos"] == close(1.0)
    assert got.metrics["r/abs_log_max"] == close(0.0039)


# --- (3) overflow, empty rows, zero spread --------------------------------------------------------------------------------


def test_s1_an_exploding_answer_is_clipped_and_harms_no_other() -> None:
    lp = torch.tensor([[100.0, 100.0], [0.0, 0.0]]) - 101
    prox = torch.tensor([[0.0, 0.0], [0.0, 0.0]]) - 101
    got = run(instance("gspo"), lp, prox=prox, A=[1.0, 1.0], dtype=torch.float32)
    assert got.loss == close(-1.0002)
    assert got.grad == [[0.0, 0.0], [close(-0.25), close(-0.25)]]


def test_s2_a_product_over_a_long_answer_does_not_overflow() -> None:
    lp = torch.full((1, 4096), -1.0)
    mu = lp - 0.1
    assert run(instance("seq_tis", C=2.0), lp, prox=lp, mu=mu, A=[1.0], dtype=torch.float32).loss == close(-2.0, 1e-4)
    masked = run(instance("seq_mis", C=2.0), lp, prox=lp, mu=mu, A=[1.0], dtype=torch.float32)
    assert masked.loss == 0.0 and not any(masked.grad[0])


def test_s3_nothing_masked_gets_through() -> None:
    got = run(instance("grpo"), [[-1.0, -1.0]], prox=[[-1.0, NAN]], A=[1.0], mask=[[1, 0]])
    assert got.loss == close(-1.0) and got.grad == [[close(-1.0), 0.0]]
    filler = run(instance("grpo"), [[-1.0, -1e10]], prox=[[-1.0, -1e10]], A=[1.0], mask=[[1, 0]])
    assert (filler.loss, filler.grad) == (got.loss, got.grad)


def test_s5_a_fully_masked_row_still_counts() -> None:
    lp = torch.zeros(2, 3, dtype=torch.float64)
    got = run(instance("grpo"), lp, prox=lp, A=[1.0, 1.0], mask=[[1, 1, 1], [0, 0, 0]])
    assert got.loss == close(-0.5)
    assert all(math.isfinite(x) for x in got.metrics.values())


def test_s6_no_spread_no_advantage() -> None:
    grpo = instance("grpo")
    assert grpo.advantages(torch.ones(4), torch.zeros(4, dtype=torch.long)).tolist() == [0.0] * 4
    assert grpo.advantages(torch.full((7,), 0.7), torch.zeros(7, dtype=torch.long)).tolist() == [0.0] * 7
    with pytest.warns(UserWarning, match="one"):
        assert grpo.advantages(torch.ones(1), torch.zeros(1, dtype=torch.long)).tolist() == [0.0]
    with pytest.raises(ValueError, match="one"):
        instance("pipelinerl").advantages(torch.ones(1), torch.zeros(1, dtype=torch.long))


# --- (4) metrics and KL -----------------------------------------------------------------------------------------------------


def test_c1_the_share_where_the_clip_binds_is_not_the_share_outside_the_band() -> None:
    log_r = torch.tensor([[1.5], [0.5], [1.5], [0.5]], dtype=torch.float64).log()
    got = run(instance("grpo", eps=0.2), log_r - 1, prox=torch.full((4, 1), -1.0), A=[1.0, 1.0, -1.0, -1.0])
    assert got.loss == close(0.15)
    assert (got.metrics["T/mask_pos"], got.metrics["T/mask_neg"], got.metrics["r/outside"]) == (
        close(0.25),
        close(0.25),
        close(1.0),
    )


def test_c2_raw_and_applied_weights_are_both_there() -> None:
    c = torch.tensor([[0.6, 12.0, 0.8]], dtype=torch.float64)
    lp = torch.full((1, 3), -3.0, dtype=torch.float64)
    got = run(instance("token_tis", C=2.0), lp, prox=lp, mu=lp - c.log(), A=[1.0]).metrics
    share = got["f/cap_pos"] + got["f/cap_neg"]
    assert (got["c/mean"], got["f/mean"], share) == (close(13.4 / 3), close(3.4 / 3), close(1 / 3))


def estimators(p: str) -> tuple[float, float]:
    spec = f"T: 1\nobjective: 0 * A * log(pi)\nterms:\n  - add: -({p})\n"
    lp, ref = [[LN(0.5)]], [[LN(0.25)]]
    got = run(instance(spec.replace("objective: 0 * A * log(pi)\n", "")), lp, ref=ref, A=[0.0], prox=lp)
    return got.loss, got.grad[0][0]


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1(ref, pi)", 0.693147, 1.0),
        ("k2(ref, pi)", 0.240227, 0.693147),
        ("k3(ref, pi)", 0.193147, 0.5),
        ("r * k1(ref, pi) - r + 1", 0.693147, 0.693147),  # importance weighted: the reverse-KL integrand
        ("sg(k3(ref, pi)) + k2(ref, pi) - sg(k2(ref, pi))", 0.193147, 0.693147),  # value of k3, gradient of k2
    ],
)
def test_c3_estimators_of_the_value_and_of_the_gradient_are_separate(
    estimator: str, value: float, gradient: float
) -> None:
    assert estimators(estimator) == (close(value), close(gradient))


def test_c4_ratio_statistics_are_over_all_live_tokens() -> None:
    """Read off the narrowed mask the mean ratio would be 0.75."""
    lp = torch.full((1, 4), -1.0, dtype=torch.float64)
    mu = lp - torch.tensor([[0.0, 0.0, 0.0, 9.0]], dtype=torch.float64)
    got = run(instance("icepop"), lp, prox=lp, mu=mu, A=[1.0]).metrics
    assert (got["r/mean"], got["f/mask_pos"]) == (close(1.0), close(0.25))


def test_c5_something_is_not_zero_on_policy() -> None:
    lp = torch.full((2, 3), -1.0, dtype=torch.float64)
    got = run(instance("grpo"), lp, prox=lp, A=[1.0, -1.0])
    assert got.loss == close(0.0) and got.metrics["W/mean_abs"] == close(1.0)
    assert max(abs(g) for row in got.grad for g in row) > 0


# --- (5) precision, (7) layout, (8) masks --------------------------------------------------------------------------------------


def test_f1_every_path_applies_correction_mask_and_normaliser(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[[1.0, 0, 0], [0, 1.0, 0]]], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 1]])
    lp = logits.detach().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    mu = lp - torch.tensor([[0.01, 1.0]], dtype=torch.float64).log()
    loss_fn = instance("token_tis")
    monkeypatch.setattr(type(loss_fn), "_checking", lambda self, x: False)  # c = 0.01 here takes a mu above 1
    out = loss_fn.from_logits(
        logits, tokens, mask=torch.ones(1, 2, dtype=torch.bool), advantages=torch.ones(1), prox_logp=lp, mu_logp=mu
    )
    out.loss.backward()
    assert logits.grad is not None
    assert float(out.loss) == close(-0.505)
    assert (float(logits.grad[0, 0, 0]), float(logits.grad[0, 1, 1])) == (
        close(-0.00211942, 1e-8),
        close(-0.21194156, 1e-8),
    )


def test_f4_ratios_are_formed_in_float32_whatever_comes_in() -> None:
    """In bfloat16 the running sum stalls and exp rounds to 1: never clipped."""
    lp = torch.full((1, 1000), -0.001, dtype=torch.bfloat16)
    got = run(instance("gspo"), torch.zeros_like(lp), prox=lp, A=[1.0], dtype=torch.bfloat16)
    assert got.loss == close(-1.0004) and not any(got.grad[0])


def test_p1_shards_of_one_answer_add_up() -> None:
    zeros = torch.zeros(1, 4, dtype=torch.float64)
    loss_fn = instance(plain("token_mean"))
    assert run(loss_fn, zeros, prox=zeros, A=-torch.ones(1, 4), counts={"n_tokens": 8}).loss * 2 == close(1.0)


def test_p2_packed_rows_are_reduced_by_segment() -> None:
    """A mean over the row gives 2.0."""
    zeros = torch.zeros(4, dtype=torch.float64)
    got = run(
        instance(plain("seq_mean_token_mean")), zeros, prox=zeros, A=[-1.0, -1.0, -1.0, -5.0], seq_ids=[0, 0, 0, 1]
    )
    assert got.loss == close(3.0)
    gspo = run(
        instance("gspo", eps_low=0.9, eps_high=9.0),
        [0.3 - 1, -1.0, -1.0, -1.1],
        prox=[-1.0] * 4,
        A=[1.0] * 4,
        seq_ids=[0, 0, 0, 1],
    )
    assert [g * 6 for g in gspo.grad[:1]] + [gspo.grad[3] * 2] == [close(-1.105171), close(-0.904837)]


def test_k1_a_mask_that_is_no_mask_is_named() -> None:
    with pytest.raises(ValueError, match="mask"):
        instance("grpo")(
            torch.zeros(1, 2), mask=torch.tensor([[-0.5, 1.2]]), advantages=torch.ones(1), prox_logp=torch.zeros(1, 2)
        )
    with pytest.raises(TypeError):
        instance("grpo")(torch.zeros(1, 2), torch.ones(1, 2))  # inputs are keyword-only


def test_k2_tool_tokens_are_nowhere() -> None:
    """With them the ratio is 38.86."""
    lp = torch.tensor([[0.3, 0.0, 9.0, 9.0, 0.0]], dtype=torch.float64) - 10
    prox = torch.full((1, 5), -10.0, dtype=torch.float64)
    got = run(instance("gspo", eps_low=0.9, eps_high=9.0), lp, prox=prox, A=[1.0], mask=[[1, 1, 0, 0, 1]])
    assert got.loss == close(-1.105171)
    assert got.metrics["r/max"] == close(math.exp(0.3))


def test_k3_one_advantage_per_answer_never_runs_along_time() -> None:
    """Broadcast along the wrong axis gives 0.0."""
    zeros = torch.zeros(2, 2, dtype=torch.float64)
    dapo = instance("dapo")
    assert run(dapo, zeros, prox=zeros, A=[2.0, -1.0], mask=[[1, 1], [0, 1]]).loss == close(-1.0)
    with pytest.raises(ValueError, match=r"3.*2|2.*3"):
        dapo(zeros, mask=torch.ones(2, 3, dtype=torch.bool), advantages=torch.ones(2), prox_logp=zeros)


# --- (9) new methods ---------------------------------------------------------------------------------------------------------------


def test_g1_a_ten_line_spec_takes_the_arguments_that_a_framework_has() -> None:
    text = "lossdsl: 1\nname: mine\nparams:\n  C: 3\nlevel: token\nf: min(rho, C)\nnormaliser: token_mean\n"
    loss_fn = loss_class(text)(compile=False)
    assert set(loss_fn.needs) == {"advantages", "mu_logp"}
    lp = torch.full((1, 2), -1.0, dtype=torch.float64, requires_grad=True)
    everything = {"prox_logp": lp.detach(), "mu_logp": lp.detach() - 2.0, "ref_logp": lp.detach()}
    loss_fn(lp, mask=torch.ones(1, 2, dtype=torch.bool), advantages=torch.ones(1), **everything).loss.backward()
    assert lp.grad is not None and lp.grad.tolist() == [[close(-1.5), close(-1.5)]]


def test_g2_a_truncated_ratio_keeps_its_log_prob_factor_and_its_gradient() -> None:
    """A clamp that is differentiated gives gradient 0."""
    got = run(instance("cispo", eps_low=0.2, eps_high=0.28), [[LN(0.3)]], prox=[[LN(0.2)]], A=[1.0])
    assert (got.loss, got.grad[0][0]) == (close(1.541085), close(-1.28))


def test_g3_the_sign_of_the_advantage_decides_what_a_divergence_mask_drops() -> None:
    lp, mu = [[LN(0.8)]], [[LN(0.99)]]
    assert run(instance("dppo_tv"), lp, mu=mu, A=[1.0]).loss == close(-0.808081)
    assert run(instance("dppo_tv"), lp, mu=mu, A=[-1.0]).grad == [[0.0]]
    blind = "params:\n  delta: 0.15\nf: rho * 1[binary_tv(pi, mu) <= delta]\nnormaliser: token_mean"
    assert [run(instance(blind), lp, mu=mu, A=[a]).grad for a in (1.0, -1.0)] == [[[0.0]], [[0.0]]]


def test_g4_the_product_is_not_the_geometric_mean() -> None:
    lp, mu = [[-1.0, -1.0]], [[-0.5, -0.5]]
    product = run(instance("topr"), lp, mu=mu, A=[-1.0])
    pooled = instance(
        "f: 1 if A >= 0 else min(geomean_t(rho), 1)\nobjective: f * A * log(pi)\nnormaliser: seq_mean_token_sum"
    )
    assert (product.loss, run(pooled, lp, mu=mu, A=[-1.0]).loss) == (close(-0.735759), close(-1.213061))


def test_g5_a_soft_gate_keeps_the_advantage() -> None:
    got = run(instance("sapo"), [[-1.0]], prox=[[-1.0]], A=[-1.0])
    assert (got.loss, got.grad[0][0]) == (close(1.904762), close(1.0))


def test_g6_score_centring() -> None:
    logits = torch.zeros(1, 1, 2, dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([[[0.6, 0.4]]], dtype=torch.float64).log()
    out = instance("score_centering").from_logits(
        logits,
        torch.tensor([[0]]),
        mask=torch.ones(1, 1, dtype=torch.bool),
        advantages=torch.ones(1),
        mu_logp=mu[..., 0],
        mu_logprobs=mu,
    )
    out.loss.backward()
    assert logits.grad is not None
    assert float(out.loss) == close(0.0) and logits.grad[0, 0].tolist() == [close(-0.4), close(0.4)]


def test_g7_a_band_with_only_an_upper_end_keeps_other_tokens() -> None:
    log_c = torch.tensor([[0.2, -1.0, 1.0, 0.1]], dtype=torch.float64)
    lp = torch.full((1, 4), -3.0, dtype=torch.float64)
    assert run(instance("icepop", alpha=0.0, beta=2.0), lp, prox=lp, mu=lp - log_c, A=[1.0]).loss == close(-0.673613)


# --- (10) the language -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), [("3e-4", 3e-4), ("3E-4", 3e-4), ("3.0e-4", 3e-4), ("1e3", 1000.0)])
def test_d1_a_number_is_a_number(text: str, value: float) -> None:
    spec = f"params:\n  eps: {{default: {text}}}\nf: min(rho, eps)\n"
    assert method(spec).defaults == {"eps": value}


@pytest.mark.parametrize("line", ["kl: off", "level: no"])
def test_d2_no_and_off_are_words(line: str) -> None:
    (found, *_) = lossdsl.check_text(f"lossdsl: 1\nname: x\nf: rho\nnormaliser: token_mean\n{line}\n")
    assert found.span is not None and found.span.source.line_col(found.span.start)[0] == 5


def test_d3_an_unknown_option_is_an_error_with_the_nearest_name() -> None:
    (found, *_) = lossdsl.check_text(
        "lossdsl: 1\nname: x\nparams:\n  clip_high: 0.28\nf: min(rho, clip_hgih)\nnormaliser: token_mean\n"
    )
    assert "clip_hgih" in found.message and "clip_high" in found.help


def test_d4_a_mistake_is_a_few_lines() -> None:
    with pytest.raises(SpecError) as error:
        method("f: min(rho, )\n")
    assert len(lossdsl.render(error.value.diagnostics).splitlines()) <= 5


def test_d5_an_option_without_effect_is_refused() -> None:
    codes = [
        d.code
        for d in lossdsl.check_text("lossdsl: 1\nname: x\nparams:\n  beta: 0.1\nf: rho\nnormaliser: token_mean\n")
    ]
    assert codes == ["E0410"]


def test_d6_dual_clip_acts_on_negative_advantages_only() -> None:
    dual = instance("dual_clip_ppo")
    assert run(dual, [[-1.0]], prox=[[-1.0]], A=[1.0]).loss == close(-1.0)
    got = run(dual, [[LN(0.1)]], prox=[[LN(0.01)]], A=[-1.0])
    assert (got.loss, got.grad) == (close(3.0), [[0.0]])
