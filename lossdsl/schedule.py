"""What a method needs and when: decided from the IR alone, before any code is written.

The log-probs of the sampled tokens come from one pass over the logits. A weight that is a function of one token is
known in that same pass; one that needs a statistic of the whole answer (or turn, group, batch) is known only after
all its tokens have been seen, so gradients to logits or hidden states then need the tokens of an answer together,
or a second pass. Sums over the vocabulary are taken in the pass over the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from . import ir
from .autodiff import VocabularySum
from .axes import Axis
from .ir import Node
from .method import Method, advantage_of
from .primitives import COUNTS, depends_on_pi
from .text import infix

# language name -> the keyword argument of the generated module
POLICY_INPUTS = {"prox": "prox_logp", "mu": "mu_logp", "ref": "ref_logp"}
POLICY_WORDS = {
    "pi": "the policy being trained",
    "prox": "the trainer's snapshot when this batch's updates began",
    "mu": "what sampled the tokens",
    "ref": "the frozen reference",
}


@dataclass(frozen=True)
class Schedule:
    """The plan for one method."""

    method: Method

    @cached_property
    def policies(self) -> tuple[str, ...]:
        """The policies whose sampled-token log-probs the weights read, in the order pi, prox, mu, ref."""
        used = {p for n in self._leaves for p in _policies(n) if n.axis is not Axis.VOCAB}
        return tuple(p for p in ir.POLICIES if p in used or p == "pi")

    @cached_property
    def distributions(self) -> tuple[str, ...]:
        """The policies whose whole next-token distribution is read."""
        used = {p for n in self._leaves for p in _policies(n) if n.axis is Axis.VOCAB}
        return tuple(p for p in ir.POLICIES if p in used)

    @cached_property
    def counts(self) -> tuple[str, ...]:
        return tuple(sorted({str(n.attr) for n in self._leaves if n.op == "input" and n.attr in COUNTS}))

    @cached_property
    def needs(self) -> dict[str, str]:
        """Keyword inputs that must be given -> why this method needs them."""
        found: dict[str, str] = {}
        if any(n is advantage_of(self.method) for n in self._leaves):
            found["advantages"] = "A weighs every token's gradient"
        for policy in self.policies:
            if policy != "pi":
                found[POLICY_INPUTS[policy]] = (
                    f"log-probs of the sampled tokens under {policy} ({POLICY_WORDS[policy]}): {self._why(policy)}"
                )
        for policy in self.distributions:
            if policy != "pi":
                found[f"{policy}_logprobs"] = f"the whole next-token distribution of {policy} ({POLICY_WORDS[policy]})"
        if any(name.startswith("group") or name == "n_groups" for name in self.counts) or self._reduces("g"):
            found["groups"] = "the prompt each answer belongs to: a value of this loss is taken per group"
        if self._reduces("s"):
            found["segment_ids"] = "the turn each token belongs to: a value of this loss is taken per turn"
        for declared in self.method.doc.inputs:
            name = declared.name.value
            if name != "A" and any(n.op == "input" and n.attr == name for n in self._leaves):
                found[name] = declared.doc or "declared by this method"
        return found

    @cached_property
    def vocabulary_sums(self) -> tuple[Node, ...]:
        """Reductions over the vocabulary, in order of use; the linear one (see `centre`) is not among them."""
        roots = self.method.loss_side
        centre = self.centre
        return tuple(
            n
            for n in ir.topological(*roots)
            if n.op == "reduce"
            and isinstance(n.attr, tuple)
            and n.attr[1] == "v"
            and (centre is None or n is not centre.node)
        )

    @cached_property
    def centre(self) -> VocabularySum | None:
        """The sum_v sg(w(v)) log pi(v) whose slope is the weight itself: the centring term."""
        for term in self.method.gradient.sums:
            if (
                term.node.args[0].op == "mul"
                and term.slope.op == "sg"
                and ir.logp("pi", Axis.VOCAB) in term.node.args[0].args
            ):
                return term
        return None

    @cached_property
    def advantages(self) -> str:
        """ "token": one per token is required; "sequence": only one per answer is sound; "either"."""
        A = advantage_of(self.method)
        if A.axis is Axis.TOKEN:
            return "token"
        pooled = any(
            n.op == "reduce" and isinstance(n.attr, tuple) and n.attr[1] in "tsgb" and ir.contains(n, lambda x: x is A)
            for n in ir.topological(*self.method.loss_side)
        )
        per_answer = self.method.W is None and self.method.level != "token"
        return "sequence" if pooled or per_answer else "either"

    @cached_property
    def level(self) -> Axis:
        """The coarsest statistic of the current policy that a token's gradient waits for."""
        coarsest = Axis.TOKEN
        for n in ir.topological(*self._slopes):
            if n.op == "reduce" and isinstance(n.attr, tuple) and n.attr[1] != "v" and _moves(n):
                coarsest = min(coarsest, n.axis)
        return coarsest

    @property
    def waits(self) -> str:
        """ "token", "sequence" or "batch": which other tokens must be seen before a token's gradient is known."""
        match self.level:
            case Axis.TOKEN:
                return "token"
            case Axis.SEQUENCE | Axis.SEGMENT:
                return "sequence"
        return "batch"

    @cached_property
    def live(self) -> tuple[Node, ...]:
        """Conditions known before the forward; where one fails, a token has neither value nor gradient.

        Empty where there are none, or where a token's gradient waits for those of other answers.
        """
        if self.waits == "batch":
            return ()
        m = self.method
        values = [m.objective, *(t.add for t in m.terms)]
        found: dict[Node, None] | None = None
        for root in (*values, *self._slopes):
            conditions = _zero_unless(root)
            if conditions is not None:
                found = conditions if found is None else {c: None for c in found if c in conditions}
        return tuple(found or ())

    @property
    def leaving(self) -> tuple[str, ...]:
        """In words: the rows that need not be computed."""
        return ("masked", *(infix(ir.logical_not(n), self.method.hints, 90) for n in self.live))

    @property
    def _slopes(self) -> tuple[Node, ...]:
        gradient = self.method.gradient
        return (gradient.coef, *(t.cotangent for t in gradient.sums))

    @property
    def passes(self) -> str:
        """In words, over the logits or hidden states."""
        match self.level:
            case Axis.TOKEN:
                return "one"
            case Axis.SEQUENCE | Axis.SEGMENT:
                return "one, in chunks of whole answers where they fit, else two"
        return "one where the batch is one chunk, else two"

    @cached_property
    def local_statistics(self) -> str | None:
        """Why this loss cannot be split into micro-batches, if it cannot."""
        for n in ir.topological(*self.method.loss_side):
            if n.op == "reduce" and isinstance(n.attr, tuple) and n.attr[1] == "b":
                return f"`{infix(n, self.method.hints, 60)}` is taken over the whole batch it is given"
        return None

    @cached_property
    def topk(self) -> bool:
        """Whether a top-k distribution of mu is sound: every sum is of degree one in the probabilities of pi and mu.

        Then the tail, modelled as mu(v) = gamma * pi(v), is one bucket: a sum over it of g(pi(v), mu(v)) is g of the
        two tail masses.
        """
        reads_mu = [
            n for n in (*self.vocabulary_sums, *((self.centre.node,) if self.centre else ())) if _reads(n, "mu")
        ]
        others = any(not _reads(n, "mu") for n in self.vocabulary_sums)
        if not reads_mu or others or set(self.distributions) - {"pi", "mu"}:
            return False
        for n in reads_mu:
            inside = n.args[0]
            if self.centre is not None and n is self.centre.node:
                inside = self.centre.slope
            if n.attr != ("sum", "v") or degree(inside) != ("linear", 1):
                return False
        return True

    @property
    def _leaves(self) -> tuple[Node, ...]:
        return tuple(ir.leaves(*self.method.loss_side))

    def _reduces(self, suffix: str) -> bool:
        return any(
            n.op == "reduce" and isinstance(n.attr, tuple) and n.attr[1] == suffix
            for n in ir.topological(*self.method.loss_side)
        )

    def _why(self, policy: str) -> str:
        ratios = [
            r
            for r, pair in ir.RATIOS.items()
            if policy in pair and any(n.op == "logratio" and n.attr == r for n in self._leaves)
        ]
        if ratios:
            listed = " and ".join(f"{r} = {ir.RATIOS[r][0]}/{ir.RATIOS[r][1]}" for r in ratios)
            return f"{listed} {'is' if len(ratios) == 1 else 'are'} read"
        return "its probability is read"

    def dump(self) -> str:
        """A stable listing: what `lossdsl show --emit schedule` prints."""
        lines = [f"schedule {self.method.name}", "needs:"]
        lines += [f"  {name}: {why}" for name, why in self.needs.items()] or ["  nothing but logp and mask"]
        lines += [
            "before the forward:",
            f"  counts: {', '.join(self.counts) or 'none'}",
            f"  advantages: {self.advantages}",
        ]
        lines += [
            "pass over the logits:",
            f"  log-prob of the sampled token under pi; distributions read: {', '.join(self.distributions) or 'none'}",
            *(f"  {infix(n, {}, 90)}" for n in self.vocabulary_sums),
            *([f"  centring: {infix(self.centre.node, {}, 90)}"] if self.centre else []),
            f"  top-k distribution of mu: {'sound' if self.topk else 'not sound' if 'mu' in self.distributions else 'not read'}",
            f"weights known per: {self.level}",
            f"rows left out at once: {' or '.join(self.leaving)}",
            f"passes: {self.passes}",
            f"sharded answers: {'all-reduce ' + ', '.join(self._answer_statistics) if self._answer_statistics else 'nothing to reduce'}",
            f"sharded vocabulary: all-reduce {', '.join(['log-sum-exp', 'log-prob of the sampled token', *self._sums_text])}",
        ]
        return "\n".join(lines)

    @property
    def _answer_statistics(self) -> tuple[str, ...]:
        found = [
            n
            for n in ir.topological(*self.method.loss_side)
            if n.op == "reduce" and isinstance(n.attr, tuple) and n.attr[1] in "ts"
        ]
        names = [infix(n, {}, 60) for n in found]
        return tuple(dict.fromkeys(["len", *names] if "len" in self.counts else names))

    @property
    def _sums_text(self) -> list[str]:
        return [infix(n, self.method.hints, 60) for n in self.vocabulary_sums]


def _policies(leaf: Node) -> tuple[str, ...]:
    if leaf.op == "logp":
        return (str(leaf.attr),)
    return ir.RATIOS[str(leaf.attr)] if leaf.op == "logratio" else ()


def _reads(node: Node, policy: str) -> bool:
    return any(policy in _policies(leaf) for leaf in ir.leaves(node))


def _moves(node: Node) -> bool:
    return any("pi" in _policies(leaf) for leaf in ir.leaves(node)) or depends_on_pi(node)


def _zero_unless(node: Node) -> dict[Node, None] | None:
    """Conditions known before the forward, without any one of which the value is 0; None: it is always 0."""
    if node is ir.ZERO:
        return None
    match node.op:
        case "mul":
            parts = [_zero_unless(a) for a in node.args]
            return None if None in parts else {c: None for p in parts if p is not None for c in p}
        case "div" | "neg" | "sg" | "abs":
            return _zero_unless(node.args[0])
        case "add" | "sub" | "min" | "max":
            return _both([_zero_unless(a) for a in node.args])
        case "where":
            condition, then, other = node.args
            sides = []
            for side, met in ((then, condition), (other, ir.logical_not(condition))):
                inside = _zero_unless(side)
                sides.append(None if inside is None else inside | dict.fromkeys(_known_parts(met)))
            # A condition of one side alone says nothing unless the other side is 0.
            return _both(sides)
        case "input" if node.attr not in COUNTS:
            return {ir.compare("!=", node, ir.ZERO): None}
    return {}


def _both(parts: list[dict[Node, None] | None]) -> dict[Node, None] | None:
    real = [p for p in parts if p is not None]
    return {c: None for c in real[0] if all(c in p for p in real)} if real else None


def _known_parts(condition: Node) -> list[Node]:
    """Those conjuncts of a condition that no distribution over the vocabulary and nothing of the current policy enters."""
    if condition.op == "and":
        return [c for a in condition.args for c in _known_parts(a)]
    if condition.op == "not" and condition.args[0].op == "or":
        return [c for a in condition.args[0].args for c in _known_parts(ir.logical_not(a))]
    inside = ir.topological(condition)
    known = not _moves(condition) and not any(n.axis is Axis.VOCAB for n in inside)
    plain = all(n.op != "reduce" or (isinstance(n.attr, tuple) and n.attr[1] in "ts") for n in inside)
    plain &= not any(n.op == "input" and n.attr in COUNTS for n in inside)
    return [condition] if known and plain and condition.op not in ("true", "false") else []


Degree = tuple[str, int]


def degree(root: Node) -> Degree | None:
    """How an integrand scales when pi(v) and mu(v) are both multiplied by t: ("linear", d) as t**d, ("log", d) as + d log t.

    None where it scales in no such way.
    """
    known: dict[int, Degree | None] = {}
    for node in ir.topological(root):
        known[id(node)] = _degree(node, [known[id(a)] for a in node.args])
    return known[id(root)]


def _degree(node: Node, args: list[Degree | None]) -> Degree | None:
    fixed: Degree = ("linear", 0)
    if node.op == "logp" and node.axis is Axis.VOCAB:
        return ("log", 1)
    if node.op == "logratio" and node.axis is Axis.VOCAB:
        return ("log", 0)
    if not node.args:
        return fixed
    if node.op in ("reduce",):
        return fixed
    kinds = [a for a in args if a is not None]
    if len(kinds) != len(args):
        return None
    if all(a in (fixed, ("log", 0)) for a in kinds):  # functions of what does not scale do not scale
        return fixed
    zero = [n is ir.ZERO for n in node.args]
    match node.op:
        case "sg" | "neg" | "abs":
            return kinds[0] if node.op != "neg" or kinds[0][0] == "linear" else None
        case "exp":
            return ("linear", kinds[0][1]) if kinds[0][0] == "log" else None
        case "log" | "log_bound":
            return ("log", kinds[0][1]) if kinds[0][0] == "linear" else None
        case "mul" if kinds[0][0] == kinds[1][0] == "linear":
            return ("linear", kinds[0][1] + kinds[1][1])
        case "mul":
            logs = [k for k in kinds if k[0] == "log"]
            plain = [k for k in kinds if k[0] == "linear"]
            return plain[0] if plain and all(k == ("log", 0) for k in logs) else None
        case "div" if kinds[0][0] == kinds[1][0] == "linear":
            return ("linear", kinds[0][1] - kinds[1][1])
        case "sub" if kinds[0][0] == kinds[1][0] == "log":
            return ("log", kinds[0][1] - kinds[1][1])
        case "add" | "sub" | "min" | "max" | "clip":
            scaling = {k for k, z in zip(kinds, zero, strict=True) if not z}
            return scaling.pop() if len(scaling) == 1 and next(iter(scaling))[0] == "linear" else None
        case "lt" | "le" | "eq":
            scaling = {k for k, z in zip(kinds, zero, strict=True) if not z}
            return fixed if len(scaling) <= 1 else None
        case "where":
            scaling = {k for k, z in zip(kinds[1:], zero[1:], strict=True) if not z}
            return scaling.pop() if kinds[0] == fixed and len(scaling) == 1 else None
    return None
