"""The log-prob entry against its own objective in plain PyTorch, eager and compiled: forward and backward, as ratios.

All run in one process in alternating rounds after a warm-up; a figure is the median over the rounds of the fastest of
a round's few steps (another process on the machine would else decide it). The allocator keeps its pages (on a fresh
large tensor the first touch would cost more than the arithmetic). Ours gets a bool mask and
checks every value; the plain loss checks nothing and gets the mask as floats, the fastest for it (a compiled CPU
kernel needs 0.5 ms per million bools).

    python bench/logp.py                          # ten methods, also against losses written by hand; with metrics
    python bench/logp.py token_tis --rounds 60    # one
    python bench/logp.py --all                    # every built-in that reads no whole distribution: some ten minutes
    python bench/logp.py --mask bool              # the plain loss gets the mask as it is
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(32 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}
# torch.compile's disk cache may hold a kernel that was made for a smaller batch, and uses one thread.
CACHE = "TORCHINDUCTOR_CACHE_DIR"
REQUIRED = {  # values for parameters without a default
    "scalerl_gspo": {"eps_low": 3e-4, "eps_high": 4e-4},
    "deepseek_v32_mask": {"delta": 0.01},
    "dr_grpo": {"L": 4096.0},
    "vaco": {"delta": 0.05},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The log-prob entry against plain PyTorch.")
    parser.add_argument("methods", nargs="*", help="built-ins; default: the ten of bench/plain.py")
    parser.add_argument("--all", action="store_true", help="all built-ins, without metrics")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps of one path in a row within a round")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mask", choices=["float32", "int64", "bool"], default="float32", help="for the plain loss")
    args = parser.parse_args()
    os.environ.setdefault(CACHE, f"{tempfile.gettempdir()}/lossdsl-bench-{args.rows}x{args.width}x{args.threads}")

    import torch
    from objective import readable
    from plain import METHODS

    import lossdsl

    torch.set_num_threads(args.threads)
    names = args.methods or [n for n in lossdsl.builtins() if readable(lossdsl.load(n)) and (args.all or n in METHODS)]
    print(
        f"{processor()}, {args.threads} threads; Python {platform.python_version()}, torch {torch.__version__}; "
        f"[{args.rows}, {args.width}] float32, forward and backward, median over {args.rounds} alternating "
        f"rounds of the fastest of {args.steps} steps; the plain loss's mask is {args.mask}\n"
    )
    print("| method | ours, ms | with metrics | eager / ours | compiled / ours | by hand, eager | compiled | loss |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        print(measure(name, args), flush=True)


def measure(name: str, args: argparse.Namespace) -> str:
    import torch
    from objective import plain
    from plain import METHODS

    import lossdsl
    from lossdsl.schedule import Schedule

    torch.manual_seed(0)
    torch._dynamo.reset()
    shape = (args.rows, args.width)
    prox = -torch.rand(shape) * 3 - 0.5
    near = {f"{policy}_logp": prox + 0.1 * torch.randn(shape) for policy in ("mu", "ref")}
    logp = (prox + 0.1 * torch.randn(shape)).requires_grad_()
    mask, A = torch.rand(shape) > 0.1, torch.randn(args.rows)
    method, chosen = lossdsl.load(name), REQUIRED.get(name, {})
    if Schedule(method).advantages == "token":
        A = A[:, None].expand(shape).contiguous()
    entropies = {"entropy": torch.rand(shape) + 0.5, "old_entropy": torch.rand(shape) + 0.5}
    given = {"prox_logp": prox, **near, **entropies}
    data = given | {"logp": logp, "A": A, "mask": mask.to(getattr(torch, args.mask))}

    bare = lossdsl.compile(name, metrics=False, **chosen)
    inputs = {k: x for k, x in given.items() if k in bare.needs or k == "entropy"}
    losses = {"ours": bare} if args.all else {"ours": bare, "metrics": lossdsl.compile(name, **chosen)}
    rivals: dict[str, Callable[[], torch.Tensor]] = {
        key: lambda loss=loss: loss(logp, mask=mask, advantages=A, **inputs).loss for key, loss in losses.items()
    }
    values = {k: x for k, x in method.defaults.items() if x is not None} | chosen
    written = {"": plain(method, values)} | ({"hand ": METHODS[name]} if name in METHODS and not args.all else {})
    for key, loss in written.items():
        rivals[f"{key}eager"] = lambda loss=loss: loss(data)
        fast = torch.compile(loss)
        rivals[f"{key}compiled"] = lambda loss=fast: loss(data)

    def step(run: Callable[[], torch.Tensor]) -> float:
        logp.grad = None
        start = time.perf_counter()
        run().backward()
        return time.perf_counter() - start

    found, gradients = {}, {}
    for key, run in rivals.items():  # warm-up, and the same answer from all
        for _ in range(3):
            step(run)
        found[key], gradients[key] = float(run().detach()), logp.grad.clone()
    scale = gradients["eager"].abs().max()
    for key in rivals:  # a ratio on the very edge of a clip may round to either side of it
        other = (gradients[key] - gradients["eager"]).abs() > 1e-4 * scale
        assert other.float().mean() < 1e-5, f"{name}: {key} has another gradient"
    times: dict[str, list[float]] = {key: [] for key in rivals}
    for number in range(args.rounds):
        for key in list(rivals)[:: 1 if number % 2 else -1]:
            times[key].append(min(step(rivals[key]) for _ in range(args.steps)))
    median = {key: statistics.median(values) for key, values in times.items()}

    def ratio(key: str) -> str:
        return f"{median[key] / median['ours']:.2f}" if key in median else "–"

    cells = [name, f"{median['ours'] * 1e3:.2f}", f"{median['metrics'] * 1e3:.2f}" if "metrics" in median else "–"]
    cells += [ratio(key) for key in ("eager", "compiled", "hand eager", "hand compiled")]
    return f"| {' | '.join(cells)} | {found['ours']:.6f}, {found['eager']:.6f} |"


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
