"""Random and hostile specs: a clear error, quickly, or a module that computes what the reference computes."""

from __future__ import annotations

import ast
import time

import numpy as np
import pytest
import torch
from helpers import method
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from layouts import Case, call, expected, packed, padded, place, reads_logits

import lossdsl
from lossdsl.emit.module import module_text
from lossdsl.errors import SpecError
from lossdsl.loading import import_text
from lossdsl.samples import sample_batch

GOOD = lossdsl.api.find("icepop").text
SECONDS = 2.0


def check(text: str) -> tuple[lossdsl.Diagnostic, ...]:
    """All a spec's diagnostics; whatever the text is, they come quickly and render."""
    start = time.perf_counter()
    found = lossdsl.check_text(text)
    assert time.perf_counter() - start < SECONDS
    rendered = lossdsl.render(found)
    assert all("\n" not in d.message and len(d.message) < 400 for d in found), rendered
    return found


@settings(max_examples=150)
@given(st.text(max_size=300))
def test_any_text_is_judged(text: str) -> None:
    check(text)


@settings(max_examples=200)
@given(
    st.integers(0, len(GOOD)),
    st.integers(0, 12),
    st.text(alphabet="\t\n :{}[]()'\"#&*!|>-%@`,.abcMTf019+*/<>=\u00e9\u4e2d\u200b", max_size=6),
)
def test_a_damaged_spec_is_judged(at: int, cut: int, put: str) -> None:
    check(GOOD[:at] + put + GOOD[at + cut :])


TOKENS = ["r", "c", "rho", "A", "pi", "mu", "pi[v]", "mu[v]", "1", "0.5", "eps", "(", ")", "[", "]", "1[", ",", "+", "-", "*", "/", "**", "<", "<=",
          "==", "in", "if", "else", "and", "or", "not", "min(", "clip(", "sum_t(", "prod_t(", "sum_v(", "log(", "sg(", "M(", "kl("]  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=14))
def test_any_expression_is_judged(tokens: list[str]) -> None:
    text = " ".join(tokens).replace('"', "")
    check(f'lossdsl: 1\nname: x\nparams:\n  eps: 0.2\nf: "{text}"\nnormaliser: token_mean * eps / eps\n')


HOSTILE = {
    "brackets": "f: " + "(" * 20000,
    "minuses": "f: " + "-" * 3000 + "r",
    "sum": "f: " + " + ".join(["r"] * 1500),
    "powers": "f: " + " ** ".join(["r"] * 200),
    "conditions": "f: " + " and ".join([f"r < {i}" for i in range(300)]),
    "chain": "f: " + " if A > 0 else ".join(["r"] * 50),
    "bomb": "where:\n"
    + "".join(f"  b{i}(x): b{i - 1}(x) * b{i - 1}(x)\n" if i else "  b0(x): x * x\n" for i in range(40))
    + "f: b39(r)",
    "nest": "where:\n" + "".join(f"  n{i}: n{i - 1} + r\n" if i else "  n0: r\n" for i in range(300)) + "f: n299",
    "deep yaml": "note: " + "[" * 500,
    "deep mapping": "note: " + "{a: " * 500,
    "alias": "note: &a [x, x]\nterms: *a",
    "tag": "f: !!python/object/apply:os.system ['true']",
    "huge": "note: " + "x" * 70000,
    "many keys": "params:\n" + "".join(f"  p{i}: 1\n" for i in range(3000)),
    "big power": "f: (1 + r + c + rho + A) ** 16",
    "big number": "f: 10 ** 16 ** 16 * r",
    "long number": "f: " + "9" * 3000 + " * r",
    "tiny number": "f: 1e-4000 * r",
    "vast number": "f: 1e400000 * r",
    "null": "f: r\0",
    "bidi": "note: \u202egnp.exe",
    "surrogate": "note: \ud800",
    "names": "params:\n  __class__: 1\n  import: 2\n  os.system: 3\nf: rho",
    "dunder call": "f: __import__('os')",
    "attribute": "f: r.__class__",
    "lambda": "f: (lambda: 1)()",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_specs_end_in_a_clear_error_or_a_sound_module(name: str) -> None:
    text = f"lossdsl: 1\nname: x\n{HOSTILE[name]}\nnormaliser: token_mean\n"
    found = check(text)
    if not any(d.severity == "error" for d in found):
        ast.parse(module_text(method(text)))


BENIGN = "lossdsl: 1\nname: x\ntitle: {0}\ncite: {{paper: {0}, where: {0}}}\nnote: {0}\nparams:\n  eps: {{default: 0.2, doc: {0}}}\nf: min(rho, eps)\nnormaliser: token_mean\n"


@settings(max_examples=100)
@given(
    st.text(
        alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cf", "Zl", "Zp", "Co", "Cn"]),
        max_size=60,
    )
)
@example('"""\nimport os')
@example("'''\\")
@example('\\"""; import os; """')
@example("{eps} %s \\N{BULLET} \\x00")
@example("# type: ignore")
def test_no_text_of_a_spec_becomes_code(text: str) -> None:
    """Titles, citations and documentation change strings and comments of the module, never its statements."""
    quoted = "'" + text.replace("'", "''").replace("\n", " ") + "'"
    try:
        made = ast.parse(module_text(method(BENIGN.format(quoted))))
    except SpecError:
        return  # a character that specs refuse
    plain = ast.parse(module_text(method(BENIGN.format("words"))))
    assert _shape(made) == _shape(plain)


def _shape(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
        elif isinstance(node, ast.ClassDef):
            node.name = "X"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id[:1].isupper():
            node.id = "X"
    return ast.dump(tree)


# --- random well-typed specs against the reference ----------------------------------------------------------------------

TOKEN = ["r", "c", "rho", "A", "1", "0.5", "2", "eps", "pi", "mu", "log(r)", "log(rho)", "len / 10"]
SEQUENCE = [
    "prod_t(c)",
    "geomean_t(r)",
    "mean_t(rho)",
    "max_t(c)",
    "sum_t(1[r > 1]) / len",
    "min_t(r)",
    "std_t(log(c), 0)",
    "quantile_t(c, 0.5)",
]
GROUP = ["mean_g(geomean_t(c))", "max_g(A)", "group_size / 3", "std_g(A)", "sum_b(1[c > 1]) / n_tokens", "mean_b(A)"]
VOCAB = ["kl(mu, pi)", "tv(pi, mu)", "entropy", "max_v(mu[v])"]


def expressions(leaves: list[str]) -> st.SearchStrategy[str]:
    leaf = st.sampled_from(leaves)

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        pair = st.tuples(inner, inner)
        condition = st.tuples(inner, st.sampled_from(["<", "<=", ">", ">="]), inner).map(
            lambda x: f"{x[0]} {x[1]} {x[2]}"
        )
        return st.one_of(
            pair.map(lambda x: f"({x[0]} + {x[1]})"), pair.map(lambda x: f"({x[0]} - {x[1]})"), pair.map(lambda x: f"{x[0]} * {x[1]}"),
            pair.map(lambda x: f"{x[0]} / ({x[1]})"), pair.map(lambda x: f"min({x[0]}, {x[1]})"), pair.map(lambda x: f"max({x[0]}, {x[1]})"),
            inner.map(lambda x: f"clip({x}, 0.5, 2)"), inner.map(lambda x: f"tanh({x})"), inner.map(lambda x: f"sigmoid({x})"),
            inner.map(lambda x: f"abs({x})"), inner.map(lambda x: f"sqrt(abs({x}))"), inner.map(lambda x: f"-({x})"), inner.map(lambda x: f"({x}) ** 2"),
            condition.map(lambda x: f"1[{x}]"), st.tuples(inner, condition, inner).map(lambda x: f"({x[0]} if {x[1]} else {x[2]})"),
            inner.map(lambda x: f"M({x}, 0.8, 1.25)"), inner.map(lambda x: f"exp(min({x}, 1))"), inner.map(lambda x: f"1[{x} in [0.5, 2)]"),
        )  # fmt: skip

    return st.recursive(leaf, grow, max_leaves=7)


def compare(text: str, seed: int, still: bool = True) -> None:
    """The generated module, padded and packed, against the reference, on a random batch.

    Where log-probs come from logits they are only equal up to rounding, so ratios of exactly 1 (`still`) are left out:
    a random expression may jump there.
    """
    try:
        m = method(text)
    except SpecError as error:  # a product with a constant 0, say
        assert {d.code for d in error.diagnostics} <= {"E0504", "E0412"}
        return
    rng = np.random.default_rng(seed)
    batch = sample_batch(m, rng, spread=0.4, still=still)
    tokens = np.abs(batch.logp_v["pi"] - batch.logp["pi"][:, None]).argmin(-1)
    case = Case(m, batch, tokens, {k: v for k, v in m.defaults.items() if v is not None})
    module = import_text(module_text(m), f"fuzz_{abs(hash(text)) % 10**12}")
    loss_fn = module.Loss(compile=False)
    loss, d_logp, d_logits = expected(case)
    _, rows, columns = place(case)
    logits = reads_logits(loss_fn)
    wanted = d_logits if logits else d_logp
    scale = 1 + np.abs(wanted).max(initial=0.0)
    layouts = [(padded(case), (rows, columns))]
    if (
        "_g" not in text and "_b" not in text and "group" not in text
    ):  # empty answers, which packing cannot show, count there
        given = packed(case)
        layouts.append((given, given["keep"]))
    for given, where in layouts:
        if loss_fn.LOCAL_STATISTICS:
            given.pop("counts", None)
        found, gradient, metrics = call(loss_fn, given, logits)
        assert abs(found - loss) < 1e-8 * (1 + abs(loss)), text
        assert np.abs(gradient[where].numpy() - wanted).max(initial=0.0) < 1e-8 * scale, text
        assert all(bool(torch.isfinite(total)) for total, _ in metrics.values()), text


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(expressions([*TOKEN, *SEQUENCE, *GROUP]), expressions([*TOKEN, *SEQUENCE]), st.integers(0, 3))
def test_random_weights(f: str, T: str, seed: int) -> None:
    text = f"params:\n  eps: 0.3\nf: {f} + 0 * eps\nT: {T}\nnormaliser: seq_mean_token_mean\n"
    compare(text, seed)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(expressions([*TOKEN, *SEQUENCE, *VOCAB]), st.integers(0, 3))
def test_random_weights_that_read_the_distribution(f: str, seed: int) -> None:
    compare(f"params:\n  eps: 0.3\nf: {f} + 0 * eps\nnormaliser: token_mean\n", seed, still=False)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(expressions(["rho", "1", "0.5", "2", "eps", "A", "pi", "mu", "log(rho)"]), st.integers(0, 3))
@example("1[exp(min(2, 1)) in [0.5, 2)]", 0)  # 0 everywhere
def test_random_centred_weights(f: str, seed: int) -> None:
    compare(f"params:\n  eps: 0.3\nf: {f} + 0 * eps\nkappa: 1\nnormaliser: token_mean\n", seed, still=False)


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(
    expressions(["r", "rho", "A", "1", "0.5", "2", "eps", "c", "log(r)", "geomean_t(r)", "mean_t(rho)"]),
    st.integers(0, 3),
)
def test_random_objectives(objective: str, seed: int) -> None:
    """Differentiated through reductions: the emitted gradient is the reference's, and the value too."""
    compare(f"params:\n  eps: 0.3\nobjective: r * A * ({objective}) + 0 * eps\nnormaliser: seq_mean_token_mean\n", seed)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(expressions(["r", "c", "A", "0.8", "1.25", "2", "eps"]), st.integers(0, 2))
def test_a_weight_and_its_own_objective_are_never_called_different(f: str, seed: int) -> None:
    """sg(W) A log pi has the weight W, whatever W is: proved, or at worst sampled, never refused."""
    try:
        m = method(f"params:\n  eps: 0.3\nf: {f} + 0 * eps\nobjective: sg({f}) * A * log(pi)\nnormaliser: token_mean\n")
    except SpecError as error:  # the weight is 0
        assert {d.code for d in error.diagnostics} == {"E0504"}
        return
    assert m.proof == "proved" or m.proof.startswith("sampled")


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(["0.9", "1.1"]), st.sampled_from(["lo", "hi"]))
def test_a_changed_bound_is_found_and_confirmed_by_numbers(factor: str, side: str) -> None:
    low, high = (f"{factor} * (1 - eps)", "1 + eps") if side == "lo" else ("1 - eps", f"{factor} * (1 + eps)")
    with pytest.raises(SpecError) as error:
        method(
            f"params:\n  eps: {{default: 0.3, min: 0}}\nT: M(r, 1 - eps, 1 + eps) * r\nobjective: min(r * A, clip(r, {low}, {high}) * A)\n"
        )
    (found,) = error.value.diagnostics
    assert found.code == "E0505" and "knobs give" in found.notes[0]
    assert ("A < 0" in found.message) == (side == "lo")
