"""The main job on real rollouts: build five losses from their specs, import the generated files, run them, compare.

The rollouts are 96 answers of a small transformer to 12 prompts, stored with the log-probs of the current policy, the
trainer's snapshot (three updates older) and the sampler (a 5-bit copy). `make demo` runs this.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

import lossdsl

METHODS = ("grpo", "dapo", "cispo", "token_tis", "score_centering")
ROLLOUTS = Path(__file__).parent.parent / "tests" / "data" / "rollouts.safetensors"


def main() -> None:
    data = load_file(ROLLOUTS)
    with tempfile.TemporaryDirectory() as folder:
        files = lossdsl.build_all(METHODS, Path(folder) / "losses")
        sys.path.insert(0, folder)
        print(f"built {', '.join(f.name for f in files)}\n")
        print(f"{'method':16} {'loss':>9} {'|gradient|':>11} {'silenced':>9}   ratios over live tokens")
        for name in METHODS:
            print(row(name, importlib.import_module(f"losses.{name}").Loss(), data))
    print("\nsilenced: the share of live tokens whose weight W is 0; the gradient is with respect to the logits")


def row(name: str, loss_fn: torch.nn.Module, data: dict[str, torch.Tensor]) -> str:
    """One line of the table: the loss and its gradient on the whole batch, through the logits entry."""
    logits = (data["hidden"].float() @ data["lm_head"].float().T).requires_grad_()
    inputs = {k: data[k] for k in ("prox_logp", "mu_logp", "ref_logp", "mu_logprobs")}
    out = loss_fn.from_logits(logits, data["tokens"].long(), mask=data["mask"], advantages=data["advantage"], **inputs)
    out.loss.backward()
    metrics = loss_fn.summary(out.metrics)
    ratios = [x for x in ("r", "c", "rho") if f"{x}/mean" in metrics]
    shown = ", ".join(f"{x} {metrics[f'{x}/mean']:.3f} (max {metrics[f'{x}/max']:.2f})" for x in ratios) or "none"
    return f"{name:16} {out.loss.item():9.4f} {logits.grad.norm().item():11.4f} {metrics['W/zero']:9.1%}   {shown}"


if __name__ == "__main__":
    main()
