"""The method's own functions: the weights of its tokens, its sums over the vocabulary, its data side."""

from __future__ import annotations

from .. import ir
from ..axes import Axis
from ..ir import Node
from ..limits import limiters
from ..method import defaults_range, holds_ratio
from ..primitives import UNARY, interval
from ..schedule import POLICY_INPUTS, Schedule
from ..simplify import simplify
from .code import Code, safe_name

COUNT_ARGUMENTS = {"len": "length"}


class Emitter:
    """Writes the functions of one method."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.method = schedule, schedule.method
        self.hints = dict(self.method.hints)
        self.origin = dict(self.method.origin)
        self.sum_names = self._name_sums()
        self.known: dict[str, Node] = {}  # name -> a normaliser that is known before the forward

    def functions(self) -> dict[str, str]:
        """name -> source text; only those that the method has."""
        weights = self.weights()
        found = ({"before": self.before()} if self.known else {}) | {"weights": weights}
        if self.schedule.live:
            found["live"] = self.live()
        plain = list(self.schedule.vocabulary_sums)
        if plain:
            found["distribution"] = self.distribution()
            if any(t.node in plain for t in self.method.gradient.sums):
                found["d_distribution"] = self.d_distribution()
        if self.schedule.centre is not None:
            found["centre"] = self.centre()
        for key, node in (
            ("reward", self.method.reward),
            ("advantage", self.method.advantage),
            ("keep", self.method.keep),
        ):
            if node is not None:
                found[key] = self.data(key, node)
        return found

    # --- the weights ----------------------------------------------------------------------------------------------

    def weights(self) -> str:
        m, s = self.method, self.schedule
        roots: dict[str, Node] = {}
        if m.W is not None and m.T is not None and m.f is not None:
            roots |= {"T": m.T, "f": m.f, "W": m.W}
        roots["lam"] = m.normaliser
        objective = m.objective
        if s.centre is not None:  # its value comes from the pass over the logits
            missing = s.centre.node
            objective = ir.rewrite(objective, lambda n: ir.ZERO if n is missing else None)
        roots["objective"] = objective
        value = ir.mul(m.normaliser, objective)
        for number, term in enumerate(m.terms, 1):
            value = ir.add(value, ir.mul(term.normaliser, term.add))
            roots[f"lam_{number}"] = term.normaliser
        roots["value"], roots["coef"] = value, m.gradient.coef
        for name, node in self._ratios().items():
            roots[f"ratios/{name}"] = node
        for name, node in self._limits().items():
            roots[f"limits/{name}"] = node
        for name, node in self._outside().items():
            roots[f"outside/{name}"] = node
        for term_ in m.gradient.sums:
            if term_ is not s.centre and term_.node is not (s.centre.node if s.centre else None):
                roots[f"grads/{self.sum_names[id(term_.node)]}"] = term_.cotangent
        if s.centre is not None:
            roots["centre"] = ir.neg(s.centre.cotangent)
        names = tuple(roots)
        self._hint(m.normaliser, "lam")
        simple = dict(zip(names, simplify(tuple(roots.values()), self.hints, self.origin), strict=True))
        for name, node in simple.items():
            if name.startswith("lam") and node.args and not holds_ratio(node) and node not in self.known.values():
                self.known[name] = node
        arguments = self._arguments(tuple(simple.values()), known=self.known)
        code = Code(arguments, self.hints, "logp", self._line)
        code.count(*simple.values())
        body: dict[str, str] = {}
        for name in ("T", "f", "W", "lam", "objective"):
            if name in simple:
                code.assign(simple[name], name)
        for name in ("value", "coef"):
            body[name] = code.assign(simple[name], name) if simple[name].args else code.tensor(simple[name])
        for name in ("W", "T", "f"):
            body[name] = code.tensor(simple[name]) if name in simple else "None"
        for table in ("ratios", "limits", "outside", "grads"):
            entries = [
                (n.removeprefix(f"{table}/"), code.tensor(x), x) for n, x in simple.items() if n.startswith(f"{table}/")
            ]
            if table == "ratios":
                entries = [(n, f'({text}, "{_item(x)}")', x) for n, text, x in entries]
            body[table] = "{" + ", ".join(f'"{n}": {text}' for n, text, _ in entries) + "}"
        body["centre"] = code.tensor(simple["centre"]) if "centre" in simple else "None"
        returned = [f"        {key}={text}," for key, text in body.items()]
        doc = '    """value = lambda * objective + terms and coef = d value / d logp of each token, and what the metrics show."""'
        lines = [f"    {line}" for line in code.lines]
        return "\n".join(
            [
                self._signature("weights", ["ax", "logp"], arguments),
                doc,
                *lines,
                "    return Weights(",
                *returned,
                "    )",
            ]
        )

    def before(self) -> str:
        """What needs no log-probs: the normalisers."""
        nodes = tuple(self.known.values())
        arguments = self._arguments(nodes)
        code = Code(arguments, {}, "length", self._line)
        code.count(*nodes)
        entries = [f'"{name}": {code.tensor(node)}' for name, node in self.known.items()]
        doc = '    """What is known before the forward: lambda, the weight of one token."""'
        lines = [f"    {line}" for line in code.lines]
        return "\n".join(
            [self._signature("before", ["ax"], arguments), doc, *lines, f"    return {{{', '.join(entries)}}}"]
        )

    def live(self) -> str:
        """Which tokens can have a value or a gradient, as far as that is known before the forward."""
        nodes = simplify(self.schedule.live, self.hints, self.origin)
        arguments = self._arguments(nodes)
        code = Code(arguments, self.hints, "A", self._line)
        code.count(*nodes)
        text = " & ".join(code.ref(node, UNARY if len(nodes) > 1 else 0) for node in nodes)
        text = f"ax.any_t({text})" if self.schedule.waits == "sequence" else text
        doc = '    """Whether a token can have a value or a gradient, as far as is known before the forward."""'
        lines = [f"    {line}" for line in code.lines]
        return "\n".join([self._signature("live", ["ax"], arguments), doc, *lines, f"    return {text}"])

    def _ratios(self) -> dict[str, Node]:
        """Every ratio the method reads, as a log: per token, and the products and geometric means it forms of them."""
        found: dict[str, Node] = {}
        nodes = ir.topological(*self.method.loss_side)
        for name in ir.RATIOS:
            leaf = ir.logratio(name)
            if leaf in nodes:
                found[name] = leaf
        for n in nodes:
            if (
                n.op == "exp"
                and n.args[0].op == "reduce"
                and isinstance(n.args[0].attr, tuple)
                and n.args[0].attr[1] in "ts"
            ):
                of = n.args[0].args[0]
                if of.op == "logratio":
                    kind, suffix = n.args[0].attr
                    name = self.hints.get(id(n)) or f"{ {'sum': 'prod', 'mean': 'geomean'}[kind] }_{suffix}({of.attr})"
                    found[name if name not in ("T", "f", "W") else f"{kind}_{suffix}({of.attr})"] = n.args[0]
        return found

    def _limits(self) -> dict[str, Node]:
        """Where each mask, cap, floor and clip on the way to T and f binds."""
        found: dict[str, Node] = {}
        if self.method.W is None:
            flat = ir.compare("==", self.method.gradient.coef, ir.ZERO)
            return {"coef/zero": flat} if self.method.gradient.coef.args else {}
        for knob, root in (("T", self.method.T), ("f", self.method.f)):
            assert root is not None
            for limit in limiters(root):
                key, number = f"{knob}/{limit.kind}", 1
                while key in found:
                    number += 1
                    key = f"{knob}/{limit.kind}{number}"
                found[key] = limit.binds
                if limit.binds.op == "not":
                    self._hint(limit.binds.args[0], "kept")
        return found

    def _outside(self) -> dict[str, Node]:
        """For each ratio: whether it is beyond a bound it is compared with, on the side away from 1, whatever the sign of A."""
        ranges = defaults_range(self.method)
        found: dict[str, Node] = {}
        for name, log_ratio in self._ratios().items():
            ratio = ir.exp(log_ratio)
            beyond = ir.FALSE
            for bound in self._bounds_of(ratio):
                low, high = interval(bound, lambda n: ranges.get(id(n)))
                upper = (low + high) / 2 >= 1 or high == float("inf")
                away = ir.compare(">" if upper else "<", ratio, bound)
                self._hint(away, f"{name}_{'above' if upper else 'below'}")
                beyond = ir.logical_or(beyond, away)
            if beyond is not ir.FALSE:
                found[name] = beyond
        return found

    def _bounds_of(self, ratio: Node) -> list[Node]:
        bounds: list[Node] = []
        for n in ir.topological(*self.method.loss_side):
            if n.op in ("lt", "le", "min", "max", "clip") and ratio in n.args:
                bounds += [a for a in n.args if a.axis is Axis.CONSTANT and a not in bounds]
        return bounds

    # --- sums over the vocabulary -----------------------------------------------------------------------------------

    def _name_sums(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for n in self.schedule.vocabulary_sums:
            wanted = self.hints.get(id(n)) or f"sum_{len(names) + 1}"
            wanted = safe_name(wanted, set(names.values()) | {p.name.value for p in self.method.params})
            names[id(n)] = wanted
        return names

    def distribution(self) -> str:
        sums = self.schedule.vocabulary_sums
        insides = simplify(tuple(n.args[0] for n in sums), self.hints, self.origin)
        arguments = self._arguments(insides, columns=True)
        code = Code(arguments, {}, _columns(arguments), self._line)
        code.count(*insides)
        entries = []
        for n, inside in zip(sums, insides, strict=True):
            assert isinstance(n.attr, tuple)
            method = {"sum": "sum", "max": "amax", "min": "amin", "any": "any"}[n.attr[0]]
            entries.append(f'"{self.sum_names[id(n)]}": {code.ref(inside, 7)}.{method}(-1)')
        doc = '    """Sums over the next-token distribution, one per row; the columns are the last axis."""'
        return "\n".join(
            [
                self._signature("distribution", [], arguments),
                doc,
                *(f"    {x}" for x in code.lines),
                f"    return {{{', '.join(entries)}}}",
            ]
        )

    def d_distribution(self) -> str:
        terms = [t for t in self.method.gradient.sums if id(t.node) in self.sum_names]
        slopes = simplify(tuple(t.slope for t in terms), self.hints, self.origin)
        arguments = self._arguments(slopes, columns=True)
        code = Code(arguments, {}, _columns(arguments), self._line)
        code.count(*slopes)
        parts = [
            f'grads["{self.sum_names[id(t.node)]}"] * {code.ref(s, 5)}' for t, s in zip(terms, slopes, strict=True)
        ]
        doc = '    """sum over k of grads[k] * d sum_k / d log pi(v), for each column v; grads[k] is [..., 1]."""'
        return "\n".join(
            [
                self._signature("d_distribution", ["grads"], arguments),
                doc,
                *(f"    {x}" for x in code.lines),
                f"    return {' + '.join(parts)}",
            ]
        )

    def centre(self) -> str:
        assert self.schedule.centre is not None
        (slope,) = simplify((self.schedule.centre.slope,), self.hints, self.origin)
        arguments = self._arguments((slope,), columns=True)
        code = Code(arguments, {}, _columns(arguments), self._line)
        code.count(slope)
        text = code.ref(slope)
        doc = '    """mu(v) * W_v for each column v: the weight of its score in the centring term."""'
        return "\n".join(
            [self._signature("centre", [], arguments), doc, *(f"    {x}" for x in code.lines), f"    return {text}"]
        )

    # --- the data side ------------------------------------------------------------------------------------------------

    def data(self, key: str, node: Node) -> str:
        (simple,) = simplify((node,), self.hints, self.origin)
        arguments = self._arguments((simple,))
        code = Code(arguments, self.hints, "R", self._line)
        code.count(simple)
        text = code.tensor(simple)
        doc = {
            "reward": '    """The shaped reward of each answer, [B]."""',
            "advantage": '    """A of each answer, [B], from its (shaped) reward."""',
            "keep": '    """Whether each answer enters the batch, [B], from its raw reward."""',
        }[key]
        return "\n".join(
            [self._signature(key, ["ax", "R"], arguments), doc, *(f"    {x}" for x in code.lines), f"    return {text}"]
        )

    # --- shared -------------------------------------------------------------------------------------------------------

    def _arguments(
        self, roots: tuple[Node, ...], columns: bool = False, known: dict[str, Node] | None = None
    ) -> dict[int, str]:
        """leaf id -> the argument that brings it: log-probs, inputs, counts, sums over the vocabulary, parameters."""
        names: dict[int, str] = {}
        params: dict[int, str] = {}
        ready = {id(node): name for name, node in (known or {}).items()}
        nodes = _without_sums(roots, set(ready) if columns else {*ready, *self.sum_names})
        for n in nodes:
            if n.op == "logp":
                names[id(n)] = (
                    f"log_{n.attr}"
                    if n.axis is Axis.VOCAB
                    else "logp"
                    if n.attr == "pi"
                    else POLICY_INPUTS[str(n.attr)]
                )
            elif n.op == "logratio":
                for policy in ir.RATIOS[str(n.attr)]:
                    leaf = ir.logp(policy, n.axis)
                    names[id(leaf)] = (
                        f"log_{policy}" if n.axis is Axis.VOCAB else "logp" if policy == "pi" else POLICY_INPUTS[policy]
                    )
            elif n.op == "input":
                names[id(n)] = COUNT_ARGUMENTS.get(str(n.attr), str(n.attr))
            elif n.op == "param":
                params[id(n)] = str(n.attr)
            elif id(n) in self.sum_names:
                names[id(n)] = self.sum_names[id(n)]
            elif id(n) in ready:
                names[id(n)] = ready[id(n)]
        declared = {p.name.value: i for i, p in enumerate(self.method.params)}
        return names | dict(sorted(params.items(), key=lambda item: declared[item[1]]))

    def _signature(self, name: str, first: list[str], arguments: dict[int, str]) -> str:
        order = ["log_pi", "log_prox", "log_mu", "log_ref", "prox_logp", "mu_logp", "ref_logp", "A", "R", "length"]
        params = {p.name.value for p in self.method.params}
        given = [a for a in dict.fromkeys(arguments.values()) if a not in first]
        inputs = sorted(
            (a for a in given if a not in params), key=lambda a: (order.index(a) if a in order else len(order), a)
        )
        listed = [*first, *inputs, *(a for a in given if a in params)]
        text = f"def {name}({', '.join(listed)}):"
        if len(text) <= 110:
            return text
        return f"def {name}(\n    {', '.join(listed)}\n):"

    def _hint(self, node: Node, name: str) -> None:
        if node.args:
            self.hints.setdefault(id(node), name)

    def _line(self, node: Node) -> str:
        origin = self.origin.get(id(node))
        return f"{origin[0]}, line {origin[1]}" if origin else ""


def _columns(arguments: dict[int, str]) -> str:
    """An argument that has the columns' full shape."""
    return next((name for name in arguments.values() if name.startswith("log_")), "log_pi")


def _item(node: Node) -> str:
    """What one value of a ratio is per: a token or an answer."""
    return "sequence" if node.axis <= Axis.SEQUENCE else "token"


def _without_sums(roots: tuple[Node, ...], stop: set[int]) -> list[Node]:
    """Nodes below the roots, not entering sums over the vocabulary: those come in ready."""
    found: list[Node] = []
    seen: set[int] = set()
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        found.append(node)
        if id(node) not in stop:
            stack.extend(reversed(node.args))
    return found
