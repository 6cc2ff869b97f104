"""Two processes on gloo: the gradient of DDP and of FSDP2 is the single process's, with global counts and no rescaling but theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import instance
from torch import Tensor

V, H, B, T = 11, 6, 4, 5


class Model(torch.nn.Module):
    """An embedding, a layer and a head that is tied to the embedding or not; its forward is the loss."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(V, H)
        self.body = torch.nn.Linear(H, H)
        self.head = torch.nn.Linear(H, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.loss = instance("grpo")

    def forward(self, tokens: Tensor, rest: dict[str, Any]) -> Tensor:
        hidden = torch.tanh(self.body(self.embed(tokens)))
        loss: Tensor = self.loss.from_hidden(
            hidden, self.head.weight, tokens, shift=True, max_logits_bytes=3 * V * 4, **rest
        ).loss
        return loss


def batch() -> tuple[Tensor, dict[str, Any]]:
    g = torch.Generator().manual_seed(1)
    mask = torch.rand(B, T, generator=g) > 0.3
    mask[:, 0], mask[:, 1] = False, True
    prox = -2.4 + 0.3 * torch.randn(B, T, generator=g)
    rest = {"mask": mask, "advantages": torch.randn(B, generator=g), "prox_logp": prox}
    return torch.randint(0, V, (B, T), generator=g), rest


def single(tied: bool) -> dict[str, Tensor]:
    model = Model(tied)
    tokens, rest = batch()
    model(tokens, rest).backward()
    return {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


def work(rank: int, kind: str, tied: bool, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )  # a port may be taken
    torch.set_num_threads(1)
    model = Model(tied)
    wrapped: Any = model
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        wrapped = fully_shard(model)
    tokens, rest = batch()
    mine = slice(2 * rank, 2 * rank + 2)
    counts = {"n_seqs": B}
    loss = wrapped(tokens[mine], {k: x[mine] for k, x in rest.items()} | {"counts": counts})
    (2 * loss).backward()  # both average over the two ranks
    grads = {k.removeprefix("module."): p.grad for k, p in wrapped.named_parameters()}
    whole = {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in grads.items() if g is not None}
    if rank == 0:
        torch.save(whole, Path(folder) / "gradients.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(("kind", "tied"), [("ddp", False), ("ddp", True), ("fsdp2", False), ("fsdp2", True)])
def test_two_ranks_are_one(kind: str, tied: bool, tmp_path: Path) -> None:
    mp.spawn(work, args=(kind, tied, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
    found, wanted = torch.load(tmp_path / "gradients.pt"), single(tied)
    assert found.keys() == wanted.keys() and any(bool(g.any()) for g in wanted.values())
    for key, gradient in wanted.items():
        assert torch.allclose(found[key], gradient, rtol=1e-4, atol=1e-6), key


def test_a_sharded_head_is_refused_with_what_to_do(tmp_path: Path) -> None:
    class Sharded(torch.Tensor):
        def full_tensor(self) -> Tensor:
            return self

    tokens, rest = batch()
    with pytest.raises(TypeError, match="full_tensor"):
        instance("grpo").from_hidden(torch.zeros(B, T, H), torch.zeros(V, H).as_subclass(Sharded), tokens, **rest)
