"""Syntax trees -> typed IR: every name looked up, every axis and kind checked, functions expanded in place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from . import ast, ir, scope
from .axes import REDUCERS, Axis
from .errors import Diagnostic, Span, place, suggest
from .ir import Node
from .parse import parse_expression
from .scope import Function, Policy
from .specdoc import SpecDoc, Text

MAX_NODES = 3000
MAX_CALLS = 2000

# Stands for a value that could not be lowered, so that one mistake is reported once.
POISON = ir.value("?", Axis.CONSTANT)

Binding = Node | Policy


class TooLarge(Exception):
    """The expressions, functions expanded, are larger than any method is."""


@dataclass
class _Here:
    """Where an expression stands: its text (for spans), its side, and the arguments of the function it is in."""

    text: Text
    side: str  # "loss" or "data"
    arguments: dict[str, Binding] = field(default_factory=dict)
    definitions: int = 10**6  # how many of the spec's definitions are visible
    function: str | None = None


class Lowering:
    """Lowers the expressions of one spec; collects diagnostics instead of stopping at the first."""

    def __init__(self, doc: SpecDoc) -> None:
        self.doc = doc
        self.params = {p.name.value for p in doc.params}
        self.inputs = {i.name.value: i.axis.value for i in doc.inputs}
        self.definitions = [scope.function(d) for d in doc.where]
        self.knobs: dict[str, Node] = {}
        self.diagnostics: list[Diagnostic] = []
        self.used: set[str] = set()
        self.hints: dict[int, str] = {}  # node -> the name a reader knows it by
        self.origin: dict[int, tuple[str, int]] = {}  # node -> (key, line of the spec) that first wrote it
        self.trees: dict[str, ast.Expr] = {}  # body text -> its tree
        self.intervals: list[tuple[Node, Node, Span]] = []  # (low, high) ends that the spec writes
        self._calls = 0
        self._cache: dict[tuple[str, str], Node] = {}

    # --- entry ----------------------------------------------------------------------------------------------------

    def key(self, key: str, text: Text, side: str = "loss", want: str = "number", finest: Axis = Axis.TOKEN) -> Node:
        """The IR of one key of the spec; `want` is "number" or "condition", `finest` the finest axis it may have."""
        self._calls = 0
        here = _Here(text, side)
        node = self._condition(self._tree(text), here) if want == "condition" else self._number(self._tree(text), here)
        if node is not POISON and node.axis > finest:
            self._axis_error(node, text, finest, key)
            return POISON
        line = text.span.source.line_col(text.span.start)[0]
        for below in ir.topological(node):
            self.origin.setdefault(id(below), (key, line))
        if len(self.origin) > MAX_NODES:
            raise TooLarge
        return node

    def hint(self, node: Node, name: str) -> None:
        if node.args:
            self.hints.setdefault(id(node), name)

    def _tree(self, text: Text) -> ast.Expr:
        tree = self.trees.get(text.value)
        if tree is None:
            tree = self.trees[text.value] = parse_expression(text)
        return tree

    def _error(self, code: str, here: _Here, at: ast.Expr, message: str, help: str = "") -> Node:
        diagnostic = Diagnostic(code, message, place(here.text, at.start, at.end), help)
        if diagnostic not in self.diagnostics:
            self.diagnostics.append(diagnostic)
        return POISON

    def _axis_error(self, node: Node, text: Text, finest: Axis, key: str) -> None:
        if node.axis is Axis.VOCAB:
            message = f"`{key}` still has one value per vocabulary entry [v]"
            help = "sum over the next-token distribution: `sum_v(mu[v] * ...)`"
        else:
            message = f"`{key}` has one value per {node.axis}; it must have one per {finest} at most"
            help = f"reduce it: `mean_{_suffix(node.axis)}(...)`, `sum_{_suffix(node.axis)}(...)`, ..."
        self.diagnostics.append(Diagnostic("E0405", message, text.span, help))

    # --- kinds ----------------------------------------------------------------------------------------------------

    def _number(self, expr: ast.Expr, here: _Here) -> Node:
        node = self._lower(expr, here)
        if node.is_bool:
            return self._error(
                "E0404",
                here,
                expr,
                "a number is wanted here, this is a condition",
                "an indicator makes a number of it: `1[condition]`",
            )
        return node

    def _condition(self, expr: ast.Expr, here: _Here) -> Node:
        node = self._lower(expr, here)
        if not node.is_bool and node is not POISON:
            self._error(
                "E0404", here, expr, "a condition is wanted here, this is a number", "compare it: `x != 0`, `x > 1`"
            )
            return ir.TRUE
        return ir.TRUE if node is POISON else node

    # --- expressions ----------------------------------------------------------------------------------------------

    def _lower(self, expr: ast.Expr, here: _Here) -> Node:
        match expr:
            case ast.Number():
                return ir.const(expr.value)
            case ast.Name():
                return self._name(expr, here)
            case ast.Index():
                return self._index(expr, here)
            case ast.Call():
                return self._call(expr, here)
            case ast.Unary(op="not"):
                return ir.logical_not(self._condition(expr.arg, here))
            case ast.Unary():
                return ir.neg(self._number(expr.arg, here))
            case ast.Binary():
                left, right = self._number(expr.left, here), self._number(expr.right, here)
                if expr.op == "div" and right is ir.ZERO:
                    return self._error("E0412", here, expr, "this divides by zero", "")
                op = {"add": ir.add, "sub": ir.sub, "mul": ir.mul, "div": ir.div, "pow": ir.power}[expr.op]
                return op(left, right)
            case ast.Compare():
                values = [self._number(x, here) for x in expr.operands]
                if len(values) > 2 and all(op in ("<", "<=") for op in expr.ops):
                    self._interval(values[0], values[-1], expr, here)
                parts = [ir.compare(op, a, b) for op, a, b in zip(expr.ops, values, values[1:], strict=False)]
                return _all(parts)
            case ast.Between():
                arg, low, high = (self._number(x, here) for x in (expr.arg, expr.low, expr.high))
                self._interval(low, high, expr, here)
                below = ir.compare("<=" if expr.low_closed else "<", low, arg)
                return ir.logical_and(below, ir.compare("<=" if expr.high_closed else "<", arg, high))
            case ast.Logic():
                conditions = [self._condition(x, here) for x in expr.args]
                return _all(conditions) if expr.op == "and" else ir.logical_not(_all(map(ir.logical_not, conditions)))
            case ast.Indicator():
                return ir.where(self._condition(expr.cond, here), ir.ONE, ir.ZERO)
            case ast.Conditional():
                cond, then, other = (
                    self._condition(expr.cond, here),
                    self._lower(expr.then, here),
                    self._lower(expr.other, here),
                )
                if then.is_bool and other.is_bool:
                    return ir.logical_or(ir.logical_and(cond, then), ir.logical_and(ir.logical_not(cond), other))
                for part, node in ((expr.then, then), (expr.other, other)):
                    if node.is_bool:
                        return self._error(
                            "E0404",
                            here,
                            part,
                            "one branch is a condition and the other a number",
                            "an indicator makes a number of a condition: `1[condition]`",
                        )
                return ir.where(cond, then, other)
        raise TypeError(type(expr).__name__)

    def _interval(self, low: Node, high: Node, expr: ast.Expr, here: _Here) -> None:
        if low.axis is Axis.CONSTANT and high.axis is Axis.CONSTANT and POISON not in (low, high):
            self.intervals.append((low, high, place(here.text, expr.start, expr.end)))

    def _name(self, expr: ast.Name, here: _Here) -> Node:
        name = expr.id
        bound = here.arguments.get(name)
        if bound is not None:
            return bound.node(Axis.TOKEN) if isinstance(bound, Policy) else bound
        wrong_side = self._wrong_side(expr, here)
        if wrong_side is not None:
            return wrong_side
        self.used.add(name)
        for position, definition in enumerate(self.definitions):
            if definition.name == name and position < here.definitions:
                if definition.parameters is not None:
                    return self._error(
                        "E0403",
                        here,
                        expr,
                        f"`{name}` is a function and needs its arguments",
                        f"`{name}({', '.join(definition.parameters)})`",
                    )
                return self._defined(definition, position, here)
        if name in self.params:
            return ir.param(name)
        if name == "A":
            return ir.value("A", Axis.TOKEN if self.inputs.get("A") == "token" else Axis.SEQUENCE)
        if name in self.inputs:
            return ir.value(name, Axis[self.inputs[name].upper()])
        if name in ir.POLICIES or name in ir.RATIOS:
            return Policy(name).node(Axis.TOKEN)
        if name == "R":
            return ir.value("R", Axis.SEQUENCE)
        if name in scope.COUNTS:
            return ir.value(name, scope.COUNTS[name])
        if name in self.knobs:
            node = self.knobs[name]
            return ir.sg(node)
        inherited = scope.prelude().get(name)
        if inherited is not None:
            if inherited.parameters is not None:
                return self._error(
                    "E0403",
                    here,
                    expr,
                    f"`{name}` is a function and needs its arguments",
                    f"`{name}({', '.join(inherited.parameters)})`",
                )
            return self._defined(inherited, 0, here)
        return self._unknown(expr, name, here)

    def _wrong_side(self, expr: ast.Name | ast.Index, here: _Here) -> Node | None:
        name = expr.id
        if (
            any(d.name == name for d in self.definitions)
            or name in self.params
            or (name in self.inputs and name != "A")
        ):
            return None
        if here.side == "loss" and name in scope.DATA_ONLY:
            return self._error(
                "E0407",
                here,
                expr,
                f"`{name}` is the reward of an answer; the loss sees its advantage `A`",
                "declare it under `inputs:` by another name if the loss must read it",
            )
        if here.side == "data" and name in scope.LOSS_ONLY:
            return self._error(
                "E0407",
                here,
                expr,
                f"`{name}` belongs to the loss; this key is computed from rewards, before it",
                "use R, len, group_size, parameters and declared inputs here",
            )
        return None

    def _unknown(self, expr: ast.Expr, name: str, here: _Here) -> Node:
        if any(d.name == name for d in self.definitions):
            return self._too_early(expr, name, here)
        if name in ("T", "f", "W"):
            return self._error(
                "E0408",
                here,
                expr,
                f"`{name}` is not defined at this point",
                "the order is where, T, f, W = f * T, objective, normaliser, terms",
            )
        close = suggest(name, sorted(self._visible(here)))
        return self._error(
            "E0401", here, expr, f"unknown name `{name}`", close or "declare it under `params:`, `inputs:` or `where:`"
        )

    def _too_early(self, expr: ast.Expr, name: str, here: _Here) -> Node:
        return self._error(
            "E0408",
            here,
            expr,
            f"`{name}` is used before it is defined",
            "entries of `where:` see the ones above them; none may refer to itself",
        )

    def _visible(self, here: _Here) -> set[str]:
        mine = {d.name for d in self.definitions} | self.params | set(self.inputs) | set(here.arguments)
        side = scope.LOSS_ONLY if here.side == "loss" else scope.DATA_ONLY
        return mine | side | set(scope.COUNTS) | {n for n, f in scope.prelude().items() if f.parameters is None}

    def _index(self, expr: ast.Index, here: _Here) -> Node:
        if expr.axis != "v":
            return self._error(
                "E0406", here, expr, f"unknown index `[{expr.axis}]`", "the only index is [v], over the vocabulary"
            )
        bound = here.arguments.get(expr.id)
        if isinstance(bound, Policy):
            return bound.node(Axis.VOCAB)
        if bound is None and (expr.id in ir.POLICIES or expr.id in ir.RATIOS):
            return self._wrong_side(expr, here) or Policy(expr.id).node(Axis.VOCAB)
        return self._error(
            "E0406",
            here,
            expr,
            f"`{expr.id}` has no value per vocabulary entry",
            "only policies and ratios take [v]: pi[v], prox[v], mu[v], ref[v], r[v], c[v], rho[v]",
        )

    # --- calls ----------------------------------------------------------------------------------------------------

    def _call(self, expr: ast.Call, here: _Here) -> Node:
        name = expr.func
        for position, definition in enumerate(self.definitions):
            if definition.name == name and position < here.definitions:
                self.used.add(name)
                return self._expand(definition, position, expr, here)
        if name in scope.FUNCTIONS:
            return self._builtin(expr, here)
        kind, _, suffix = name.rpartition("_")
        if kind in scope.REDUCTIONS:
            return self._reduction(kind, suffix, expr, here)
        inherited = scope.prelude().get(name)
        if inherited is not None and inherited.parameters is not None:
            return self._expand(inherited, 0, expr, here)
        return self._unknown_function(expr, here)

    def _unknown_function(self, expr: ast.Call, here: _Here) -> Node:
        name = expr.func
        if any(d.name == name for d in self.definitions):
            return self._too_early(expr, name, here)
        if name in scope.REDUCTIONS:
            suffixes = scope.REDUCTIONS[name][2]
            return self._error(
                "E0402",
                here,
                expr,
                f"`{name}` does not say what it reduces over",
                "write " + ", ".join(f"`{name}_{s}` ({REDUCERS[s].over})" for s in suffixes),
            )
        known = {*scope.FUNCTIONS, *scope.prelude(), *(d.name for d in self.definitions)}
        known |= {f"{kind}_{s}" for kind, (_, _, suffixes) in scope.REDUCTIONS.items() for s in suffixes}
        visible = self._visible(here)
        if name in visible:
            return self._error(
                "E0402", here, expr, f"`{name}` is not a function", f"a product is written `{name} * (...)`"
            )
        return self._error(
            "E0402",
            here,
            expr,
            f"unknown function `{name}`",
            suggest(name, sorted(known)) or "define it under `where:`, e.g. `double(x): 2 * x`",
        )

    def _arity(self, expr: ast.Call, here: _Here, low: int, high: int, usage: str) -> bool:
        if low <= len(expr.args) <= high:
            return True
        wanted = str(low) if low == high else f"{low} to {high}"
        noun = "argument" if wanted == "1" else "arguments"
        self._error("E0403", here, expr, f"`{expr.func}` takes {wanted} {noun}, here are {len(expr.args)}", usage)
        return False

    def _builtin(self, expr: ast.Call, here: _Here) -> Node:
        low, high = scope.FUNCTIONS[expr.func]
        if not self._arity(expr, here, low, high, "`clip(x, low, high)`" if expr.func == "clip" else ""):
            return POISON
        args = [self._number(a, here) for a in expr.args]
        if any(a is POISON for a in args):
            return POISON
        match expr.func:
            case "exp":
                return ir.exp(args[0])
            case "log":
                return ir.log(args[0])
            case "sg":
                return ir.sg(args[0])
            case "clip":
                self._interval(args[1], args[2], expr, here)
                return ir.clip(*args)
            case "min" | "max":
                op = ir.minimum if expr.func == "min" else ir.maximum
                node = args[0]
                for arg in args[1:]:
                    node = op(node, arg)
                return node
        return ir.unary(expr.func, args[0])

    def _reduction(self, kind: str, suffix: str, expr: ast.Call, here: _Here) -> Node:
        low, high, suffixes = scope.REDUCTIONS[kind]
        if suffix not in suffixes:
            return self._error(
                "E0402",
                here,
                expr,
                f"`{kind}` has no form `_{suffix}`",
                "write " + ", ".join(f"`{kind}_{s}` ({REDUCERS[s].over})" for s in suffixes),
            )
        usage = {
            "quantile": f"`quantile_{suffix}(x, 0.8)`",
            "std": f"`std_{suffix}(x)`; `std_{suffix}(x, 0)` divides by n",
        }
        if not self._arity(expr, here, low, high, usage.get(kind, "")):
            return POISON
        truth = kind in ("any", "all")
        x = self._condition(expr.args[0], here) if truth else self._number(expr.args[0], here)
        extra = [self._number(a, here) for a in expr.args[1:]]
        if x is POISON or any(e is POISON for e in extra):
            return ir.TRUE if truth else POISON
        if extra and extra[0].axis is not Axis.CONSTANT:
            return self._error("E0405", here, expr.args[1], "this must be a number or a parameter", "")
        reducer = REDUCERS[suffix]
        if x.axis > reducer.finest:
            finer = _suffix(x.axis)
            return self._error(
                "E0405",
                here,
                expr,
                f"`{expr.func}` reduces over {reducer.over}; this has one value per {x.axis}",
                f"reduce that first, e.g. `{kind}_{suffix}(sum_{finer}(...))`",
            )
        if suffix == "v" and x.axis is not Axis.VOCAB:
            return self._error(
                "E0405",
                here,
                expr,
                f"`{expr.func}` reduces over the vocabulary, but nothing in it is indexed by [v]",
                "index the policies: `mu[v]`, `pi[v]`, `rho[v]`",
            )
        match kind:
            case "prod":
                return ir.exp(ir.reduce("sum", suffix, ir.log(x)))
            case "geomean":
                return ir.exp(ir.reduce("mean", suffix, ir.log(x)))
            case "all":
                return ir.logical_not(ir.reduce("any", suffix, ir.logical_not(x)))
            case "std":
                return ir.reduce("std", suffix, x, extra[0] if extra else ir.ONE)
        return ir.reduce(kind, suffix, x, *extra)

    def _expand(self, function: Function, position: int, expr: ast.Call, here: _Here) -> Node:
        if function.parameters is None:
            return self._error(
                "E0402",
                here,
                expr,
                f"`{function.name}` is not a function",
                f"a product is written `{function.name} * (...)`",
            )
        n = len(function.parameters)
        if not self._arity(expr, here, n, n, f"`{function.name}({', '.join(function.parameters)})`"):
            return POISON
        arguments: dict[str, Binding] = {}
        for parameter, arg in zip(function.parameters, expr.args, strict=True):
            bound = here.arguments.get(arg.id) if isinstance(arg, ast.Name) else None
            if isinstance(bound, Policy):
                arguments[parameter] = bound
            elif isinstance(arg, ast.Name) and bound is None and (arg.id in ir.POLICIES or arg.id in ir.RATIOS):
                if self._wrong_side(arg, here) is POISON:
                    return POISON
                arguments[parameter] = Policy(arg.id)
            else:
                arguments[parameter] = self._lower(arg, here)
        if any(value is POISON for value in arguments.values()):
            return POISON
        low, high = arguments.get("lo"), arguments.get("hi")
        if isinstance(low, Node) and isinstance(high, Node):
            self._interval(low, high, expr, here)
        self._count_call()
        inside = _Here(function.body, here.side, arguments, self._horizon(function, position), function.name)
        before = len(self.diagnostics)
        node = self._lower(self._tree(function.body), inside)
        if len(self.diagnostics) > before:  # a mistake inside a body is reported there, once
            return POISON if not node.is_bool else ir.TRUE
        self._mark(function, node)
        return node

    def _defined(self, function: Function, position: int, here: _Here) -> Node:
        key = (function.name, here.side)
        if key not in self._cache:
            self._count_call()
            inside = _Here(function.body, here.side, {}, self._horizon(function, position), function.name)
            self._cache[key] = self._lower(self._tree(function.body), inside)
            self._mark(function, self._cache[key])
        return self._cache[key]

    def _mark(self, function: Function, node: Node) -> None:
        """The name and, for the spec's own definitions, the line of a definition's value."""
        self.hint(node, function.name)
        if function in self.definitions:
            line = function.body.span.source.line_col(function.body.span.start)[0]
            for below in ir.topological(node):
                self.origin.setdefault(id(below), (function.name, line))

    def _horizon(self, function: Function, position: int) -> int:
        """How many of the spec's definitions a body sees: those above it; the prelude sees none."""
        return position if function in self.definitions else 0

    def _count_call(self) -> None:
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise TooLarge


def _all(conditions: Iterable[Node]) -> Node:
    result = ir.TRUE
    for condition in conditions:
        result = ir.logical_and(result, condition)
    return result


def _suffix(axis: Axis) -> str:
    return {Axis.VOCAB: "v", Axis.TOKEN: "t", Axis.SEGMENT: "s", Axis.SEQUENCE: "g"}.get(axis, "b")
