"""What a step from hidden states costs: passes, matrix products and bytes, from the schedule and four sizes."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from .method import Method
from .schedule import Schedule

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
BUDGET = 256 << 20  # the default of from_hidden on a CPU
_UNITS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30}  # kB, KiB and K are one


@dataclass(frozen=True)
class Plan:
    """One step of `from_hidden`; bytes are above the inputs."""

    method: str
    tokens: int
    rows: int  # of the logits buffer
    chunks: int
    passes: int
    products: int  # matrix products with the head, of all tokens
    logits_bytes: int
    head_bytes: int  # sum of the head's gradient, and the gradient itself where it is another tensor
    hidden_bytes: int
    peak_bytes: int
    full_logits_bytes: int  # what a plain step holds: logits, their float32 log-softmax's gradient, both gradients
    why: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """For the terminal."""
        share = self.peak_bytes / self.full_logits_bytes
        return "\n".join(
            [
                f"{self.method}: {self.passes} pass{'es' if self.passes > 1 else ''}, {self.products} matrix products, "
                f"{self.chunks} chunk{'s' if self.chunks > 1 else ''} of up to {self.rows} rows",
                f"peak above inputs   {_size(self.peak_bytes):>10}   "
                f"logits {_size(self.logits_bytes)}, head {_size(self.head_bytes)}, hidden {_size(self.hidden_bytes)}",
                f"with full logits    {_size(self.full_logits_bytes):>10}   this is {share:.0%} of it",
                *(f"- {line}" for line in self.why),
            ]
        )


def plan_of(
    method: Method,
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: str = "bf16",
    budget: int = BUDGET,
    longest: int | None = None,
    frozen_head: bool = False,
) -> Plan:
    """The plan of one step.

    Args:
        tokens, hidden, vocab: live tokens, width of the model, entries of the vocabulary.
        dtype: of hidden states and head: bf16, fp16, fp32 or fp64.
        budget: bytes of the logits buffer (`max_logits_bytes`).
        longest: tokens of the longest answer, where a weight waits for its answer; default: all of them are one answer.
        frozen_head: the head takes no gradient.

    Raises:
        ValueError: an unknown dtype, a size that is not positive.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; one of {', '.join(DTYPES)}")
    for name, number in (("tokens", tokens), ("hidden", hidden), ("vocab", vocab), ("budget", budget)):
        if number <= 0:
            raise ValueError(f"{name} must be positive, not {number}")
    size, schedule = DTYPES[dtype], Schedule(method)
    step = max(1, budget // (vocab * size))
    rows = min(tokens, step)
    answer = tokens if longest is None else min(longest, tokens)
    unit = {"token": 1, "sequence": answer, "batch": tokens}[schedule.waits]
    two = unit > step
    products = (2 if frozen_head else 3) + two
    sums, head = (0, 0) if frozen_head else (vocab * hidden * max(size, 4), vocab * hidden * (size if size < 4 else 0))
    full = tokens * vocab * 2 * size + (0 if frozen_head else vocab * hidden * size) + tokens * hidden * size
    logits, states = rows * vocab * size, tokens * hidden * size
    return Plan(
        method.name, tokens, rows, -(-tokens // rows), 1 + two, products, logits, sums + head, states,
        states + sums + max(logits, head), full, tuple(_why(schedule, unit, step, two, frozen_head, size)),
    )  # fmt: skip


def _why(schedule: Schedule, unit: int, step: int, two: bool, frozen_head: bool, size: int) -> list[str]:
    waits = {"token": "no other token", "sequence": "its answer", "batch": "other answers"}[schedule.waits]
    lines = [f"a token's gradient waits for {waits}"]
    if schedule.waits != "token":
        what = "the longest answer has" if schedule.waits == "sequence" else "the batch has"
        fits = f"more than the {step} rows of the buffer: log-probs first, then the rows that have a gradient again"
        lines[0] += f"; {what} {unit} tokens, {fits if two else f'which fit the {step} rows of the buffer: one pass'}"
    else:
        lines[0] += ": one pass in even chunks"
    lines.append(f"logits, gradient to them and their statistics share one buffer of up to {step} rows")
    if frozen_head:
        lines.append("the head is frozen: no product and no sum for it")
    elif size < 4:
        lines.append("the head's gradient is summed in float32 and written out in its own type")
    leaving = " or ".join(schedule.leaving)
    every = "" if schedule.live else " only: a term or a weight reads every live token"
    lines.append(f"rows that leave before the first product: {leaving}{every}")
    if schedule.live:
        lines.append(
            "with metrics on, unmasked rows stay in the first product; clipped and rejected ones skip the others"
        )
    if schedule.distributions and "mu" in schedule.distributions:
        lines.append("reads mu's distribution, [tokens, vocab] or its top k: counted among the inputs")
    return lines


def parse_bytes(text: str) -> int:
    """512MiB, 1GiB, 4096 -> bytes.

    Raises:
        ValueError: not a size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(re.sub("i?b$", "", found[2].lower())) if found else None
    if found is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write 512MiB, 1GiB or a number of bytes")
    return int(float(found[1]) * (1 << unit))


def _size(n: int) -> str:
    """Three figures and a unit."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 1 << power:
            return f"{n / (1 << power):.3g} {unit}" if n < 1000 << power else f"{n / (1 << power):.0f} {unit}"
    return f"{n} B"
