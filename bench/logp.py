"""The log-prob entry against the same formula in plain PyTorch, eager and compiled: forward and backward, as ratios.

All three run in one process in alternating rounds after a warm-up; the figure is the median over the rounds. The
allocator keeps its pages (on a fresh large tensor the first touch would cost more than the arithmetic).

    python bench/logp.py                          # ten methods
    python bench/logp.py token_tis --rounds 60    # one
    python bench/logp.py --all                    # every built-in against compiled autograd of its own objective
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(32 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}


def main() -> None:
    parser = argparse.ArgumentParser(description="The log-prob entry against plain PyTorch.")
    parser.add_argument("methods", nargs="*", help="some of the methods in bench/plain.py; default: all of them")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps of one path in a row within a round")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    import torch
    from plain import METHODS

    import lossdsl

    torch.set_num_threads(args.threads)
    print(
        f"{processor()}, {args.threads} threads; Python {platform.python_version()}, torch {torch.__version__}; ",
        end="",
    )
    print(
        f"[{args.rows}, {args.width}] float32, forward and backward, median of {args.rounds} alternating rounds of {args.steps} steps\n"
    )
    print("| method | ours, ms | with metrics | eager / ours | compiled / ours | loss (ours, plain) |")
    print("|---|---|---|---|---|---|")
    for name in args.methods or METHODS:
        print(measure(name, METHODS[name], args, lossdsl, torch), flush=True)


def measure(name, plain, args, lossdsl, torch) -> str:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    shape = (args.rows, args.width)
    prox = -torch.rand(shape) * 3 - 0.5
    data = {
        "prox_logp": prox,
        "mu_logp": prox + 0.1 * torch.randn(shape),
        "mask": torch.rand(shape) > 0.1,
        "A": torch.randn(args.rows),
    }
    logp = (prox + 0.1 * torch.randn(shape)).requires_grad_()
    inputs = {"mask": data["mask"], "advantages": data["A"], "prox_logp": data["prox_logp"], "mu_logp": data["mu_logp"]}
    rivals: dict[str, Callable[[], torch.Tensor]] = {"eager": lambda: plain(data | {"logp": logp})}
    compiled = torch.compile(plain)
    rivals["compiled"] = lambda: compiled(data | {"logp": logp})
    bare, full = lossdsl.compile(name, metrics=False), lossdsl.compile(name)
    rivals["ours"] = lambda: bare(logp, **inputs).loss
    rivals["metrics"] = lambda: full(logp, **inputs).loss

    def step(run: Callable[[], torch.Tensor], times: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(times):
            logp.grad = None
            run().backward()
        return (time.perf_counter() - start) / times

    losses, gradients = {}, {}
    for key, run in rivals.items():  # warm-up, and the same answer from all
        for _ in range(3):
            step(run)
        losses[key], gradients[key] = float(run().detach()), logp.grad.clone()
    scale = gradients["eager"].abs().max()
    for key in ("compiled", "ours", "metrics"):
        assert (gradients[key] - gradients["eager"]).abs().max() < 1e-4 * scale, f"{name}: {key} has another gradient"
    times: dict[str, list[float]] = {key: [] for key in rivals}
    for number in range(args.rounds):
        for key in list(rivals)[:: 1 if number % 2 else -1]:
            times[key].append(step(rivals[key], args.steps))
    median = {key: statistics.median(values) for key, values in times.items()}
    ours = median["ours"]
    return (
        f"| {name} | {ours * 1e3:.2f} | {median['metrics'] * 1e3:.2f} | {median['eager'] / ours:.1f} | "
        f"{median['compiled'] / ours:.2f} | {losses['ours']:.6f}, {losses['eager']:.6f} |"
    )


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    if any(os.environ.get(key) != value for key, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    main()
