"""Every built-in on real rollouts of a small model: stale, mismatched, ragged, as they come."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DATA, instance
from layouts import CHOSEN, reads_logits
from safetensors.torch import load_file

import lossdsl
from lossdsl.reference import Batch, logits_gradient, per_token


@cache
def rollouts() -> dict[str, torch.Tensor]:
    data = {k: v.double() if v.is_floating_point() else v for k, v in load_file(DATA / "rollouts.safetensors").items()}
    logits = data["hidden"] @ data["lm_head"].T
    logp_v = logits.log_softmax(-1)
    data["logits"] = logits
    # All policies from one place in float64: the stored float32 log-probs of pi differ from these in the last digits.
    data["logp"] = torch.where(data["mask"], logp_v.gather(-1, data["tokens"].long()[..., None])[..., 0], 0.0)
    data["old_entropy"] = -(logp_v.exp() * logp_v).sum(-1) * 1.02
    return data


def test_the_data_is_what_its_readme_says() -> None:
    data, stored = rollouts(), load_file(DATA / "rollouts.safetensors")
    assert data["mask"].sum() == 2827 and data["mask"].shape[0] == 96
    gathered = (data["logp"] - stored["logp"])[data["mask"]].abs().max()
    assert gathered < 2e-5
    advantages = instance("grpo").advantages(stored["reward"], stored["group"])
    assert torch.allclose(advantages, stored["advantage"], atol=1e-5)


def reference(name: str) -> tuple[Batch, np.ndarray, dict[str, float]]:
    data, method = rollouts(), lossdsl.load(name)
    mask = data["mask"]
    rows = mask.nonzero()[:, 0].numpy()
    flat = {
        k: data[k][mask].numpy() for k in ("logp", "prox_logp", "mu_logp", "ref_logp", "mu_logprobs", "old_entropy")
    }
    logp = {"pi": flat["logp"], "prox": flat["prox_logp"], "mu": flat["mu_logp"], "ref": flat["ref_logp"]}
    logp_v = {"pi": data["logits"][mask].log_softmax(-1).numpy(), "mu": flat["mu_logprobs"]}
    A = data["advantage"].numpy()
    per_token_A = any(i.name.value == "A" for i in method.doc.inputs)
    values = {"A": A[rows] if per_token_A else A, "old_entropy": flat["old_entropy"]}
    batch = Batch(seq=rows, n_seqs=mask.shape[0], group=data["group"].numpy(), logp=logp, logp_v=logp_v, values=values)
    defaults = {k: v for k, v in method.defaults.items() if v is not None}
    return batch, data["tokens"][mask].numpy(), defaults | CHOSEN.get(name, {})


def inputs(name: str, loss_fn: Any) -> dict[str, Any]:
    data = rollouts()
    given = {
        k: data[k] for k in ("prox_logp", "mu_logp", "ref_logp", "mu_logprobs", "mask") if k in (*loss_fn.needs, "mask")
    }
    given["advantages"] = data["advantage"]
    if loss_fn.ADVANTAGES == "token":
        given["advantages"] = data["advantage"][:, None].expand(data["mask"].shape)
    if "groups" in loss_fn.needs:
        given["groups"] = data["group"].long()
    return given | {k: data[k] for k in loss_fn.INPUTS}


@pytest.mark.parametrize("name", lossdsl.builtins())
def test_loss_and_gradients_are_the_reference_s(name: str) -> None:
    loss_fn = instance(name, **CHOSEN.get(name, {}))
    method = lossdsl.load(name)
    batch, tokens, params = reference(name)
    data = rollouts()
    total = per_token(method.normaliser, batch, params) * per_token(method.objective, batch, params)
    for term in method.terms:
        total = total + per_token(term.normaliser, batch, params) * per_token(term.add, batch, params)

    logits = data["logits"].clone().requires_grad_()
    out = loss_fn.from_logits(logits, data["tokens"].long(), **inputs(name, loss_fn))
    out.loss.backward()
    assert logits.grad is not None
    assert float(out.loss.detach()) == pytest.approx(-float(total.sum()), rel=1e-10, abs=1e-10)
    wanted = -logits_gradient(method.gradient, tokens, batch, params)
    assert np.abs(logits.grad[data["mask"]].numpy() - wanted).max() < 1e-10
    assert float(logits.grad[~data["mask"]].abs().sum()) == 0.0

    if not reads_logits(loss_fn):
        logp = data["logp"].clone().requires_grad_()
        given = inputs(name, loss_fn)
        if "entropy" in loss_fn.SUMS:
            p = data["logits"].log_softmax(-1)
            given["entropy"] = -(p.exp() * p).sum(-1)
        loss_fn(logp, **given).loss.backward()
        assert logp.grad is not None
        assert np.abs(logp.grad[data["mask"]].numpy() + per_token(method.gradient.coef, batch, params)).max() < 1e-10


def test_the_top_k_of_the_sampler_is_close_to_the_whole() -> None:
    """Eight of 32 entries: most of the mass, so most of the centring."""
    data, found = rollouts(), []
    for given in (
        {"mu_logprobs": data["mu_logprobs"]},
        {"mu_topk_ids": data["mu_topk_ids"].long(), "mu_topk_logprobs": data["mu_topk_logprobs"]},
        {"mu_topk_ids": data["mu_topk_ids"].long()[..., :1], "mu_topk_logprobs": data["mu_topk_logprobs"][..., :1]},
    ):
        logits = data["logits"].clone().requires_grad_()
        loss_fn = instance("score_centering")
        loss_fn.from_logits(
            logits, data["tokens"].long(), mask=data["mask"], advantages=data["advantage"], **given
        ).loss.backward()
        assert logits.grad is not None
        found.append(logits.grad)
    whole, eight, one = found
    distance = [float((x - whole).norm() / whole.norm()) for x in (eight, one)]
    assert distance[0] < 0.05 < distance[1]
