"""From hidden states to gradients, against rivals' own released code: time in units of three bare matrix products, and memory.

All paths of a case run in one process in alternating rounds after a warm-up; figures are medians over rounds. The allocator
keeps its pages (the first touch of a fresh large tensor would cost more than the arithmetic). Rivals come from the optional
extra `bench`; what is not installed is left out of the table, by name.

    python bench/hidden.py                      # the table: seven minutes on two free cores
    python bench/hidden.py --all                # more sizes and every rival's memory: half an hour
    python bench/hidden.py speed --rounds 5     # one part: memory, first, speed, rows, logits
    python bench/hidden.py speed --tokens 8192 --hidden 512 --vocab 131072 --dtype bf16
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(32 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}
PARTS = ("memory", "first", "speed", "rows", "logits")  # memory first: while this process is small
SPEED = [(2048, 1024, 32768, "fp32"), (2048, 1024, 32768, "bf16")]
MORE = [
    (2048, 512, 131072, "bf16"),
    (2048, 512, 131072, "fp32"),
    (8192, 512, 32768, "bf16"),
    (8192, 512, 131072, "bf16"),
]
MEMORY = (8192, 512, 131072, "bf16")
WIDTH = 256  # tokens of an answer

Path = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="From hidden states to gradients, against rivals.")
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; default: all of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--all", action="store_true", help="more sizes, every rival's memory")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one path of the memory part, in a process of its own
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    sizes = [(args.tokens, args.hidden, args.vocab, args.dtype)] if args.tokens else None
    if args.only:
        print(peak(args.only, *(sizes or [MEMORY])[0], args.device))
        return
    print(f"{machine(args)}; {versions()}; medians of {args.rounds} alternating rounds\n", flush=True)
    for part in args.parts or PARTS:
        if part == "speed":
            speed(sizes or SPEED + (MORE if args.all else []), args)
        elif part == "rows":
            rows((sizes or [SPEED[1]])[0], args)
        elif part == "logits":
            logits(args)
        elif part == "memory":
            memory((sizes or [MEMORY])[0], args)
        elif part == "first":
            first()
        else:
            parser.error(f"{part} is none of {', '.join(PARTS)}")


# --- the data and the paths --------------------------------------------------------------------------------------------


def batch(tokens: int, hidden: int, vocab: int, dtype: str, device: str = "cpu", flat: bool = False) -> dict[str, Any]:
    """Answers of one width, a behaviour policy close to the current one: few tokens are clipped.

    `flat` states are so small that every log-prob is -log V: nothing is computed, nothing left on the heap.
    """
    import torch

    torch.manual_seed(0)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    shape = (max(1, tokens // WIDTH), min(tokens, WIDTH))
    h = (torch.randn(*shape, hidden, device=device) * (1e-3 if flat else 1)).to(kind).requires_grad_()
    w = (0.02 * torch.randn(vocab, hidden, device=device)).to(kind).requires_grad_()
    ids = torch.randint(0, vocab, shape, device=device)
    logp = torch.full(shape, -math.log(vocab), device=device)
    if not flat:
        with torch.no_grad():
            for rows, tokens_here, into in zip(h, ids, logp, strict=True):
                z = (rows @ w.t()).float()
                into.copy_(z.gather(-1, tokens_here[:, None])[:, 0] - z.logsumexp(-1))
    noise = 0.02 * torch.randn(shape, device=device)
    return {
        "hidden": h, "weight": w, "tokens": ids, "mask": torch.ones(shape, dtype=torch.bool, device=device),
        "advantages": torch.randn(shape[0], device=device), "prox_logp": logp + noise, "mu_logp": logp + noise, "logp": logp,
    }  # fmt: skip


def plain_loss(logp: Any, b: dict[str, Any]) -> Any:
    """DAPO: clip 0.2 / 0.28, mean over tokens."""
    import torch

    r, A = (logp - b["prox_logp"]).exp(), b["advantages"][:, None]
    J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
    return -torch.where(b["mask"], J, 0.0).sum() / b["mask"].sum()


def selective(z: Any, ids: Any) -> Any:
    """Log-probs of the sampled tokens as TRL takes them from logits: answer by answer; bfloat16 through a log-softmax."""
    import torch

    if z.dtype is torch.float32:
        return z.gather(-1, ids[..., None])[..., 0] - torch.stack([row.logsumexp(-1) for row in z])
    return torch.stack([row.log_softmax(-1).gather(-1, i[:, None])[:, 0] for row, i in zip(z, ids, strict=True)])


def bare(b: dict[str, Any]) -> Path:
    """The unit: logits, gradient to hidden states and to the head, into tensors that are there already."""
    import torch

    h, w = b["hidden"].detach().reshape(-1, b["hidden"].shape[-1]), b["weight"].detach()
    step = min(2048, len(h)) if h.device.type == "cpu" else min(8192, len(h))
    z, dh, dw = h.new_empty(step, len(w)), torch.empty_like(h[:step]), torch.empty_like(w)

    def run() -> None:
        for i in range(0, len(h), step):
            x = h[i : i + step]
            torch.mm(x, w.t(), out=z[: len(x)])
            torch.mm(z[: len(x)], w, out=dh[: len(x)])
            torch.mm(z[: len(x)].t(), x, out=dw)

    return run


def ours(
    b: dict[str, Any], name: str = "dapo", compile: bool = True, budget: int | None = None, **params: float
) -> Path:
    import lossdsl

    loss_fn: Any = lossdsl.compile(name, compile=compile, **params)
    loss_fn.metrics = False
    given = {k: x for k, x in b.items() if k in (*loss_fn.needs, "mask", "mu_topk_ids", "mu_topk_logprobs")}

    def run() -> Any:
        b["hidden"].grad = b["weight"].grad = None
        loss = loss_fn.from_hidden(b["hidden"], b["weight"], b["tokens"], max_logits_bytes=budget, **given).loss
        loss.backward()
        return loss.detach()

    return run


def through(b: dict[str, Any], logp_of: Callable[[Any, Any], Any], loss: Callable[..., Any] = plain_loss) -> Path:
    """A path that gets log-probs from hidden states and the head its own way; the loss is plain PyTorch."""

    def run() -> Any:
        b["hidden"].grad = b["weight"].grad = None
        value = loss(logp_of(b["hidden"], b["weight"]), b)
        value.backward()
        return value.detach()

    return run


def rivals(b: dict[str, Any]) -> dict[str, Path]:
    """name -> path, for what is installed; each with the setting that was fastest for it in the study."""
    import torch

    ids, found = b["tokens"], {}
    flat = b["hidden"].shape[-1]

    def log_softmax(h: Any, w: Any) -> Any:
        return (h @ w.t()).float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    found["full logits, eager"] = through(b, lambda h, w: selective(h @ w.t(), ids).float())
    compiled = torch.compile(lambda h, w: plain_loss(log_softmax(h, w), b))
    found["full logits, compiled"] = through(b, lambda h, w: compiled(h, w), lambda x, _: x)
    trl = trl_class()
    if trl is not None:
        found["TRL chunked log-probs"] = through(
            b,
            lambda h, w: trl.apply(h.reshape(-1, flat), w, None, ids.reshape(-1), 1.0, 32768, None, 1.0, ())[0].reshape(
                ids.shape
            ),
        )
    verl = verl_class()
    if verl is not None:
        fused = verl(chunk_size=512)
        found["verl FusedLinearForPPO"] = through(b, lambda h, w: fused(h, w, ids)[0])
    liger = liger_class()
    if liger is not None:
        for label, chunk, compile in (
            ("Liger, chunk_size=1, compiled", 1, True),
            ("Liger, chunk_size=B, eager", len(ids), False),
        ):
            fn = liger(beta=0.0, use_ref_model=False, epsilon_low=0.2, epsilon_high=0.28, loss_type="dapo", chunk_size=chunk,
                       compiled=compile)  # fmt: skip
            found[label] = through(
                b,
                lambda h, w, fn=fn: fn(
                    h, w, ids, b["mask"].float(), b["advantages"], old_per_token_logps=b["prox_logp"]
                )[0],
                lambda x, _: x,
            )
    return found


def module_of(package: str, file: str, stubs: dict[str, Any] | None = None) -> Any:
    """One file of an installed package, without the rest of it; None where it is not installed."""
    import types

    try:
        path = importlib.metadata.distribution(package).locate_file(file)
        text = open(str(path)).read()  # noqa: SIM115
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    for name, content in (stubs or {}).items():
        if name not in sys.modules:
            stub = types.ModuleType(name)
            stub.__dict__.update(content)
            sys.modules[name] = stub
    made = types.ModuleType(file.replace("/", ".").removesuffix(".py"))
    sys.modules[made.__name__] = made
    exec(compile(text, str(path), "exec"), made.__dict__)
    return made


def trl_class() -> Any:
    import torch

    has = torch.cuda.is_available()
    stubs: dict[str, Any] = {"transformers": {}, "transformers.utils": {"is_triton_available": lambda *_: has}}
    # Its backward asks whether the head is sharded; without accelerate's DeepSpeed it is not, and nothing is gathered.
    gather = {"maybe_gather_lm_head_ctx": lambda *_, **__: contextlib.nullcontext()}
    stubs |= {"trl": {}, "trl.kernels": {}, "trl.trainer": {}, "trl.trainer.utils": gather}
    made = module_of("trl", "trl/kernels/chunked_logprob.py", stubs)
    return made and made.ChunkedLogProbFunction


def verl_class() -> Any:
    stubs = {} if importlib.util.find_spec("triton") else {"liger_kernel.ops": {"__getattr__": lambda name: None}}
    made = module_of("verl", "verl/utils/experimental/torch_functional.py", stubs)
    return made and made.FusedLinearForPPO


def liger_class() -> Any:
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError:
        return None
    return LigerFusedLinearGRPOLoss


# --- parts ------------------------------------------------------------------------------------------------------------


def measure(
    paths: dict[str, Path], rounds: int, device: str = "cpu"
) -> tuple[dict[str, float], dict[str, Any], dict[str, float]]:
    """(median seconds, value, seconds of the first call) of each path; one that fails is left out, and says so."""
    import torch

    def timed(run: Path) -> tuple[float, Any]:
        gc.collect()
        start = time.perf_counter()
        value = run()
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start, value

    values, firsts = {}, {}
    for key in list(paths):
        try:
            firsts[key], values[key] = timed(paths[key])
        except Exception as error:  # a rival's failure is a row of its own, not the end of the run
            print(f"({key} failed: {type(error).__name__}: {str(error).splitlines()[0][:100]})")
            del paths[key]
    times: dict[str, list[float]] = {key: [] for key in paths}
    for number in range(rounds):
        for key in list(paths)[:: 1 if number % 2 else -1]:
            times[key].append(timed(paths[key])[0])
    return {key: statistics.median(x) for key, x in times.items()}, values, firsts


def speed(cases: list[tuple[int, int, int, str]], args: argparse.Namespace) -> None:
    print("**DAPO: seconds, and in units of three bare matrix products**\n")
    for case in cases:
        b = batch(*case, args.device)
        paths = {"three matrix products": bare(b), "lossdsl": ours(b), "lossdsl, compile=False": ours(b, compile=False)}
        paths |= rivals(b)
        found, values, firsts = measure(paths, args.rounds, args.device)
        print(
            "| N {}, H {}, V {}, {} | s | units | against lossdsl | first call, s | loss |\n|---|---|---|---|---|---|".format(
                *case
            )
        )
        unit, own = found["three matrix products"], found["lossdsl"]
        for key, t in found.items():
            value = "" if values[key] is None else f"{float(values[key]):.6f}"
            print(f"| {key} | {t:.2f} | {t / unit:.2f} | {t / own:.2f} | {firsts[key]:.1f} | {value} |", flush=True)
        print()


def rows(case: tuple[int, int, int, str], args: argparse.Namespace) -> None:
    """What methods and rows cost, all with one head and the same tokens."""
    import torch

    b = batch(*case, args.device)
    half = torch.arange(b["mask"].numel(), device=args.device).reshape(b["mask"].shape) % 2 == 0
    answers = torch.arange(len(b["mask"]), device=args.device)
    two_in_five = torch.arange(b["mask"].numel(), device=args.device).reshape(b["mask"].shape) % 5 < 2
    far = torch.where(two_in_five, b["logp"] - 1.0, b["prox_logp"])  # r = e: clipped where A > 0
    rejected = answers % 5 < 2
    drifted = b["mu_logp"] - rejected[:, None].float()
    top = torch.randint(0, case[2] - 128, (*b["mask"].shape, 1), device=args.device) + torch.arange(
        128, device=args.device
    )
    head = {"mu_topk_ids": top, "mu_topk_logprobs": torch.randn(top.shape, device=args.device).log_softmax(-1) - 0.1}
    frozen = {**b, "weight": b["weight"].detach()}
    paths = {
        "three matrix products": bare(b),
        "DAPO": ours(b),
        "GSPO": ours(b, "gspo", eps_low=0.2, eps_high=0.3),
        "Seq-MIS": ours(b, "seq_mis"),
        "Score Centering, top-k 128": ours(b | head, "score_centering"),
        "DAPO, half the rows masked": ours({**b, "mask": half}),
        "DAPO, half the answers with A = 0": ours({**b, "advantages": torch.where(answers % 2 == 0, b["advantages"], 0.0)}),
        "DAPO, 40% clipped": ours({**b, "advantages": b["advantages"].abs(), "prox_logp": far}),
        f"Seq-MIS, {float(rejected.float().mean()):.0%} rejected": ours({**b, "mu_logp": drifted}, "seq_mis"),
        "DAPO, frozen head": ours(frozen),
    }  # fmt: skip
    found, _, _ = measure(paths, args.rounds, args.device)
    print("| N {}, H {}, V {}, {} | s | units | against DAPO |\n|---|---|---|---|".format(*case))
    for key, t in found.items():
        print(f"| {key} | {t:.2f} | {t / found['three matrix products']:.2f} | {t / found['DAPO']:.2f} |")
    print(flush=True)


def logits(args: argparse.Namespace) -> None:
    """The logits entry, its gradient written over them, against the loss on a log-softmax."""
    import torch

    import lossdsl

    loss_fn: Any = lossdsl.compile("dapo")
    loss_fn.metrics = False
    print("| logits entry | s | against lossdsl |\n|---|---|---|")
    for n, vocab, dtype in (
        (2048, 32768, torch.float32),
        (2048, 32768, torch.bfloat16),
        (1024, 131072, torch.bfloat16),
    ):
        b = batch(n, 8, vocab, "fp32", args.device)
        start = torch.randn(*b["tokens"].shape, vocab, device=args.device).to(dtype)
        z = start.clone().requires_grad_()
        given = {k: b[k] for k in ("mask", "advantages", "prox_logp")}
        ids = b["tokens"]

        compiled = torch.compile(lambda x, b=b: plain_loss(selective(x, b["tokens"]), b))
        own = start.clone()

        def over(own: Any = own, given: Any = given, ids: Any = ids, z: Any = z) -> Any:
            taken = pass_through().apply(own, z.new_empty(0).requires_grad_())
            loss_fn.from_logits(taken, ids, inplace=True, **given).loss.backward()

        def plain(f: Any, z: Any = z) -> None:
            z.grad = None
            f(z).backward()

        paths = {
            "lossdsl, in place": over,
            "plain loss on selected log-softmax, eager": lambda b=b: plain(
                lambda x: plain_loss(selective(x, b["tokens"]), b)
            ),
            "the same, compiled": lambda f=compiled: plain(f),
        }
        found, _, _ = measure(paths, max(args.rounds, 9), args.device)
        for key, t in found.items():
            print(
                f"| {key}, [{n}, {vocab}] {str(dtype)[6:]} | {t:.4f} | {t / found['lossdsl, in place']:.2f} |",
                flush=True,
            )
    print()


def pass_through() -> Any:
    """A step of the graph that hands on a tensor: what a model's head is to the loss, without its cost."""
    import torch

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, like: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradient: Any) -> Any:
            return None, None

    return Step


def peak(name: str, tokens: int, hidden: int, vocab: int, dtype: str, device: str) -> str:
    """MiB above the inputs and seconds of the first call, of one path in a process of its own."""
    b = batch(tokens, hidden, vocab, dtype, device, flat=True)
    label, _, budget = name.partition(" @")
    path = (
        ours(b, compile="eager" not in label, budget=int(budget) << 20 if budget else None)
        if "lossdsl" in label
        else rivals(b)[label]
    )
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts from here: what making the data took is forgotten
    now = status("VmRSS")
    start = time.perf_counter()
    path()
    return f"{(status('VmHWM') - now) / 1024:.0f} {time.perf_counter() - start:.1f}"


def status(field: str) -> int:
    """KiB of this process: VmRSS, what it holds; VmHWM, the most that it held."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


def memory(case: tuple[int, int, int, str], args: argparse.Namespace) -> None:
    names = ["lossdsl", "lossdsl, eager @32", "full logits, eager", "Liger, chunk_size=B, eager"]
    if args.all:
        names += ["lossdsl @128", "lossdsl, eager", "TRL chunked log-probs", "verl FusedLinearForPPO"]
    print("| peak above inputs, N {}, H {}, V {}, {} | MiB | first call, s |\n|---|---|---|".format(*case))
    plain = {k: v for k, v in os.environ.items() if k not in ALLOCATOR} | {"LOSSDSL_PLAIN_ALLOCATOR": "1"}
    flags = ["--tokens", str(case[0]), "--hidden", str(case[1]), "--vocab", str(case[2]), "--dtype", case[3]]
    for name in names:
        command = [sys.executable, "-W", "ignore", __file__, "--only", name, *flags]
        run = subprocess.run(command, env=plain, capture_output=True, text=True)
        mib, took = run.stdout.split() if run.returncode == 0 and run.stdout else ("failed", "-")
        print(f"| {name.replace('@', 'with ')}{' MiB of logits' if '@' in name else ''} | {mib} | {took} |", flush=True)
    print()


FIRST = """
import time, torch; start = time.perf_counter()
import lossdsl
f = lossdsl.compile("dapo", compile={compile}); h = torch.randn(2, 64, 32, requires_grad=True); w = torch.randn(512, 32, requires_grad=True)
lp = torch.full((2, 64), -6.0)
ids, mask = torch.zeros(2, 64, dtype=torch.long), torch.ones(2, 64, dtype=torch.bool)
f.from_hidden(h, w, ids, mask=mask, advantages=torch.ones(2), prox_logp=lp).loss.backward()
print(time.perf_counter() - start)
"""


def first() -> None:
    print("| first call, after `import torch` | s |\n|---|---|")
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        for label, compile in (("cold inductor cache", True), ("warm inductor cache", True), ("compile=False", False)):
            run = subprocess.run(
                [sys.executable, "-c", FIRST.format(compile=compile)], env=env, capture_output=True, text=True
            )
            print(f"| {label} | {float(run.stdout or 'nan'):.1f} |", flush=True)
    print()


def versions() -> str:
    found = []
    for package in ("torch", "liger-kernel", "trl", "verl"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def machine(args: argparse.Namespace) -> str:
    if args.device != "cpu":
        import torch

        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {args.threads} threads, Python {platform.python_version()}"


if __name__ == "__main__":
    if not os.environ.get("LOSSDSL_PLAIN_ALLOCATOR") and any(os.environ.get(k) != v for k, v in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    main()
