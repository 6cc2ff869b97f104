"""The functions of the page are the functions of the loss: Node runs them against the reference evaluator."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import method
from hypothesis import HealthCheck, given, settings
from test_fuzz import TOKEN, expressions

import lossdsl
from lossdsl.api import find
from lossdsl.diff.assume import NOTHING
from lossdsl.diff.javascript import functions
from lossdsl.diff.side import sides
from lossdsl.diff.view import View, log_probs, view
from lossdsl.errors import SpecError
from lossdsl.method import lower_spec
from lossdsl.primitives import PRIMITIVES
from lossdsl.reference import Array
from lossdsl.specdoc import read_spec

N = 40


def node(script: str) -> list[list[float]]:
    """What a script prints as JSON; node must be there."""
    run = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, check=True)
    found: list[list[float]] = json.loads(run.stdout)
    return found


def points(v: View, seed: int) -> dict[str, Array]:
    """Random coordinates, wild and tame, some of them exactly 1."""
    rng = np.random.default_rng(seed)
    at = {}
    for c in v.coordinates:
        if c.kind == "ratio":
            at[c.key] = np.exp(rng.normal(0, rng.choice([0.1, 1.0, 4.0], N)) * (rng.random(N) > 0.1))
        else:
            at[c.key] = rng.integers(0, 2, N).astype(float) if c.kind == "flag" else rng.uniform(0.001, 0.999, N)
    return at


def script_of(v: View, at: dict[str, Array], parameters: dict[str, float]) -> str:
    names = {f"{side}_{'pos' if sign > 0 else 'neg'}": w for (side, sign), w in v.weights.items()}
    logs = log_probs({k: np.log(at.get(k, np.ones(N))) for k in ("r", "c", "rho")}, at.get("chance"))
    rows = []
    for i in range(N):
        x = {p: float(logs[p][i]) for p in logs}
        x |= {
            name: x[a] - x[b] for name, (a, b) in (("r", ("pi", "prox")), ("c", ("prox", "mu")), ("rho", ("pi", "mu")))
        }
        x |= {
            c.key: float(np.log(at[c.key][i]) if c.logged else at[c.key][i])
            for c in v.coordinates
            if c.key.startswith("q")
        }
        rows.append(x)
    calls = ", ".join(f"rows.map(x => {name}(x, p))" for name in names)
    return (
        functions(names)
        + f"\nconst rows = {json.dumps(rows)}, p = {json.dumps(parameters)};\n"
        + f"console.log(JSON.stringify([{calls}].map(r => r.map(v => Number.isFinite(v) ? v : String(v)))));"
    )


def compare(v: View, seed: int) -> None:
    rng = np.random.default_rng(seed)
    at = points(v, seed)
    parameters = {k: x * float(rng.choice([1.0, 1.0, 0.5, 1.3])) for k, x in v.parameters.items()}
    moved = View(v.sides, v.coordinates, v.weights)
    moved.__dict__["parameters"] = parameters
    wanted = [moved.values(side, sign, at) for side, sign in v.weights]
    found = node(script_of(v, at, parameters))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            np.array(x, dtype=float), np.broadcast_to(y, N), rtol=1e-8, atol=1e-12 * (1 + np.abs(y).max())
        )


def test_every_operation_has_its_javascript() -> None:
    for name, primitive in PRIMITIVES.items():
        assert primitive.script, name


@pytest.mark.parametrize("name", lossdsl.builtins())
def test_a_weight_in_the_page_is_the_weight(name: str) -> None:
    m = lower_spec(read_spec(find(name)))
    compare(view(sides(m, m, NOTHING)), 0)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(expressions([*TOKEN, "prod_t(c)", "max_t(c)", "mean_t(rho)", "1[any_t(r > 1)]"]))
def test_a_random_weight_in_the_page_is_the_weight(f: str) -> None:
    try:
        m = method(f"params:\n  eps: 0.3\nf: {f} + 0 * eps\n")
    except SpecError:
        return
    compare(view(sides(m, m, NOTHING)), 1)


def test_the_functions_read_well() -> None:
    m = lower_spec(read_spec(find("dapo")))
    text = functions({"W": view(sides(m, m, NOTHING)).weights["a", 1]})
    assert 'p["a.eps_high"]' in text and 'x["r"]' in text
    assert len(text.splitlines()) < 25


def test_the_view_of_a_pair_has_the_coordinates_that_its_weights_read(tmp_path: Path) -> None:
    def labels(a: str, b: str) -> list[str]:
        pair = [lower_spec(read_spec(find(n))) for n in (a, b)]
        return [c.label for c in view(sides(pair[0], pair[1], NOTHING)).coordinates]

    assert labels("dapo", "cispo") == ["r"]
    assert labels("token_tis", "icepop") == ["r", "c"]
    assert labels("sao", "pipelinerl") == ["rho"]
    assert labels("seq_tis", "grpo") == ["r", "prod_t(c)"]
    assert labels("dppo_tv", "sao") == ["rho", "mu"]
    assert labels("trm_max", "topr") == ["rho", "max_t(kl(mu, pi))", "prod_t(rho)"]
