"""The hidden entry compiled: how many programs, inside a caller's own program, and with what trainers wrap around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import instance
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import lossdsl

V, H = 13, 6


def batch(rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    g = torch.Generator().manual_seed(100 * rows + width)
    mask = torch.rand(rows, width, generator=g) > 0.3
    mask[:, 0] = True
    mu = torch.randn(rows, width, V, generator=g).log_softmax(-1)
    tokens = torch.randint(0, V, (rows, width), generator=g)
    mu_logp = mu.gather(-1, tokens[..., None])[..., 0]
    rest = {
        "mask": mask, "advantages": torch.randn(rows, generator=g), "mu_logprobs": mu, "mu_logp": mu_logp,
        "prox_logp": mu_logp + 0.2 * torch.randn(rows, width, generator=g),
    }  # fmt: skip
    hidden = torch.randn(rows, width, H, generator=g).to(dtype).requires_grad_()
    return hidden, torch.randn(V, H, generator=g).to(dtype).requires_grad_(), tokens, rest


def step(
    loss_fn: Any, b: tuple[Tensor, Tensor, Tensor, dict[str, Any]], **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, tokens, rest = b
    given = {k: v for k, v in rest.items() if k in (*loss_fn.needs, "mask")}
    loss = loss_fn.from_hidden(hidden, weight, tokens, **given, **options).loss
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["dapo", "score_centering"])
def test_one_program_per_pass_for_all_row_counts(name: str) -> None:
    """The rows forward, the weights, the rows back: one each, for any batch, chunk and number of live rows."""
    loss_fn = lossdsl.compile(name)
    type(loss_fn)._compiled.clear()
    for metrics_off in range(2):
        for rows, width in ((3, 7), (5, 9), (2, 33), (4, 8)):
            for budget in (None, 5 * V * 4, 2 * V * 4, 1):
                b = batch(rows, width)
                found = step(loss_fn, b, max_logits_bytes=budget)
                for x, y in zip(found, step(instance(name), b), strict=True):
                    assert torch.allclose(x, y, atol=1e-6)
        if not metrics_off:
            assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("name", ["dapo", "score_centering"])
def test_compiled_it_is_the_same(name: str) -> None:
    """The real thing, through inductor; float32 and, within its rounding, bfloat16."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        b = batch(4, 9, dtype)
        for budget in (None, 7 * V * 4):
            for x, y in zip(
                step(lossdsl.compile(name), b, max_logits_bytes=budget),
                step(instance(name), b, max_logits_bytes=budget),
                strict=True,
            ):
                assert float((x - y).float().norm()) <= tolerance * float(y.float().norm())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["dapo", "gspo", "score_centering", "trm_max", "grpo_entropy"])
def test_a_caller_may_compile_the_whole_step(name: str) -> None:
    """fullgraph=True around the call: the pass is one operator; loss, metrics and gradients are the eager ones."""
    params = {"gspo": {"eps_low": 0.2, "eps_high": 0.3}, "trm_max": {"delta": 100.0}}.get(name, {})  # keep some tokens
    loss_fn = instance(name, **params)
    hidden, weight, tokens, rest = batch(3, 8)
    given = {k: v for k, v in rest.items() if k in (*loss_fn.needs, "mask")}

    def whole(h: Tensor, w: Tensor, softcap: float | None) -> tuple[Tensor, Any]:
        out = loss_fn.from_hidden(torch.tanh(h), w * 2, tokens, softcap=softcap, max_logits_bytes=7 * V * 4, **given)
        return 3 * out.loss, out.metrics

    for softcap in (None, 4.0):
        traced = torch.compile(whole, fullgraph=True)
        loss, metrics = traced(hidden, weight, softcap)
        plain, wanted = whole(hidden, weight, softcap)
        assert torch.allclose(loss, plain, atol=1e-6) and metrics.keys() == wanted.keys()
        for x, y in zip(
            torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(plain, (hidden, weight)), strict=True
        ):
            assert torch.allclose(x, y, atol=1e-6) and bool(y.any())
    assert not counters["graph_break"]


def test_activation_checkpointing(name: str = "dapo") -> None:
    hidden, weight, tokens, rest = batch(3, 8)
    loss_fn = instance(name)
    given = {k: v for k, v in rest.items() if k in (*loss_fn.needs, "mask")}

    def whole(h: Tensor) -> Tensor:
        loss: Tensor = loss_fn.from_hidden(torch.tanh(h), weight, tokens, **given).loss
        return loss

    wanted = torch.autograd.grad(whole(hidden), (hidden, weight))
    found = torch.autograd.grad(checkpoint(whole, hidden, use_reentrant=False), (hidden, weight))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_under_autocast_it_is_what_a_linear_layer_would_be() -> None:
    """bfloat16 products, float32 statistics, gradients in the inputs' own type; topr has no clip edge to flip."""
    hidden, weight, tokens, rest = batch(3, 8)
    loss_fn = instance("topr")
    given = {k: v for k, v in rest.items() if k in (*loss_fn.needs, "mask")}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn.from_hidden(hidden, weight, tokens, **given).loss
        plain = loss_fn.from_logits(torch.nn.functional.linear(hidden, weight), tokens, **given).loss
    assert loss.dtype is torch.float32 and torch.allclose(loss, plain, rtol=1e-3)
    found, wanted = (torch.autograd.grad(x, (hidden, weight)) for x in (loss, plain))
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype is torch.float32 and float((x - y).norm()) < 1e-2 * float(y.norm())
