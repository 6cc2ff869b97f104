"""Any built-in's own objective as plain PyTorch, forward only: what a trainer would write from the paper, for autograd.

One line per operation of the objective as the spec writes it; no closed-form gradient, no log-space comparison, no
check, and tokens are masked by multiplication. Sums over an answer are clamped at 20 before they are exponentiated, as
trainers do. `bench/plain.py` has ten of these losses written by hand, to show that this is no straw man.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lossdsl import ir
from lossdsl.axes import Axis
from lossdsl.ir import Node
from lossdsl.method import Method, advantage_of
from lossdsl.schedule import POLICY_INPUTS, Schedule

Inputs = Mapping[str, Tensor]
TEXT = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "pow": "{0} ** {1}",
    "exp": "torch.exp({0})",
    "log": "torch.log({0})",
    "abs": "torch.abs({0})",
    "sqrt": "torch.sqrt({0})",
    "sigmoid": "torch.sigmoid({0})",
    "tanh": "torch.tanh({0})",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "not": "~{0}",
}
REDUCE = {
    "sum": "({0} * mask).sum(-1, keepdim=True)",
    "mean": "({0} * mask).sum(-1, keepdim=True) / length",
    "max": "torch.where(mask > 0, {0}, -torch.inf).amax(-1, keepdim=True)",
    "min": "torch.where(mask > 0, {0}, torch.inf).amin(-1, keepdim=True)",
    "quantile": "torch.nanquantile(torch.where(mask > 0, {0}, torch.nan), {1}, dim=-1, keepdim=True)",
}


def readable(method: Method) -> bool:
    """Whether log-probs of the sampled tokens (and their entropy) are all it reads: else it starts from logits."""
    return not any(key.endswith("_logprobs") for key in Schedule(method).needs)


def plain(method: Method, params: Mapping[str, float]) -> Callable[[Inputs], Tensor]:
    """The loss as a function of logp, prox_logp, ... and mask (of any dtype) [B, T], A, entropy and declared inputs."""
    lines = ["mask = d['mask']", "length = mask.sum(-1, keepdim=True).clamp(min=1)"]
    names: dict[int, str] = {}
    parts = [(method.normaliser, method.objective), *((t.normaliser, t.add) for t in method.terms)]
    for node in ir.topological(*(x for part in parts for x in part)):
        text = _text(node, [names[id(a)] for a in node.args], method, params)
        names[id(node)] = text
        if node.args and not text.replace(".", "").isalnum():
            names[id(node)] = f"x{len(lines)}"
            lines.append(f"x{len(lines)} = {text}")
    total = " + ".join(_summed(names[id(lam)], lam.axis, names[id(x)]) for lam, x in parts)
    body = "\n    ".join([*lines, f"return -({total})"])
    space: dict[str, Callable[[Inputs], Tensor]] = {"torch": torch}  # type: ignore[dict-item]
    exec(f"def {method.name}(d):\n    {body}\n", space)
    return space[method.name]


def _summed(lam: str, lam_axis: Axis, x: str) -> str:
    """lambda times the sum over live tokens; lambda comes in as late as it can."""
    if lam_axis <= Axis.BATCH:
        return f"({x} * mask).sum() * {lam}"
    if lam_axis <= Axis.SEQUENCE:
        return f"(({x} * mask).sum(-1, keepdim=True) * {lam}).sum()"
    return f"({x} * mask * {lam}).sum()"


def _text(node: Node, args: list[str], method: Method, params: Mapping[str, float]) -> str:
    match node.op:
        case "const":
            assert not isinstance(node.attr, str | tuple) and node.attr is not None
            return repr(float(node.attr)) if node.attr >= 0 else f"({float(node.attr)!r})"
        case "param":
            return repr(float(params[str(node.attr)]))
        case "true" | "false":
            return node.op.capitalize()
        case "logp":
            return _logp(str(node.attr))
        case "logratio":
            above, below = ir.RATIOS[str(node.attr)]
            return f"({_logp(above)} - {_logp(below)})"
        case "input" if node is advantage_of(method):
            return "d['A']" if node.axis is Axis.TOKEN else "d['A'][:, None]"
        case "input":
            counts = {"len": "length", "n_tokens": "mask.sum()", "n_seqs": "mask.shape[0]"}
            return counts.get(str(node.attr), f"d['{node.attr}']")
        case "sg":
            return f"{args[0]}.detach()" if node.axis > Axis.CONSTANT else args[0]
        case "reduce":
            assert isinstance(node.attr, tuple)
            return "d['entropy']" if node.attr[1] == "v" else REDUCE[node.attr[0]].format(*args)
        case "exp" if node.axis is Axis.SEQUENCE:
            return f"torch.exp(torch.clamp({args[0]}, max=20.0))"
        case "where":
            if all(a.axis is Axis.CONSTANT for a in node.args[1:]):
                return f"torch.where({args[0]}, {args[1]}, {args[2]})"
            return f"torch.where({', '.join(args)})"
        case "min" | "max":
            side = "max" if node.op == "min" else "min"
            for x, bound in ((0, 1), (1, 0)):
                if node.args[bound].axis is Axis.CONSTANT:
                    return f"torch.clamp({args[x]}, {side}={args[bound]})"
            return f"torch.{node.op}imum({', '.join(args)})"
        case "clip":
            if all(a.axis is Axis.CONSTANT for a in node.args[1:]):
                return f"torch.clamp({args[0]}, {args[1]}, {args[2]})"
            low = (
                f"torch.clamp({args[0]}, min={args[1]})"
                if node.args[1].axis is Axis.CONSTANT
                else f"torch.maximum({args[0]}, {args[1]})"
            )
            return (
                f"torch.clamp({low}, max={args[2]})"
                if node.args[2].axis is Axis.CONSTANT
                else f"torch.minimum({low}, {args[2]})"
            )
    return f"({TEXT[node.op].format(*args)})"


def _logp(policy: str) -> str:
    return "d['logp']" if policy == "pi" else f"d['{POLICY_INPUTS[policy]}']"
