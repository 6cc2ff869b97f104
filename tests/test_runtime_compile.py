"""Compilation of the runtime: how many programs, for what, and inside a caller's own program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from methods_by_hand import Band, Centred, Clip, Geometric, Hand, Product
from torch import Tensor
from torch._dynamo.utils import counters

from lossdsl.runtime.loss import PolicyLoss


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()
    for method in (Band, Centred, Clip, Geometric, Product):
        method._compiled.clear()


def graphs() -> int:
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


def batch(rows: int = 3, width: int = 7, vocab: int = 11, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rows * 100 + width)
    logps = {
        k: -torch.rand(rows, width, generator=g).to(dtype) - 0.5 for k in ("logp", "prox_logp", "mu_logp", "ref_logp")
    }
    return logps | {
        "mask": torch.rand(rows, width, generator=g) > 0.2, "advantages": torch.randn(rows, generator=g),
        "logits": torch.randn(rows, width, vocab, generator=g).to(dtype), "tokens": torch.randint(0, vocab, (rows, width), generator=g),
        "mu_logprobs": torch.randn(rows, width, vocab, generator=g).log_softmax(-1),
    }  # fmt: skip


def call(loss_fn: PolicyLoss, given: dict[str, Any], logits: bool = False) -> tuple[Tensor, Tensor]:
    given = dict(given)
    x = given.pop("logits" if logits else "logp").detach().requires_grad_()
    given.pop("logp" if logits else "logits")
    tokens = given.pop("tokens")
    out = loss_fn.from_logits(x, tokens, **given) if logits else loss_fn(x, **given)
    out.loss.backward()
    assert x.grad is not None
    return out.loss.detach(), x.grad


SIZES = [(rows, width) for rows in (3, 5) for width in (7, 8, 9, 16, 33, 64, 65)]


@pytest.mark.usefixtures("quick")
def test_one_program_per_pass_for_all_sizes() -> None:
    """Log-probs: one. Logits: the pass forward, the weights, the pass back; the two passes again for a temperature beside 1."""
    for rows, width in SIZES:
        call(Product(), batch(rows, width))
    assert graphs() == 1
    for rows, width in SIZES:
        call(Centred(), batch(rows, width), logits=True)
        call(Centred(), batch(rows, width, vocab=23), logits=True)
    assert graphs() == 1 + 3
    for rows, width in SIZES:
        for temperature in (0.7, 1.3):
            call(Centred(), batch(rows, width, vocab=23) | {"temperature": temperature}, logits=True)
    assert graphs() == 1 + 3 + 2


@pytest.mark.usefixtures("quick")
def test_the_pieces_of_a_chunked_pass_share_one_program() -> None:
    for rows, width in SIZES:
        call(Centred(), batch(rows, width) | {"max_chunk_bytes": 6 * 11 * 4}, logits=True)
    assert graphs() == 3


@pytest.mark.usefixtures("quick")
def test_views_with_gaps_are_as_good_as_whole_tensors() -> None:
    """logp[:, 1:] of a wider tensor is what trainers pass; one more program for it at most."""
    for number, (rows, width) in enumerate(SIZES):
        given = batch(rows, width)
        if number % 2:
            given["logp"] = batch(rows, width + 1)["logp"][:, 1:]
        call(Clip(), given)
    assert graphs() <= 2


@pytest.mark.usefixtures("quick")
def test_evaluation_shares_the_program_of_training() -> None:
    loss_fn = Clip()
    given = batch()
    rest = {k: given[k] for k in ("mask", *loss_fn.needs)}
    trained = loss_fn(given["logp"].requires_grad_(), **rest).loss
    with torch.no_grad():
        evaluated = loss_fn(given["logp"], **rest).loss
    assert graphs() == 1 and torch.equal(trained, evaluated)


@pytest.mark.usefixtures("quick")
def test_no_number_of_losses_and_options_exhausts_the_limit_of_recompilations() -> None:
    """torch.compile gives up, with an error, at eight programs per function: here each option has its own function.

    A folder build has one runtime for all its losses, so all of them count, too.
    """
    wanted = 0
    losses: list[type[PolicyLoss]] = [Clip, Geometric]
    for method in losses:
        for metrics in (False, True):
            for on_missing in ("error", "neutral", "drop"):
                for dtype in (torch.float32, torch.bfloat16):
                    call(method(metrics=metrics, on_missing=on_missing), batch(dtype=dtype))
                    wanted += 1
    assert graphs() == wanted == 24 > 2 * torch._dynamo.config.recompile_limit


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("logits", [False, True])
def test_a_caller_may_compile_the_whole_step(logits: bool, compiled: bool) -> None:
    """fullgraph=True around the call, metrics and all: no graph break, the same loss, gradient and metrics."""
    method: type[Hand] = Centred if logits else Band
    loss_fn = method(compile=compiled)
    given = batch()
    names = [k for k in given if k in ("mask", *loss_fn.needs)]
    x, tokens = given["logits" if logits else "logp"], given["tokens"]

    def step(x: Tensor, tokens: Tensor, rest: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        out = loss_fn.from_logits(x, tokens, **rest) if logits else loss_fn(x, **rest)
        return out.loss * 2, out.metrics

    rest = {k: given[k] for k in names}
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, metrics = torch.compile(step, fullgraph=True)(one, tokens, rest)
    plain, wanted = step(two, tokens, rest)
    loss.backward()
    plain.backward()
    assert torch.allclose(loss, plain) and one.grad is not None and two.grad is not None
    assert torch.allclose(one.grad, two.grad, atol=1e-7) and bool(one.grad.any())
    assert metrics.keys() == wanted.keys()
    for key, (total, count) in wanted.items():
        assert torch.allclose(metrics[key][0], total, atol=1e-6) and torch.equal(metrics[key][1], count)


@pytest.mark.parametrize("logits", [False, True])
def test_what_is_compiled_is_what_runs_eagerly(logits: bool) -> None:
    """The real thing, through inductor, once per entry."""
    method: type[Hand] = Centred if logits else Band
    given = batch(dtype=torch.float64)
    loss, gradient = call(method(), given, logits)
    plain, wanted = call(method(compile=False), given, logits)
    assert torch.allclose(loss, plain, rtol=1e-12) and torch.allclose(gradient, wanted, rtol=0, atol=1e-12)
