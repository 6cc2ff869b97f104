"""The one line: are two methods the same loss, and if not, what differs?

Numbers come first: the reference evaluator takes both gradients on the probes and on random batches. Where they differ
there is a witness and the question is settled. Where they do not, algebra must prove the equality; without a proof the
verdict says how many points agreed and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .. import ir
from ..axes import Axis
from ..ir import Node
from ..reference import Array, Batch, evaluate, per_token
from ..samples import sample_batch
from .assume import Assumption
from .branches import Branches
from .equality import Equality
from .probes import edges, probes
from .side import Side

RANDOM_BATCHES = 12
SPREADS = (0.3, 1.5, 0.01)  # how far policies drift apart, in turn
GAP = 1e-7  # relative to the larger of the two


@dataclass(frozen=True)
class Witness:
    """One token at which the reference evaluator gives two different gradients.

    Attributes:
        at: (name, value) of its advantage, probabilities, ratios and counts.
        gradients: dJ / d log pi of the sampled token under both methods (or of `entry`, a token of the vocabulary).
        batch, token: where it is.
    """

    at: tuple[tuple[str, float], ...]
    gradients: tuple[float, float]
    batch: Batch
    token: int
    entry: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What is the same and what is not.

    Attributes:
        kind: "equal"; "bound" (equal but for tokens exactly on a bound); "factor" (equal up to a number that is the
            same for all tokens); "data" (equal for equal advantages, but the data side differs); "differ".
        proved: whether an equality is proved (else it held at `points` points); a difference always has a witness.
        differing: the parts that differ, of: weight, centring, terms, normaliser, advantage, reward, keep.
        factor: the constant, as an expression, for kind "factor": gradient of a = factor * gradient of b.
        also: assumptions under which the two would be equal.
    """

    kind: str
    proved: bool
    points: int
    differing: tuple[str, ...]
    witness: Witness | None
    factor: Node | None = None
    also: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return self.kind == "equal"


def judge(sides: tuple[Side, Side]) -> Verdict:
    """The verdict on two sides."""
    equality = Equality(sides)
    a, b = sides
    points, witness = find_witness(sides)
    data = tuple(key for key in a.data if not same_data(a, b, key, equality))
    if witness is None:
        proved = equality.equal((a.coef, b.coef), (a.whole_entry, b.whole_entry))
        witness = None if proved else on_a_bound(sides)
        if witness is None:
            return Verdict("data" if data else "equal", proved, points, data, None)
        return Verdict("bound", True, points, ("weight", *data), witness)
    differing = (*_differing(sides, witness.batch, equality), *data)
    factor = _factor(a, b, differing, equality)
    return Verdict("differ" if factor is None else "factor", True, points, differing, witness, factor)


def _differing(sides: tuple[Side, Side], batch: Batch, equality: Equality) -> Iterator[str]:
    """The parts of the gradient that differ: by numbers where a batch shows it, else by want of a proof."""
    a, b = sides
    values = b.values | a.values

    def differ(left: Node, right: Node) -> bool:
        if left is right:
            return False
        axis = max(left.axis, right.axis)
        if axis is not Axis.VOCAB:
            x, y = (per_token(n, batch, values) for n in (left, right))
            if apart(x, y).any():
                return True
        return not equality.equal((left, right))

    if differ(a.weighted, b.weighted):
        yield "weight"
    if differ(a.entry, b.entry):
        yield "centring"
    if differ(a.terms_coef, b.terms_coef) or differ(a.terms_entry, b.terms_entry):
        yield "terms"
    if differ(a.normaliser, b.normaliser):
        yield "normaliser"


def same_data(a: Side, b: Side, key: str, equality: Equality) -> bool:
    """Whether a key of the data side means the same on both sides."""
    left, right = a.data[key], b.data[key]
    if left is None or right is None:
        return left is right
    if left.is_bool or right.is_bool:
        one, zero = ir.ONE, ir.ZERO
        left, right = ir.where(left, one, zero), ir.where(right, one, zero)
    return equality.equal((left, right))


def _factor(a: Side, b: Side, differing: tuple[str, ...], equality: Equality) -> Node | None:
    """The constant by which a's gradient is b's, if there is one."""
    if set(differing) == {"normaliser"} and not a.terms and not b.terms:
        one, other = a.normaliser, b.normaliser
        inverse = other.op == "div" and other.args[0] is ir.ONE
        ratio = ir.mul(one, other.args[1]) if inverse else ir.div(one, other)
        if ratio.axis <= Axis.BATCH:
            return ratio
    if set(differing) == {"weight"} and a.entry is ir.ZERO and b.entry is ir.ZERO and not a.terms and not b.terms:
        ratio = ir.div(_leading_number(a), _leading_number(b))
        if ratio.op == "const" and equality.equal((a.coef, ir.mul(ratio, b.coef))):
            return ratio
    return None


def _leading_number(side: Side) -> Node:
    """The weight's constant factor, 1 where it has none."""
    weight = side.weight(1)
    first = weight.args[0] if weight.op == "mul" else weight
    return first if first.op == "const" else ir.ONE


# --- witnesses --------------------------------------------------------------------------------------------------------


def find_witness(sides: tuple[Side, Side]) -> tuple[int, Witness | None]:
    """How many points were compared, and the first at which the gradients differ."""
    points = 0
    for batch in _batches(sides):
        found = compare(sides, batch)
        if found is not None:
            return points, found
        points += len(batch.seq)
    return points, None


def on_a_bound(sides: tuple[Side, Side]) -> Witness | None:
    """A token exactly on a bound at which the gradients differ.

    The last bit of a logarithm must not decide: the branches that count as taken there are those of an exact tie.
    """
    found = edges(sides)
    if found is None:
        return None
    batch, _ = found
    values = sides[1].values | sides[0].values
    size = np.abs(np.asarray(batch.values["A"]))
    for sign in (1, -1):
        branches = [Branches(side.weight(sign), batch, values) for side in sides]
        for t in range(len(batch.seq)):
            one, other = (float(per_token(b.piece(t)[0], batch, values)[t]) for b in branches)
            if apart(np.asarray(one), np.asarray(other)):
                signed = replace(batch, values={**batch.values, "A": sign * size})
                witness = compare(sides, signed)
                if witness is not None:
                    return witness
    return None


def _batches(sides: tuple[Side, Side]) -> Iterator[Batch]:
    batch, _ = probes(sides)
    for sign in (1.0, -1.0):
        if all(s.at(c, int(sign)) is not ir.FALSE for s in sides for c in s.conditions):
            size = np.abs(np.asarray(batch.values["A"]))
            yield replace(batch, values={**batch.values, "A": sign * size})
    for number in range(RANDOM_BATCHES):
        yield random_batch(sides, number)


def random_batch(sides: Sequence[Side], number: int) -> Batch:
    """Ragged answers in groups, every policy drifting, as the assumption has it; every side's declared inputs."""
    spread = SPREADS[number % len(SPREADS)]
    batches = [sample_batch(side.method, np.random.default_rng([number]), spread) for side in sides]
    batch = batches[0]
    values = {name: value for b in reversed(batches) for name, value in b.values.items()}
    A = np.asarray(values["A"])
    if sides[0].token_A and A.shape == (batch.n_seqs,):
        values["A"] = A[batch.seq]
    merged = sides[0].assumption.merged
    return replace(
        batch,
        logp={p: batch.logp[merged[p]] for p in ir.POLICIES},
        logp_v={p: batch.logp_v[merged[p]] for p in ir.POLICIES},
        values=values,
    )


def apart(x: Array, y: Array) -> Array:
    """Where two gradients differ by more than rounding."""
    return np.asarray(np.abs(x - y) > GAP * np.maximum(np.abs(x), np.abs(y)))


def compare(sides: tuple[Side, Side], batch: Batch) -> Witness | None:
    """The first token of a batch, in its order, whose gradients differ."""
    a, b = sides
    values = b.values | a.values
    allowed = np.ones(len(batch.seq), bool)
    for condition in a.conditions:
        allowed &= per_token(ir.where(condition, ir.ONE, ir.ZERO), batch, values) > 0
    one, other = (per_token(s.coef, batch, values) for s in sides)
    wrong = apart(one, other) & allowed
    if wrong.any():
        t = int(np.argmax(wrong))
        return Witness(describe_token(sides, batch, t), (float(one[t]), float(other[t])), batch, t)
    if a.whole_entry is b.whole_entry or not batch.logp_v:
        return None
    grids = [
        np.broadcast_to(batch.spread(evaluate(s.whole_entry, batch, values), s.whole_entry.axis, Axis.VOCAB),
                        batch.logp_v["pi"].shape) for s in sides
    ]  # fmt: skip
    wrong_entries = apart(*grids) & allowed[:, None]
    if not wrong_entries.any():
        return None
    t, v = (int(i) for i in np.argwhere(wrong_entries)[0])
    at = describe_token(sides, batch, t)
    return Witness(at, (float(grids[0][t, v]), float(grids[1][t, v])), batch, t, v)


def describe_token(sides: tuple[Side, Side], batch: Batch, t: int) -> tuple[tuple[str, float], ...]:
    """A token's advantage, and the probabilities of it under the policies that either method reads."""
    leaves = list(ir.leaves(*(n for s in sides for n in (s.coef, s.whole_entry))))
    read = {p for n in leaves for p in ((str(n.attr),) if n.op == "logp" else ())}
    read |= {p for n in leaves if n.op == "logratio" for p in ir.RATIOS[str(n.attr)]}
    shown = [("A", float(per_token(sides[0].A, batch, {})[t]))]
    shown += [(p, float(np.exp(batch.logp[p][t]))) for p in ("mu", "prox", "pi", "ref") if p in read]
    shown.append(("len", float(batch.lengths[batch.seq[t]])))
    return tuple(shown)


def would_be_equal(a: Side, b: Side, others: tuple[Assumption, ...]) -> tuple[str, ...]:
    """The texts of those assumptions under which the two are proved equal."""
    found = []
    for assumption in others:
        one, other = replace(a, assumption=assumption), replace(b, assumption=assumption)
        equality = Equality((one, other))
        if all(same_data(one, other, key, equality) for key in one.data) and find_witness((one, other))[1] is None:
            pairs = (one.coef, other.coef), (one.whole_entry, other.whole_entry)
            found += [str(assumption)] if equality.equal(*pairs) else []
    return tuple(found)
