"""Small tools shared by the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lossdsl
from lossdsl.api import method_of
from lossdsl.emit.module import module_text
from lossdsl.errors import Source
from lossdsl.loading import import_text
from lossdsl.method import Method
from lossdsl.specdoc import read_spec

DATA = Path(__file__).parent / "data"
NAN = float("nan")


class Run(NamedTuple):
    loss: float
    grad: list[Any]  # d loss / d logp, in the shape of logp
    metrics: dict[str, float]


def method(text: str) -> Method:
    """The checked method of a spec given as text; a spec that leaves them out gets a version, a name and a normaliser."""
    head = "" if "lossdsl:" in text else "lossdsl: 1\n"
    head += "" if "name:" in text.replace("{name:", "") else "name: probe\n"
    tail = "" if "normaliser:" in text else "\nnormaliser: token_mean\n"
    return method_of(read_spec(Source("probe.yaml", head + text + tail)))[0]


def loss_class(text: str) -> Any:
    """The generated class of a spec given as text."""
    import hashlib

    return import_text(module_text(method(text)), "probe_" + hashlib.sha256(text.encode()).hexdigest()[:16]).Loss


def instance(spec: str, **params: Any) -> Any:
    """An eager instance of a built-in (by name) or of a spec given as text."""
    if spec in lossdsl.builtins():
        return lossdsl.compile(spec, compile=False, **params)
    return loss_class(spec)(compile=False, **params)


def tensor(x: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=dtype)


def run(loss_fn: Any, logp: Any, *, A: Any, mask: Any = None, dtype: torch.dtype = torch.float64, **inputs: Any) -> Run:
    """Loss, gradient and metric summary of one call; plain nested lists are turned into tensors."""
    lp = tensor(logp, dtype).detach().clone().requires_grad_()
    named = {"prox": "prox_logp", "mu": "mu_logp", "ref": "ref_logp"}
    given = {
        named.get(k, k): tensor(v, dtype) if isinstance(v, list) and k not in ("groups", "seq_ids") else v
        for k, v in inputs.items()
    }
    for key in ("groups", "seq_ids"):
        if isinstance(given.get(key), list):
            given[key] = torch.tensor(given[key])
    m = torch.ones(lp.shape, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    out = loss_fn(lp, mask=m, advantages=tensor(A, dtype), **given)
    out.loss.backward()
    assert lp.grad is not None
    return Run(float(out.loss.detach()), lp.grad.tolist(), loss_fn.summary(out.metrics) if out.metrics else {})
