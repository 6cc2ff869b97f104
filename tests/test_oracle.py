"""Every case of oracle.yaml: expected weights, worked out independently of this project.

Each case goes through the float64 reference evaluator and through the generated module, in float64 and float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import DATA, instance

import lossdsl
from lossdsl.reference import Batch, evaluate, per_token

ORACLE = yaml.safe_load((DATA / "oracle.yaml").read_text())
VOCABULARY = ("score_centering", "score_centering_topk", "tis_sc", "mis_sc")
TRM = ("trm_max", "trm_avg", "trm_combined")


def eps(params: dict[str, float], case: dict[str, Any]) -> dict[str, float]:
    """A symmetric half width, where the oracle gives two bounds: from the bound that the case is near."""
    near_high = case["log_r"] > 0 if not isinstance(case["log_r"], list) else True
    return {"eps": round(params["hi"] - 1, 12) if near_high else round(1 - params["lo"], 12)}


def low_high(params: dict[str, float], case: dict[str, Any]) -> dict[str, float]:
    return {"eps_low": round(1 - params["lo"], 12), "eps_high": round(params["hi"] - 1, 12)}


def same(*names: str) -> Callable[[dict[str, float], dict[str, Any]], dict[str, float]]:
    return lambda params, case: {name: params[name] for name in names}


def renamed(**names: str) -> Callable[[dict[str, float], dict[str, Any]], dict[str, float]]:
    return lambda params, case: {ours: params[theirs] for ours, theirs in names.items()}


def both(*parts: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    return lambda params, case: {k: v for part in parts for k, v in part(params, case).items()}


# How each table's parameters are this project's.
PARAMS: dict[str, Callable[..., dict[str, float]]] = {
    "reinforce": same(), "grpo": eps, "dapo": low_high, "cispo": low_high, "decoupled_ppo": eps,
    "dual_clip_ppo": both(renamed(dual="dual"), lambda p, c: {"eps": round(1 - p["lo"], 12)}),
    "cispo_masked": renamed(mask_low="mask_lo", mask_high="mask_hi", clip_low="lo", clip_high="hi"),
    "areal_masked_c": both(eps, same("cap")), "token_tis": both(eps, same("C")), "icepop": both(eps, same("alpha", "beta")),
    "scalerl_dapo": low_high, "scalerl_cispo": same("eps_max"), "pipelinerl": same("C"), "sao": renamed(low="lo", high="hi"),
    "dppo_tv": same("delta"), "dppo_kl": same("delta"), "dppo_tv_cap5": same("delta", "cap"), "dppo_kl_cap5": same("delta", "cap"),
    "gspo": low_high, "scalerl_gspo": low_high, "gspo_token": low_high,
    "seq_tis": both(eps, same("C")), "seq_mis": both(eps, same("C")), "geo_mis": both(eps, renamed(band_low="band_lo", band_high="band_hi")),
    "deepseek_v32_mask": both(eps, same("delta")), "topr": same(),
    "trm_max": renamed(delta="delta_max"), "trm_avg": renamed(delta="delta_avg"), "trm_combined": same("delta_max", "delta_avg"),
    "score_centering": same(), "score_centering_topk": same(), "tis_sc": same("C"), "mis_sc": same("alpha", "beta"),
}  # fmt: skip

CASES = [(name, case) for name, table in ORACLE["methods"].items() for case in table["cases"]]
IDS = [case["id"] for _, case in CASES]


def test_every_table_of_the_oracle_is_used() -> None:
    assert set(PARAMS) == set(ORACLE["methods"])
    assert len(CASES) >= 33 * 4


def parameters(name: str, case: dict[str, Any]) -> dict[str, float]:
    return PARAMS[name](ORACLE["methods"][name]["params"] | (case.get("params") or {}), case)


@cache
def method(name: str) -> lossdsl.Method:
    return lossdsl.load(name)


def logs(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """Log-probs of one answer with the case's ratios: pi is at -3 or wherever the case puts it."""
    if "pi" in case:
        pi, mu = np.log(np.atleast_1d(case["pi"])), np.log(np.atleast_1d(case["mu"]))
        return {"pi": pi, "prox": pi, "mu": mu}
    given = {
        key: np.atleast_1d(np.asarray(case[key], dtype=float)) for key in ("log_r", "log_c", "log_rho") if key in case
    }
    n = len(next(iter(given.values()), [0.0]))
    zero = np.zeros(n)
    # Differences must come out exact, so the policy in the denominator sits at 0 (above some others: the sign check is off).
    if "log_r" not in given:
        return {"pi": given.get("log_rho", zero), "prox": zero, "mu": zero}
    if "log_rho" in given:
        return {"pi": given["log_r"], "prox": zero, "mu": given["log_r"] - given["log_rho"]}
    return {"pi": given["log_r"], "prox": zero, "mu": -given.get("log_c", zero)}


def expected_weights(case: dict[str, Any], n: int) -> np.ndarray:
    return np.resize(np.atleast_1d(np.asarray(case["expect"]["W"], dtype=float)), n) if n else np.zeros(0)


def advantage(case: dict[str, Any], name: str, n: int) -> np.ndarray:
    per_token = any(i.name.value == "A" for i in method(name).doc.inputs)
    A = np.atleast_1d(np.asarray(case["A"], dtype=float))
    return np.resize(A, n) if per_token else A[:1]


PLAIN = [(n, c) for n, c in CASES if n not in (*VOCABULARY, *TRM)]


@pytest.mark.parametrize(("name", "case"), PLAIN, ids=[c["id"] for _, c in PLAIN])
def test_weights_of_the_reference(name: str, case: dict[str, Any]) -> None:
    m, lp, params = method(name), logs(case), parameters(name, case)
    n = len(lp["pi"])
    batch = Batch(seq=np.zeros(n, int), n_seqs=1, logp=lp, values={"A": advantage(case, name, n)})
    params = m.defaults | params
    assert m.W is not None and m.T is not None and m.f is not None
    assert per_token(m.W, batch, params) == pytest.approx(expected_weights(case, n), rel=1e-12, abs=1e-12)
    for knob in ("T", "f"):
        if knob in case["expect"]:
            found = per_token(getattr(m, knob), batch, params)
            assert found == pytest.approx(np.resize(np.atleast_1d(case["expect"][knob]), n), rel=1e-12, abs=1e-12)
    if not case.get("params") or "lo" not in case["params"]:
        assert m.level == ORACLE["methods"][name]["level"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("name", "case"), PLAIN, ids=[c["id"] for _, c in PLAIN])
def test_gradient_of_the_generated_module(
    name: str, case: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lp, params = logs(case), parameters(name, case)
    n = len(lp["pi"])
    loss_fn = instance(name, **params)
    monkeypatch.setattr(type(loss_fn), "_checking", lambda self, x: False)  # the probes put log-probs above 0
    logp = torch.tensor(lp["pi"], dtype=dtype)[None].requires_grad_()
    A = torch.tensor(advantage(case, name, n), dtype=dtype)
    A = A[None] if loss_fn.ADVANTAGES == "token" else A
    inputs = {f"{p}_logp": torch.tensor(lp[p], dtype=dtype)[None] for p in ("prox", "mu")}
    counts = dict.fromkeys(("n_tokens", "n_seqs", "n_groups"), 1)
    out = loss_fn(logp, mask=torch.ones(1, n, dtype=torch.bool), advantages=A, counts=counts, **inputs)
    out.loss.backward()
    assert logp.grad is not None
    lam = 1.0 if method(name).doc.normaliser.value in ("token_mean", "seq_mean_token_sum") else 1.0 / max(n, 1)  # type: ignore[union-attr]
    sign = np.resize(np.atleast_1d(np.asarray(case["A"], dtype=float)), n) if n else np.zeros(0)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    assert -logp.grad[0].double().numpy() == pytest.approx(
        lam * sign * expected_weights(case, n), rel=tolerance, abs=tolerance
    )


# --- methods that read the whole distribution -------------------------------------------------------------------------------

WHOLE = [(n, c) for n, c in CASES if n in TRM]


def distribution(rows: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)[None].log()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("name", "case"), WHOLE, ids=[c["id"] for _, c in WHOLE])
def test_masks_by_the_whole_distribution(name: str, case: dict[str, Any], dtype: torch.dtype) -> None:
    loss_fn = instance(name, **parameters(name, case))
    pi, mu = distribution(case["pi"], dtype), distribution(case["mu"], dtype)
    tokens = torch.tensor([case["y"]])
    logits = (pi + 0.7).requires_grad_()  # any constant: only the softmax matters
    n = tokens.shape[1]
    A = torch.tensor([float(case["A"])], dtype=dtype)
    out = loss_fn.from_logits(logits, tokens, mask=torch.ones(1, n, dtype=torch.bool), advantages=A, mu_logp=mu.gather(-1, tokens[..., None])[..., 0],
                              mu_logprobs=mu, counts={"n_seqs": 1})  # fmt: skip
    out.loss.backward()
    W = torch.tensor(expected_weights(case, n), dtype=dtype)
    score = torch.nn.functional.one_hot(tokens, pi.shape[-1]).to(dtype) - pi.exp()
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    assert logits.grad is not None
    assert -logits.grad.numpy() == pytest.approx((A * W[None, :, None] * score).numpy(), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(("name", "case"), WHOLE, ids=[c["id"] for _, c in WHOLE])
def test_divergences_of_the_reference(name: str, case: dict[str, Any]) -> None:
    m = method(name)
    y, n = np.array(case["y"]), len(case["y"])
    with np.errstate(divide="ignore"):
        logp_v = {p: np.log(np.array(case[p], dtype=float)) for p in ("pi", "mu")}
    batch = Batch(
        seq=np.zeros(n, int),
        n_seqs=1,
        logp={p: x[np.arange(n), y] for p, x in logp_v.items()},
        logp_v=logp_v,
        values={"A": np.array([case["A"]])},
    )
    assert m.W is not None
    assert per_token(m.W, batch, m.defaults | parameters(name, case)) == pytest.approx(
        expected_weights(case, n), rel=1e-12, abs=1e-12
    )
    kl = next(node for node in lossdsl.ir.topological(m.W) if node.op == "reduce" and node.attr == ("sum", "v"))
    assert evaluate(kl, batch, {}) == pytest.approx(np.array(case["expect"]["kl"]), abs=1e-12)


CENTRED = [(n, c) for n, c in CASES if n in VOCABULARY]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("name", "case"), CENTRED, ids=[c["id"] for _, c in CENTRED])
def test_score_centring(name: str, case: dict[str, Any], dtype: torch.dtype) -> None:
    loss_fn = instance(name.removesuffix("_topk"), **parameters(name, case))
    pi, mu = distribution([case["pi"]], dtype), distribution([case["mu"]], dtype)
    tokens = torch.tensor([[case["y"]]])
    logits = (pi - 0.4).requires_grad_()
    given: dict[str, torch.Tensor] = {"mu_logprobs": mu}
    if case.get("topk"):
        ids = torch.tensor([[case["topk"]]])
        given = {"mu_topk_ids": ids, "mu_topk_logprobs": mu.gather(-1, ids)}
    out = loss_fn.from_logits(logits, tokens, mask=torch.ones(1, 1, dtype=torch.bool), advantages=torch.tensor([case["A"]], dtype=dtype),
                              mu_logp=mu.gather(-1, tokens[..., None])[..., 0], counts={"n_tokens": 1}, **given)  # fmt: skip
    out.loss.backward()
    assert logits.grad is not None
    tolerance = 1e-12 if dtype is torch.float64 else 5e-6
    assert (-logits.grad[0, 0]).tolist() == pytest.approx(case["expect"]["dJ_dlogits"], rel=tolerance, abs=tolerance)
    if len(case.get("topk") or []) < len(
        case["pi"]
    ):  # with k = V gamma is rounding noise, which only the gradient forgets
        assert -float(out.loss) == pytest.approx(case["expect"]["J_surrogate"], rel=tolerance * 10, abs=tolerance * 10)


# --- the other blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ORACLE["kl_k3"]["cases"], ids=lambda c: c["id"])
def test_k3(case: dict[str, Any]) -> None:
    loss_fn = instance("grpo_k3", beta=case["beta"])
    logp = torch.tensor([[case["log_pi"]]], dtype=torch.float64, requires_grad=True)
    out = loss_fn(
        logp,
        mask=torch.ones(1, 1),
        advantages=torch.zeros(1),
        prox_logp=logp.detach(),
        ref_logp=torch.tensor([[case["log_ref"]]], dtype=torch.float64),
    )
    out.loss.backward()
    assert logp.grad is not None
    assert float(out.loss) == pytest.approx(case["beta"] * case["expect"]["k3"], abs=1e-12)
    assert -float(logp.grad) == pytest.approx(case["expect"]["coef"], abs=1e-12)


ADVANTAGES = {
    "grpo_ddof1_eps0": ("grpo", {"std_eps": 0.0}, None),
    "grpo_ddof0_eps0": (None, {}, "(R - mean_g(R)) / std_g(R, 0)"),
    "grpo_ddof1_eps1e6": ("grpo", {"std_eps": 1e-6}, None),
    "grpo_ddof1_eps1e4": ("grpo", {"std_eps": 1e-4}, None),
    "dr_grpo": ("dr_grpo", {"L": 1.0}, None),
    "leave_one_out": ("grpo_loo", {}, None),
}


@pytest.mark.filterwarnings("ignore:.*one answer")
@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("case", ORACLE["advantage"]["cases"], ids=lambda c: c["id"])
def test_advantages(case: dict[str, Any], kind: str) -> None:
    name, params, expression = ADVANTAGES[kind]
    loss_fn = instance(name or f"T: r\nobjective: r * A\nadvantage: {expression}", **params)
    rewards = torch.tensor(case["rewards"], dtype=torch.float64)
    groups = torch.zeros(len(rewards), dtype=torch.long)
    if kind == "leave_one_out" and len(rewards) == 1:
        with pytest.raises(ValueError, match="two answers"):
            loss_fn.advantages(rewards, groups)
        return
    assert loss_fn.advantages(rewards, groups).tolist() == pytest.approx(case["expect"][kind], rel=1e-12, abs=1e-12)
    exact_zero = len(set(case["rewards"])) == 1
    if exact_zero:
        assert loss_fn.advantages(rewards.float(), groups).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("case", ORACLE["advantage"]["cases"], ids=lambda c: c["id"])
def test_dynamic_sampling(case: dict[str, Any]) -> None:
    rewards = torch.tensor(case["rewards"])
    kept = instance("dapo").keep(rewards, torch.zeros(len(rewards), dtype=torch.long))
    assert kept.tolist() == [case["expect"]["dapo_keeps_group"]] * len(rewards)


def test_overlong_shaping() -> None:
    cases = ORACLE["overlong_shaping"]["cases"]
    lengths = torch.tensor([c["length"] for c in cases])
    shaped = instance("dapo_overlong").shape(
        torch.zeros(len(cases)), torch.zeros(len(cases), dtype=torch.long), lengths=lengths
    )
    assert shaped.tolist() == pytest.approx([c["expect"] for c in cases], abs=1e-12)


NORMALISERS = {
    "group_mean_of_token_mean (GRPO, GSPO, section 3)": "group_mean_token_mean",
    "group_token_mean (DAPO, CISPO, ScaleRL; prompt level)": "group_token_mean",
    "batch_token_mean (verl token-mean, TRL dapo, SC code)": "token_mean",
    "group_mean_of_token_sum (PipelineRL, TOPR)": "group_mean_token_sum",
    "batch_mean_of_token_sum (TRM 1/N)": "seq_mean_token_sum",
    "sum (DPPO, SAO, SC as printed)": "sum",
}


def test_normalisers() -> None:
    block = ORACLE["normaliser"]
    assert set(block["expect"]) == set(NORMALISERS)
    lengths = [n for group in block["lengths"] for n in group]
    groups = torch.tensor([g for g, group in enumerate(block["lengths"]) for _ in group])
    mask = torch.tensor([[t < n for t in range(max(lengths))] for n in lengths])
    logp = torch.zeros(mask.shape, dtype=torch.float64)
    for key, name in NORMALISERS.items():
        loss_fn = instance(f"T: r\nobjective: r * A\nnormaliser: {name}")
        lp = logp.clone().requires_grad_()
        loss_fn(lp, mask=mask, advantages=torch.ones(len(lengths)), prox_logp=logp, groups=groups).loss.backward()
        assert lp.grad is not None
        expected = [row for group in block["expect"][key] for row in group]
        for i, row in enumerate(expected):
            values = [row] * lengths[i] if not isinstance(row, list) else row
            assert (-lp.grad[i][mask[i]]).tolist() == pytest.approx(values, abs=1e-12), (name, i)


def gae(values: list[float], reward: float, mask: list[int], lam: float) -> list[float]:
    """Generalised advantage estimates with gamma = 1 and a terminal reward, observation tokens skipped."""
    live = [i for i, m in enumerate(mask) if m]
    found, running = [0.0] * len(values), 0.0
    for position in reversed(range(len(live))):
        i = live[position]
        last = position == len(live) - 1
        delta = (reward if last else values[live[position + 1]]) - values[i]
        running = delta + lam * (0.0 if last else running)
        found[i] = running
    return found


@pytest.mark.parametrize("case", ORACLE["gae"]["cases"])
def test_per_token_advantages_of_a_value_model_reach_the_gradient(case: dict[str, Any]) -> None:
    """SAO takes its advantages per token: the oracle's GAE values come back as the on-policy gradient."""
    assert gae(case["values"], case["reward"], case["mask"], case["lam"]) == pytest.approx(case["expect"], abs=1e-12)
    logp = torch.full((1, len(case["expect"])), -1.0, dtype=torch.float64, requires_grad=True)
    A = torch.tensor([case["expect"]], dtype=torch.float64)
    mask = torch.tensor([case["mask"]])
    instance("sao")(logp, mask=mask, advantages=A, mu_logp=logp.detach(), counts={"n_tokens": 1}).loss.backward()
    assert logp.grad is not None
    assert (-logp.grad[0]).tolist() == pytest.approx(
        [a * m for a, m in zip(case["expect"], case["mask"], strict=True)], abs=1e-12
    )


@pytest.mark.parametrize(("name", "edge"), [("grpo", "cap_eps_0.2"), ("dapo", "cap_eps_high_0.28")])
def test_a_rare_token_may_only_grow_to_the_printed_probability(name: str, edge: str) -> None:
    """The review's example: a token of probability 0.01 stops being pushed up beyond 0.012, or 0.0128 with the higher clip."""
    rare = ORACLE["methods"]["dapo"]["seed_rare_token"]
    for factor, kept in ((0.999, True), (1.001, False)):
        logp = torch.tensor([[np.log(rare[edge] * factor)]], dtype=torch.float64, requires_grad=True)
        prox = torch.tensor([[np.log(rare["p_old"])]], dtype=torch.float64)
        instance(name)(logp, mask=torch.ones(1, 1), advantages=torch.ones(1), prox_logp=prox).loss.backward()
        assert logp.grad is not None
        assert bool(logp.grad.item()) is kept
