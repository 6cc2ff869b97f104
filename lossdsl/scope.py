"""What a name or a function of the language means: the tables that `lower` looks things up in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import ir
from .axes import Axis
from .errors import Source, Span
from .ir import Node
from .specdoc import Definition, Text

FUNCTIONS = {
    "exp": (1, 1),
    "log": (1, 1),
    "abs": (1, 1),
    "sqrt": (1, 1),
    "sigmoid": (1, 1),
    "tanh": (1, 1),
    "sg": (1, 1),
    "clip": (3, 3),
    "min": (2, 9),
    "max": (2, 9),
}

# kind of reduction -> (fewest, most) arguments and the suffixes it takes
REDUCTIONS = {
    "sum": (1, 1, "tsgbv"),
    "mean": (1, 1, "tsgb"),
    "prod": (1, 1, "ts"),
    "geomean": (1, 1, "ts"),
    "max": (1, 1, "tsgbv"),
    "min": (1, 1, "tsgbv"),
    "any": (1, 1, "tsgbv"),
    "all": (1, 1, "tsgbv"),
    "std": (1, 2, "tsgb"),
    "quantile": (2, 2, "tsgb"),
    "loo": (1, 1, "g"),
}

COUNTS = {
    "len": Axis.SEQUENCE,
    "n_tokens": Axis.BATCH,
    "n_seqs": Axis.BATCH,
    "n_groups": Axis.BATCH,
    "group_size": Axis.GROUP,
    "group_tokens": Axis.GROUP,
}

# Names that stand only on one side: the loss (tokens of answers) or the data (rewards of answers).
LOSS_ONLY = frozenset({*ir.POLICIES, *ir.RATIOS, "A", "T", "f", "W", "n_tokens", "group_tokens", "entropy"})
DATA_ONLY = frozenset({"R"})


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy or a ratio as a function's argument: the body may write `p` or `p[v]`."""

    name: str

    def node(self, axis: Axis) -> Node:
        leaf = ir.logp(self.name, axis) if self.name in ir.POLICIES else ir.logratio(self.name, axis)
        return ir.exp(leaf)


@dataclass(frozen=True, slots=True)
class Function:
    """A definition of the prelude or of the spec's `where:`; `parameters` is None for a plain name."""

    name: str
    parameters: tuple[str, ...] | None
    body: Text


def signature(text: str) -> tuple[str, tuple[str, ...] | None]:
    """`gate(x, tau)` -> ("gate", ("x", "tau")); `s` -> ("s", None)."""
    head, bracket, rest = text.partition("(")
    if not bracket:
        return text.strip(), None
    names = tuple(part.strip() for part in rest.strip().removesuffix(")").split(","))
    return head.strip(), () if names == ("",) else names


def function(definition: Definition) -> Function:
    name, parameters = signature(definition.signature.value)
    return Function(name, parameters, definition.body)


@lru_cache(maxsize=1)
def prelude() -> dict[str, Function]:
    """The functions of prelude.yaml, by name."""
    text = (Path(__file__).parent / "prelude.yaml").read_text(encoding="utf-8")
    source = Source("prelude.yaml", text)
    found: dict[str, Function] = {}
    offset = 0
    for line in text.splitlines(keepends=True):
        head, colon, body = line.rstrip("\n").partition(": ")
        if colon and not line.startswith("#"):
            start = offset + len(head) + 2
            chars = tuple(range(start, start + len(body) + 1))
            name, parameters = signature(head)
            found[name] = Function(name, parameters, Text(body, Span(source, start, start + len(body)), chars))
        offset += len(line)
    return found
