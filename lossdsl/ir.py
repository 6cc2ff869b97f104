"""The typed intermediate representation: an immutable, shared graph of small operations.

A node is an operation (a key of `primitives.PRIMITIVES`, or one of the leaves and reductions below), its arguments,
an attribute and its type: the axis it lives on and whether it is a condition. Nodes are interned, so equal graphs
are the same object: comparing is `is`, and every pass can remember what it did to a node.

Leaves (op, attr):
    const     a Fraction
    param     the parameter's name
    logp      the log-prob of the sampled token under a policy: "pi", "prox", "mu", "ref"
    logratio  "r" = pi/prox, "c" = prox/mu, "rho" = pi/mu, as a log
    input     "A", "R", a count ("len", "n_tokens", ...) or an input that the spec declares
A leaf over the vocabulary (`pi[v]`) has the axis VOCAB and the same op and attr.

Reductions: op "reduce", attr (kind, suffix), e.g. ("sum", "t"); one argument, or two for quantile and std.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from .axes import REDUCERS, Axis

Attr = Fraction | str | tuple[str, str] | None

POLICIES = ("pi", "prox", "mu", "ref")
RATIOS = {"r": ("pi", "prox"), "c": ("prox", "mu"), "rho": ("pi", "mu")}
REDUCTIONS = ("sum", "mean", "max", "min", "any", "std", "quantile", "loo")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One value of the graph. Make nodes only through the functions of this module."""

    op: str
    args: tuple[Node, ...]
    attr: Attr
    axis: Axis
    is_bool: bool
    depth: int

    def __repr__(self) -> str:
        return dump(self)


_INTERNED: dict[tuple[object, ...], Node] = {}


def make(op: str, args: tuple[Node, ...], attr: Attr, axis: Axis, is_bool: bool = False) -> Node:
    """The one node with this content."""
    key = (op, tuple(map(id, args)), attr, axis, is_bool)
    node = _INTERNED.get(key)
    if node is None:
        node = Node(op, args, attr, axis, is_bool, 1 + max((a.depth for a in args), default=0))
        _INTERNED[key] = node
    return node


# --- leaves -----------------------------------------------------------------------------------------------------


def const(value: Fraction | int) -> Node:
    return make("const", (), Fraction(value), Axis.CONSTANT)


def param(name: str) -> Node:
    return make("param", (), name, Axis.CONSTANT)


def logp(policy: str, axis: Axis = Axis.TOKEN) -> Node:
    return make("logp", (), policy, axis)


def logratio(name: str, axis: Axis = Axis.TOKEN) -> Node:
    return make("logratio", (), name, axis)


def value(name: str, axis: Axis) -> Node:
    """An input: the advantage, the reward, a count, or what a spec declares."""
    return make("input", (), name, axis)


ZERO, ONE = const(0), const(1)
TRUE = make("true", (), None, Axis.CONSTANT, True)
FALSE = make("false", (), None, Axis.CONSTANT, True)


# --- operations: build, folding only what is the same for every reader -------------------------------------------


def _apply(op: str, *args: Node, is_bool: bool = False) -> Node:
    return make(op, args, None, max(a.axis for a in args), is_bool)


def _const(node: Node) -> Fraction | None:
    return node.attr if isinstance(node.attr, Fraction) and node.op == "const" else None


def _small(value: Fraction) -> bool:
    """Whether a folded number is one that a float can hold; others stay operations."""
    return max(value.numerator.bit_length(), value.denominator.bit_length()) < 900


def add(a: Node, b: Node) -> Node:
    x, y = _const(a), _const(b)
    if x is not None and y is not None and _small(x + y):
        return const(x + y)
    if b.op == "neg":
        return sub(a, b.args[0])
    return b if a is ZERO else a if b is ZERO else _apply("add", a, b)


def sub(a: Node, b: Node) -> Node:
    x, y = _const(a), _const(b)
    if x is not None and y is not None and _small(x - y):
        return const(x - y)
    if a is b:
        return ZERO
    if b.op == "neg":
        return add(a, b.args[0])
    return a if b is ZERO else neg(b) if a is ZERO else _apply("sub", a, b)


def neg(a: Node) -> Node:
    x = _const(a)
    if x is not None:
        return const(-x)
    return a.args[0] if a.op == "neg" else _apply("neg", a)


def mul(a: Node, b: Node) -> Node:
    x, y = _const(a), _const(b)
    if x is not None and y is not None and _small(x * y):
        return const(x * y)
    if a is ZERO or b is ZERO:
        return ZERO
    if a.op == "neg" and b.op == "neg":
        return mul(a.args[0], b.args[0])
    if a.op == "neg":
        return neg(mul(a.args[0], b))
    if b.op == "neg":
        return neg(mul(a, b.args[0]))
    if x == -1:
        return neg(b)
    if y == -1:
        return neg(a)
    if x is not None and b.op == "mul" and _const(b.args[0]) is not None:
        return mul(mul(a, b.args[0]), b.args[1])
    if y is not None:
        return mul(b, a)
    return b if a is ONE else _apply("mul", a, b)


def div(a: Node, b: Node) -> Node:
    """a / b, and 0 where b is 0. A quotient of probabilities is one exponential: it cannot underflow on the way."""
    x, y = _const(a), _const(b)
    if a.op == "exp" and b.op == "exp":
        return exp(sub(a.args[0], b.args[0]))
    if y == 0 or a is ZERO:
        return ZERO
    if x is not None and y is not None and _small(x / y):
        return const(x / y)
    return a if b is ONE else _apply("div", a, b)


def power(a: Node, b: Node) -> Node:
    x, y = _const(a), _const(b)
    if b is ONE:
        return a
    if b is ZERO:
        return ONE
    if x is not None and y is not None and y.denominator == 1 and abs(y) <= 16 and (x != 0 or y > 0):
        folded = x ** int(y)
        if _small(folded):
            return const(folded)
    return _apply("pow", a, b)


def exp(a: Node) -> Node:
    """e ** min(a, 20): saturating, so that no ratio overflows."""
    return ONE if a is ZERO else _apply("exp", a)


def log(a: Node) -> Node:
    """log a; exact (no exp/log round trip) for probabilities, ratios and their products."""
    if a is ONE:
        return ZERO
    lifted = log_space(a)
    return lifted if lifted is not None else _apply("log", a)


def log_space(a: Node) -> Node | None:
    """The log of a product of exponentials, as a sum; None for anything else."""
    if a is ONE:
        return ZERO
    if a.op == "exp":
        return a.args[0]
    if a.op in ("mul", "div"):
        x, y = (log_space(arg) for arg in a.args)
        if x is not None and y is not None:
            return add(x, y) if a.op == "mul" else sub(x, y)
    if a.op == "pow" and _const(a.args[1]) is not None:
        x = log_space(a.args[0])
        return None if x is None else mul(a.args[1], x)
    if a.op == "sg":
        x = log_space(a.args[0])
        return None if x is None else sg(x)
    return None


def unary(op: str, a: Node) -> Node:
    """abs, sqrt, sigmoid, tanh, or log_bound."""
    if a is ZERO and op != "log_bound":
        return const(Fraction(1, 2)) if op == "sigmoid" else ZERO
    return _apply(op, a)


def sg(a: Node) -> Node:
    """Stop-gradient: the value of a, held fixed when differentiating."""
    return a if a.op in ("sg", "const", "param", "input") else _apply("sg", a)


def minimum(a: Node, b: Node) -> Node:
    return a if a is b else _apply("min", a, b)


def maximum(a: Node, b: Node) -> Node:
    return a if a is b else _apply("max", a, b)


def clip(x: Node, low: Node, high: Node) -> Node:
    """min(max(x, low), high)."""
    return _apply("clip", x, low, high)


def where(cond: Node, a: Node, b: Node) -> Node:
    if cond is TRUE or a is b:
        return a
    if cond is FALSE:
        return b
    if cond.op == "not":
        return where(cond.args[0], b, a)
    return make("where", (cond, a, b), None, max(cond.axis, a.axis, b.axis), a.is_bool)


def compare(op: str, a: Node, b: Node) -> Node:
    """op is one of < <= > >= == !=."""
    if op in (">", ">="):
        return compare({">": "<", ">=": "<="}[op], b, a)
    if op == "!=":
        return logical_not(compare("==", a, b))
    x, y = _const(a), _const(b)
    if x is not None and y is not None:
        return TRUE if (x < y if op == "<" else x <= y if op == "<=" else x == y) else FALSE
    if a is b:
        return FALSE if op == "<" else TRUE
    return _apply({"<": "lt", "<=": "le", "==": "eq"}[op], a, b, is_bool=True)


def logical_not(a: Node) -> Node:
    if a is TRUE or a is FALSE:
        return FALSE if a is TRUE else TRUE
    return a.args[0] if a.op == "not" else _apply("not", a, is_bool=True)


def logical_and(a: Node, b: Node) -> Node:
    if a is FALSE or b is FALSE:
        return FALSE
    return b if a is TRUE or a is b else a if b is TRUE else _apply("and", a, b, is_bool=True)


def logical_or(a: Node, b: Node) -> Node:
    if a is TRUE or b is TRUE:
        return TRUE
    return b if a is FALSE or a is b else a if b is FALSE else _apply("or", a, b, is_bool=True)


def reduce(kind: str, suffix: str, x: Node, extra: Node | None = None) -> Node:
    """The reduction `kind_suffix(x)`; prod, geomean and all are written with these.

    A sum over tokens of something that is the same for every token is that thing times the length.
    """
    axis = REDUCERS[suffix].result if kind != "loo" else Axis.SEQUENCE
    if kind == "sum" and suffix == "t" and x.axis <= Axis.SEQUENCE and not x.is_bool:
        return mul(x, value("len", Axis.SEQUENCE))
    if kind == "mean" and suffix == "t" and x.axis <= Axis.SEQUENCE:
        return x
    if kind == "sum" and x is ZERO:
        return ZERO
    if kind == "sum" and suffix != "v" and x.op == "neg":
        return neg(reduce(kind, suffix, x.args[0]))
    args = (x,) if extra is None else (x, extra)
    return make("reduce", args, (kind, suffix), axis, kind == "any")


# --- walking ------------------------------------------------------------------------------------------------------


def topological(*roots: Node) -> list[Node]:
    """Every node below the roots, arguments before users, in an order fixed by the graph alone."""
    order: list[Node] = []
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args) if id(arg) not in seen)
    return order


def leaves(*roots: Node) -> Iterator[Node]:
    return (node for node in topological(*roots) if not node.args)


def contains(root: Node, test: Callable[[Node], bool]) -> bool:
    return any(test(node) for node in topological(root))


def rebuild(node: Node, args: tuple[Node, ...]) -> Node:
    """The same operation on other arguments, folded again."""
    if args == node.args:
        return node
    match node.op:
        case "add" | "sub" | "mul" | "div":
            return {"add": add, "sub": sub, "mul": mul, "div": div}[node.op](*args)
        case "pow":
            return power(*args)
        case "neg":
            return neg(*args)
        case "exp":
            return exp(*args)
        case "log":
            return log(*args)
        case "sg":
            return sg(*args)
        case "min":
            return minimum(*args)
        case "max":
            return maximum(*args)
        case "clip":
            return clip(*args)
        case "where":
            return where(*args)
        case "lt" | "le" | "eq":
            return compare({"lt": "<", "le": "<=", "eq": "=="}[node.op], *args)
        case "not":
            return logical_not(*args)
        case "and":
            return logical_and(*args)
        case "or":
            return logical_or(*args)
        case "reduce":
            assert isinstance(node.attr, tuple)
            return reduce(node.attr[0], node.attr[1], *args)
    return unary(node.op, *args)


def rewrite(root: Node, rule: Callable[[Node], Node | None], memo: dict[int, Node] | None = None) -> Node:
    """Bottom-up: `rule` sees each node with its arguments already rewritten and may return a replacement."""
    memo = {} if memo is None else memo
    for node in topological(root):
        if id(node) not in memo:
            fresh = rebuild(node, tuple(memo[id(a)] for a in node.args)) if node.args else node
            memo[id(node)] = rule(fresh) or fresh
    return memo[id(root)]


def at_vocabulary(root: Node) -> Node:
    """The same expression at every token v of the vocabulary: pi becomes pi[v], r becomes r[v], ..."""
    return rewrite(root, lambda n: make(n.op, (), n.attr, Axis.VOCAB) if n.op in ("logp", "logratio") else None)


# --- text ---------------------------------------------------------------------------------------------------------


def dump(root: Node) -> str:
    """A stable listing, one node a line, with its axis: what `lossdsl show --emit ir` prints."""
    names: dict[int, str] = {}
    lines: list[str] = []
    for node in topological(root):
        if not node.args:
            names[id(node)] = leaf_text(node)
            continue
        names[id(node)] = f"%{len(lines)}"
        op = "_".join(node.attr) if isinstance(node.attr, tuple) else node.op
        kind = "bool" if node.is_bool else "real"
        lines.append(f"%{len(lines)} = {op}({', '.join(names[id(a)] for a in node.args)})  : {kind}[{node.axis}]")
    lines.append(f"return {names[id(root)]}")
    return "\n".join(lines)


def leaf_text(node: Node) -> str:
    """A leaf as the language writes it."""
    at = "[v]" if node.axis is Axis.VOCAB else ""
    match node.op:
        case "const":
            assert isinstance(node.attr, Fraction)
            return str(node.attr.numerator) if node.attr.denominator == 1 else repr(float(node.attr))
        case "logp" | "logratio":
            return f"log({node.attr}{at})"
        case "true" | "false":
            return node.op
    return str(node.attr)
