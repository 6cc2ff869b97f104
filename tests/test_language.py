"""Parts of the language that no built-in uses, each against a value worked out by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from helpers import instance, method, run

import lossdsl
from lossdsl import parse
from lossdsl.specdoc import plain_text


def test_a_turn_is_an_axis_between_the_answer_and_the_token() -> None:
    """Two turns of one answer, geometric mean of r per turn: exp(0.2) for the first two tokens, exp(-0.3) for the third."""
    spec = "level: segment\nwhere:\n  s: geomean_s(r)\nT: s\nobjective: s * A\nnormaliser: token_mean\n"
    lp = torch.tensor([[0.1, 0.3, -0.3]], dtype=torch.float64) - 2
    got = run(instance(spec), lp, prox=torch.full((1, 3), -2.0), A=[1.0], segment_ids=torch.tensor([[0, 0, 1]]))
    expected = [math.exp(0.2), math.exp(0.2), math.exp(-0.3)]
    assert got.loss == pytest.approx(-sum(expected) / 3)
    assert got.grad[0] == pytest.approx([-x / 3 for x in expected])
    with pytest.raises(TypeError, match="segment_ids"):
        run(instance(spec), lp, prox=lp, A=[1.0])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 / (1 - 1 * eps)", 0.0),  # eps = 1: a quotient by zero is zero
        ("exp(100 * eps)", math.exp(20)),
        ("sqrt(-eps)", 0.0),
        ("log(0 * eps)", math.log(1e-37)),
        ("2 ** 3 ** 0 * eps", 2.0),
        ("-2 ** 2 * eps", -4.0),
        ("1 - 2 - 3 + 0 * eps", -4.0),
        ("8 / 4 / 2 * eps", 1.0),
        ("1[not eps > 2 and eps >= 1 or eps < 0] * eps", 1.0),
        ("1[0 < eps <= 1] * 7", 7.0),
        ("1[eps in (0, 1)] + 1[eps in (0, 1]]", 1.0),
        ("3 if eps > 1 else 4 if eps > 2 else 5", 5.0),
        ("min(3, eps, 2) + max(0.5, eps, 0)", 2.0),
        ("clip(5 * eps, 0, 2)", 2.0),
        ("abs(-3 * eps) + tanh(0 * eps) + sigmoid(0 * eps)", 3.5),
    ],
)
def test_arithmetic_means_what_it_says(expression: str, value: float) -> None:
    spec = f"params:\n  eps: 1\nf: {expression}\nobjective: sg({expression}) * A * log(pi)\nnormaliser: sum\n"
    got = run(instance(spec), [[-1.0]], A=[1.0])
    assert got.loss == pytest.approx(value, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("reduction", "value"),
    [
        ("sum_t(c)", 3.5), ("mean_t(c)", 3.5 / 3), ("prod_t(c)", 1.0), ("geomean_t(c)", 1.0), ("max_t(c)", 2.0), ("min_t(c)", 0.5),
        ("1[any_t(c > 1.5)]", 1.0), ("1[all_t(c > 0.6)]", 0.0), ("std_t(c)", math.sqrt(7 / 12)), ("std_t(c, 0)", math.sqrt(7 / 18)),
        ("quantile_t(c, 0.25)", 0.75), ("len", 3.0),
    ],
)  # fmt: skip
def test_reductions_over_an_answer(reduction: str, value: float) -> None:
    """c = 0.5, 1, 2 on the live tokens and 100 on a dead one; padded and packed."""
    loss_fn = instance(f"f: {reduction}\nobjective: sg({reduction}) * c / c * A * log(pi)\nnormaliser: 1 / len\n")
    c = torch.tensor([[0.5, 1.0, 2.0, 100.0]], dtype=torch.float64)
    lp = torch.full((1, 4), -1.0, dtype=torch.float64)
    prox = torch.full((1, 4), -5.0, dtype=torch.float64)
    inputs = {"prox": prox, "mu": prox - c.log()}
    assert run(loss_fn, lp, A=[1.0], mask=[[1, 1, 1, 0]], **inputs).loss == pytest.approx(value)
    flat = {k: v[0] for k, v in inputs.items()}
    packed = run(loss_fn, lp[0], A=torch.ones(4), mask=[1, 1, 1, 0], seq_ids=torch.zeros(4, dtype=torch.long), **flat)
    assert packed.loss == pytest.approx(value)


def test_reductions_over_groups_and_the_batch_on_the_data_side() -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 5.0, 7.0], dtype=torch.float64), torch.tensor([9, 9, 4, 4])
    for expression, expected in {
        "R - mean_g(R)": [-1, 1, -1, 1],
        "R - loo_g(R)": [-2, 2, -2, 2],
        "R / max_g(R) + min_g(R) + 0 * sum_g(R)": [1 / 3 + 1, 2, 5 / 7 + 5, 6],
        "(R - mean_b(R)) / std_b(R)": [x / math.sqrt(20 / 3) for x in (-3, -1, 1, 3)],
        "R * n_groups / n_seqs + group_size": [2.5, 3.5, 4.5, 5.5],
        "quantile_g(R, 0.5)": [2, 2, 6, 6],
    }.items():
        loss_fn = instance(f"T: r\nobjective: r * A\nadvantage: {expression}\n")
        assert loss_fn.advantages(rewards, groups).tolist() == pytest.approx(expected), expression


def test_a_term_has_a_mask_and_a_normaliser_of_its_own() -> None:
    """Two answers of 1 and 3 tokens; the term counts on A > 0 only, summed: -0.1 * k1 with log(pi/ref) = 1 on each token."""
    spec = (
        "params:\n  b: 0.1\nT: r\nobjective: r * A\nnormaliser: seq_mean_token_mean\n"
        "terms:\n  - {name: pull, add: '-b * k1(ref, pi)', mask: A > 0, normaliser: sum}\n"
    )
    lp = torch.full((2, 3), -1.0, dtype=torch.float64)
    got = run(instance(spec), lp, prox=lp, ref=lp - 1, A=[1.0, -1.0], mask=[[1, 0, 0], [1, 1, 1]])
    assert got.loss == pytest.approx(-(0.5 - 0.5) + 0.1)
    assert got.grad[0][0] == pytest.approx(-0.5 + 0.1) and got.grad[1] == pytest.approx([1 / 6] * 3)


def test_weights_only_and_objective_only_and_both_are_the_same_method() -> None:
    weights, objective = "T: M(r, 0.8, 1.2) * r\n", "objective: min(r * A, clip(r, 0.8, 1.2) * A)\n"
    lp = torch.tensor([[-1.0, -1.5, -0.7]], dtype=torch.float64)
    prox = torch.tensor([[-1.1, -1.0, -1.2]], dtype=torch.float64)
    grads = [
        run(instance(text), lp, prox=prox, A=[a]).grad[0]
        for text in (weights, objective, weights + objective)
        for a in (1.0, -1.0)
    ]
    for sign in (0, 1):
        assert grads[sign + 2] == pytest.approx(grads[sign]) and grads[sign + 4] == pytest.approx(grads[sign])
    assert method(weights + objective).proof == "proved"


def test_equivalent_spellings_are_proved_equal() -> None:
    for knobs, objective in {
        "T: M(r, 1 - eps, 1 + eps) * r": "min(r * A, min(max(r, 1 - eps), 1 + eps) * A)",
        "f: r * c": "rho * A",
        "f: min(rho, 1 + eps)": "sg(rho if rho <= 1 + eps else 1 + eps) * A * log(pi)",
        "T: 1[not (A > 0 and log(r) > log(1 + eps) or A < 0 and r < 1 - eps)] * r": "min(r * A, clip(r, 1 - eps, 1 + eps) * A)",
        "f: prod_t(rho) * 1[eps >= 0]": "sg(exp(sum_t(log(pi / mu)))) * A * log(pi)",
        "T: (r + r) / 2 * 1[eps >= 0]": "r * A",
    }.items():
        extra = "" if "eps" in knobs else " + 0 * eps"
        text = f"params:\n  eps: {{default: 0.2, min: 0, max: 0.9}}\n{knobs}\nobjective: {objective}{extra}\n"
        proof = method(text).proof  # a comparison of logs with a number is beyond the algebra
        assert proof == "proved" or ("log(1 + eps)" in knobs and proof.startswith("sampled")), (knobs, proof)


def test_tables_of_the_grammar_are_kept_and_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kept beside bytecode; whatever stands there instead of them, or where nothing can be written, parsing is the same."""
    text = "min(r * A, clip(r, 1 - eps, 1 + eps) * A) if c in (0.5, 5] else 1[A > 0]"
    wanted = parse.parse_expression(plain_text("probe", text))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(parse, "__file__", str(tmp_path / "parse.py"))
    (tmp_path / "grammar.lark").write_text((Path(lossdsl.__file__).parent / "grammar.lark").read_text())
    kept = tmp_path / "__pycache__" / "grammar.lark.cache"

    def again() -> object:
        parse._parser.cache_clear()
        return parse.parse_expression(plain_text("probe", text))

    try:
        assert again() == wanted and not kept.exists()  # no folder to write to
        kept.parent.mkdir()
        assert again() == wanted
        tables = kept.read_bytes()
        assert again() == wanted and kept.read_bytes() == tables
        for broken in (b"", b"garbage", tables[: len(tables) // 2], tables.replace(b"\n", b"\nx", 1)):
            kept.write_bytes(broken)
            assert again() == wanted and kept.read_bytes() != broken
        tables = kept.read_bytes()
        (tmp_path / "grammar.lark").write_text((tmp_path / "grammar.lark").read_text() + "\n// another grammar\n")
        assert again() == wanted and kept.read_bytes() != tables
    finally:
        parse._parser.cache_clear()
