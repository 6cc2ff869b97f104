"""Compilation: no graph breaks, one graph for all lengths, none for a new parameter value, a warm cache for a new process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import lossdsl


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def batch(rows: int, width: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 100 + width)
    lp = {k: -torch.rand(rows, width, generator=generator, dtype=dtype) for k in ("logp", "prox_logp", "mu_logp")}
    mask = torch.rand(rows, width, generator=generator) > 0.2
    return lp | {"mask": mask, "advantages": torch.randn(rows, generator=generator)}


def call(loss_fn: torch.nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    given = dict(given)
    logp = given.pop("logp").requires_grad_()
    out = loss_fn(logp, **given)
    out.loss.backward()
    return out.loss.detach()


@pytest.mark.parametrize("name", ["token_tis", "seq_tis"])
def test_one_graph_for_all_lengths_and_batch_sizes(name: str) -> None:
    loss_fn = lossdsl.compile(name)
    type(loss_fn)._compiled.clear()
    for rows in (3, 5):
        for width in (7, 8, 9, 16, 33, 64, 65):
            call(loss_fn, batch(rows, width))
    assert graphs() == 1
    assert not counters["graph_break"]
    for rows, width in ((1, 7), (3, 1)):  # a size of one may take one graph of its own
        call(loss_fn, batch(rows, width))
    assert graphs() <= 3


def test_a_changed_parameter_is_new_data_not_a_new_program() -> None:
    loss_fn = lossdsl.compile("dapo")
    type(loss_fn)._compiled.clear()
    given = batch(4, 9)
    first = call(loss_fn, given)
    loss_fn.eps_high = 0.9
    loss_fn.eps_low = 0.9
    second = call(loss_fn, given)
    eager = lossdsl.compile("dapo", compile=False, eps_high=0.9, eps_low=0.9)
    assert graphs() == 1
    assert not torch.equal(first, second)
    assert torch.allclose(second, call(eager, given))


def test_packed_batches_share_one_graph() -> None:
    loss_fn = lossdsl.compile("gspo")
    type(loss_fn)._compiled.clear()
    for n in (7, 20, 33):
        given = {k: v.reshape(-1)[:n] for k, v in batch(5, 9).items() if k != "advantages"}
        ids = torch.arange(n) // 3
        call(loss_fn, given | {"seq_ids": ids, "advantages": torch.randn(n)})
    assert graphs() == 1


def test_instances_share_one_compiled_function() -> None:
    one, two = lossdsl.compile("grpo"), lossdsl.compile("grpo", eps=0.4)
    type(one)._compiled.clear()
    call(one, batch(4, 9))
    call(two, batch(4, 9))
    assert graphs() == 1


SECOND = """
import torch, lossdsl
from torch._dynamo.utils import counters
loss_fn = lossdsl.compile("grpo")
lp = -torch.rand(3, 7)
loss_fn(lp.requires_grad_(), mask=torch.ones(3, 7, dtype=torch.bool), advantages=torch.ones(3), prox_logp=lp.detach()).loss.backward()
print("hits", counters["inductor"]["fxgraph_cache_hit"], "misses", counters["inductor"]["fxgraph_cache_miss"])
"""


def test_a_second_process_finds_the_first_one_s_code(tmp_path: Path) -> None:
    import os

    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", SECOND], env=env, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0].strip() == "hits 0 misses 1"
    assert runs[1].strip() == "hits 1 misses 0"


def test_the_loss_inside_a_compiled_training_step_may_stay_outside_of_it() -> None:
    """A trainer that compiles its own step calls the loss as one opaque piece: the numbers are the same."""
    loss_fn = lossdsl.compile("grpo", compile=False)

    @torch.compiler.disable
    def opaque(logp: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_fn(logp, **given).loss

    given = batch(3, 5)
    weight = torch.ones(3, 5, requires_grad=True)
    logp = given.pop("logp")
    (torch.compile(lambda w: opaque(w * logp, given), backend="eager")(weight)).backward()
    assert weight.grad is not None
    plain = torch.ones(3, 5, requires_grad=True)
    loss_fn(plain * logp, **given).loss.backward()
    assert plain.grad is not None
    assert torch.allclose(weight.grad, plain.grad)
