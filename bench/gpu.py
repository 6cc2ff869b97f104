"""The same on a CUDA GPU in one call of under five minutes: time, peak memory, and the rates that this run measured.

python bench/gpu.py                        # H 4096, V 151936, bf16, 16384 tokens
python bench/gpu.py --device cpu --tokens 512 --hidden 64 --vocab 2048 --dtype fp32   # the script itself, checked anywhere
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch
from hidden import bare, batch, machine, measure, ours, rivals, versions


def main() -> None:
    parser = argparse.ArgumentParser(description="From hidden states to gradients on a GPU, against rivals.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240, help="no new part starts after this")
    args = parser.parse_args()
    args.threads = torch.get_num_threads()
    began = time.perf_counter()
    case = (args.tokens, args.hidden, args.vocab, args.dtype)
    print(f"{machine(args)}; {versions()}; medians of {args.rounds} alternating rounds", flush=True)
    b = batch(*case, args.device)
    print(rates(b, args.device), flush=True)
    paths = {"three matrix products": bare(b)}
    paths |= {f"lossdsl, {n >> 20} MiB of logits": ours(b, budget=n) for n in (256 << 20, 1 << 30, 2 << 30)}
    paths |= {"lossdsl, compile=False": ours(b, compile=False), "GSPO": ours(b, "gspo", eps_low=0.2, eps_high=0.3)}
    half = torch.arange(b["mask"].numel(), device=args.device).reshape(b["mask"].shape) % 2 == 0
    paths["half the rows masked"] = ours({**b, "mask": half})
    paths["frozen head"] = ours({**b, "weight": b["weight"].detach()})
    table("lossdsl", paths, b, case, args)
    for name, path in rivals(b).items():
        if time.perf_counter() - began > args.seconds:
            print(f"({name}: no time left)")
            continue
        table(name, {"three matrix products": bare(b), name: path}, b, case, args)
    print(f"\n{time.perf_counter() - began:.0f} s in all")


def table(
    title: str, paths: dict[str, Any], b: dict[str, Any], case: tuple[Any, ...], args: argparse.Namespace
) -> None:
    peaks = {}
    for key, run in list(paths.items()):
        try:
            peaks[key] = peak(run, b, args.device)
        except torch.OutOfMemoryError:
            print(f"({key}: out of memory)")
            del paths[key]
    found, values, _ = measure(paths, args.rounds, args.device)
    unit = found.get("three matrix products", float("nan"))
    size = "N {}, H {}, V {}, {}".format(*case)
    print(f"\n| {title}: {size} | ms | units | peak MiB above inputs | loss |")
    print("|---|---|---|---|---|")
    for key, t in found.items():
        value = "" if values[key] is None else f"{float(values[key]):.6f}"
        print(f"| {key} | {t * 1e3:.1f} | {t / unit:.2f} | {peaks[key]} | {value} |", flush=True)


def peak(run: Any, b: dict[str, Any], device: str) -> str:
    """MiB above what is held already, of a call; the first call, with its compilation, is not counted."""
    run()
    if device == "cpu":
        return "-"
    for x in b.values():  # the gradients of the call before are not the machine's, nor this call's
        x.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - before) >> 20}"


def rates(b: dict[str, Any], device: str) -> str:
    """What this machine gives: bytes of a copy, and the arithmetic of the three products."""
    n, h, v = b["tokens"].numel(), b["hidden"].shape[-1], len(b["weight"])
    x = torch.empty(256 << 20 if device != "cpu" else 8 << 20, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    found, _, _ = measure({"copy": lambda: y.copy_(x), "products": bare(b)}, 5, device)
    return f"measured here: {2 * x.numel() / found['copy'] / 1e9:.0f} GB/s copied, {6 * n * h * v / found['products'] / 1e12:.2f} TFLOP/s"


if __name__ == "__main__":
    main()
