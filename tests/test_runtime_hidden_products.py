"""The hidden entry multiplies what carries a gradient and nothing else: rows of each product with the head, counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import instance
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):
    """The rows of every product: with the head [rows, H] x [H, V], back [rows, V] x [V, H], and for the head [V, rows] x [rows, H]."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.forward, self.backward, self.head = vocab, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_) and isinstance(
            out, Tensor
        ):
            if out.shape[1] == self.vocab:
                self.forward += out.shape[0]
            elif out.shape[0] != self.vocab:
                self.backward += out.shape[0]
            else:
                self.head += args[-2].shape[1]
        return out


def batch(frozen: bool = False) -> dict[str, Any]:
    """Four answers of six tokens, on policy, every advantage 1."""
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 6, 3, generator=g).requires_grad_()
    head = torch.randn(11, 3, generator=g).requires_grad_(not frozen)
    tokens = torch.randint(0, 11, (4, 6), generator=g)
    logp = (hidden @ head.T).log_softmax(-1).gather(-1, tokens[..., None])[..., 0].detach()
    return {
        "hidden": hidden, "lm_head_weight": head, "tokens": tokens, "mask": torch.ones(4, 6, dtype=torch.bool),
        "advantages": torch.ones(4), "prox_logp": logp, "mu_logp": logp, "ref_logp": logp - 0.3,
    }  # fmt: skip


def count(name: str, given: dict[str, Any], metrics: bool = False) -> Products:
    with Products(given["lm_head_weight"].shape[0]) as seen:
        out = instance(name, metrics=metrics).from_hidden(**given)
        if out.loss.requires_grad:
            out.loss.backward()
    return seen


@pytest.mark.parametrize(
    ("name", "metrics", "forward"),
    [("dapo", False, 12), ("dapo", True, 24), ("gspo", False, 12), ("grpo_k3", False, 24)],
)
def test_answers_without_an_advantage_leave_before_the_first_product(name: str, metrics: bool, forward: int) -> None:
    """Two of four answers have A = 0. Metrics want their rows in the forward; a penalty without A wants them wholly."""
    seen = count(name, batch() | {"advantages": torch.tensor([1.0, 0.0, -1.0, 0.0])}, metrics)
    assert seen.forward == forward
    assert seen.backward == (24 if name == "grpo_k3" else 12)


def test_masked_rows_are_not_multiplied() -> None:
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[:, :2] = True
    seen = count("dapo", batch() | {"mask": mask}, True)
    assert (seen.forward, seen.backward) == (8, 8)


def test_rows_that_are_clipped_skip_the_products_back() -> None:
    """A > 0 and r = 2 for three answers of four: masked, and without a gradient."""
    given = batch()
    given["prox_logp"] = given["prox_logp"] - math.log(2) * torch.tensor([1.0, 1, 1, 0])[:, None]
    seen = count("dapo", given)
    assert (seen.forward, seen.backward) == (24, 6)
    grad = given["hidden"].grad
    assert not bool(grad[:3].any()) and bool(grad[3].any())


def test_a_frozen_head_takes_no_product_and_no_gradient() -> None:
    given = batch(frozen=True)
    seen = count("dapo", given)
    assert seen.backward == 24 and seen.head == 0 and given["lm_head_weight"].grad is None
    assert count("dapo", batch()).head == 24


def test_without_gradients_there_is_only_the_forward() -> None:
    given = batch(frozen=True)
    seen = count("dapo", given | {"hidden": given["hidden"].detach()})
    assert (seen.forward, seen.backward, seen.head) == (24, 0, 0)
