"""Expression text -> syntax tree. The only room where lark is used."""

from __future__ import annotations

import re
import sys
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken, VisitError

from . import ast
from .errors import Diagnostic, SpecError, place
from .specdoc import Text

MAX_LENGTH = 4000
MAX_DEPTH = 60


class _TooDeep(Exception):
    pass


class _OutOfRange(Exception):
    pass


class _Build(Transformer[Token, ast.Expr]):
    """Builds the tree while the parser runs (no recursion), and refuses one that is too deep for a person."""

    def __init__(self) -> None:
        super().__init__()
        self.depth: dict[int, int] = {}

    def _made(self, node: ast.Expr) -> ast.Expr:
        depth = 1 + max((self.depth.get(id(c), 1) for c in node.children), default=0)
        if depth > MAX_DEPTH:
            raise _TooDeep
        self.depth[id(node)] = depth
        self._alive.append(node)  # ids stay unique while the tree is being built
        return node

    _alive: list[ast.Expr] = []

    def number(self, items: list[Token]) -> ast.Expr:
        (token,) = items
        size = float(token)
        if size > 1e300 or (size < 1e-300 and re.search("[1-9]", re.split("[eE]", token)[0])):
            raise _OutOfRange(_start(token), _end(token))
        return self._made(ast.Number(_start(token), _end(token), Fraction(str(token)), str(token)))

    def name(self, items: list[Token]) -> ast.Expr:
        (token,) = items
        return self._made(ast.Name(_start(token), _end(token), str(token)))

    def index(self, items: list[Token]) -> ast.Expr:
        name, axis = items
        return self._made(ast.Index(_start(name), _end(axis) + 1, str(name), str(axis)))

    def arguments(self, items: list[ast.Expr]) -> list[ast.Expr]:
        return items

    def call(self, items: list[object]) -> ast.Expr:
        name, args = items
        assert isinstance(name, Token) and isinstance(args, list)
        end = args[-1].end if args else _end(name) + 1
        return self._made(ast.Call(_start(name), end + 1, str(name), tuple(args)))

    def indicator(self, items: list[object]) -> ast.Expr:
        token, cond = items
        assert isinstance(token, Token) and isinstance(cond, ast.Expr)
        return self._made(ast.Indicator(_start(token), cond.end + 1, cond))

    def group(self, items: list[ast.Expr]) -> ast.Expr:
        return items[0]

    def opening(self, items: list[Token]) -> Token:
        return items[0]

    def closing(self, items: list[Token]) -> Token:
        return items[0]

    def _binary(self, op: str, items: list[ast.Expr]) -> ast.Expr:
        left, right = items
        return self._made(ast.Binary(left.start, right.end, op, left, right))

    def add(self, items: list[ast.Expr]) -> ast.Expr:
        return self._binary("add", items)

    def sub(self, items: list[ast.Expr]) -> ast.Expr:
        return self._binary("sub", items)

    def mul(self, items: list[ast.Expr]) -> ast.Expr:
        return self._binary("mul", items)

    def div(self, items: list[ast.Expr]) -> ast.Expr:
        return self._binary("div", items)

    def pow(self, items: list[ast.Expr]) -> ast.Expr:
        return self._binary("pow", items)

    def minus(self, items: list[object]) -> ast.Expr:
        sign, arg = items
        assert isinstance(sign, Token) and isinstance(arg, ast.Expr)
        return self._made(ast.Unary(_start(sign), arg.end, "neg", arg))

    def negate(self, items: list[object]) -> ast.Expr:
        sign, arg = items
        assert isinstance(sign, Token) and isinstance(arg, ast.Expr)
        return self._made(ast.Unary(_start(sign), arg.end, "not", arg))

    def compare(self, items: list[object]) -> ast.Expr:
        operands = tuple(x for x in items if isinstance(x, ast.Expr))
        ops = tuple(str(x) for x in items if isinstance(x, Token))
        return self._made(ast.Compare(operands[0].start, operands[-1].end, ops, operands))

    def between(self, items: list[object]) -> ast.Expr:
        arg, opening, low, high, closing = items
        assert isinstance(arg, ast.Expr) and isinstance(low, ast.Expr) and isinstance(high, ast.Expr)
        return self._made(ast.Between(arg.start, high.end + 1, arg, low, high, opening == "[", closing == "]"))

    def both(self, items: list[ast.Expr]) -> ast.Expr:
        return self._made(ast.Logic(items[0].start, items[-1].end, "and", tuple(items)))

    def either(self, items: list[ast.Expr]) -> ast.Expr:
        return self._made(ast.Logic(items[0].start, items[-1].end, "or", tuple(items)))

    def conditional(self, items: list[ast.Expr]) -> ast.Expr:
        then, cond, other = items
        return self._made(ast.Conditional(then.start, other.end, cond, then, other))


def _start(token: Token) -> int:
    return token.start_pos or 0


def _end(token: Token) -> int:
    return token.end_pos or 0


@lru_cache(maxsize=1)
def _parser() -> Lark:
    path = Path(__file__).parent / "grammar.lark"
    # Its tables take longer to make than most specs to read. They are kept where Python keeps bytecode, by the same rule;
    # Lark makes them anew where they belong to another grammar or version, are broken or cannot be written.
    kept = not sys.dont_write_bytecode and str(path.parent / "__pycache__" / "grammar.lark.cache")
    grammar = path.read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", start="choice", transformer=_BUILD, maybe_placeholders=False, cache=kept)


_BUILD = _Build()


def parse_expression(text: Text) -> ast.Expr:
    """The tree of one expression.

    Raises:
        SpecError: one E03xx diagnostic at the place where the text stops being an expression.
    """
    value = text.value
    if not value.strip():
        raise _error("E0301", text, 0, 0, "an expression is missing here", "write one, e.g. `r` or `1`")
    if len(value) > MAX_LENGTH:
        raise _error(
            "E0305",
            text,
            0,
            1,
            f"this expression has {len(value)} characters; the limit is {MAX_LENGTH}",
            "name its parts under `where:`",
        )
    _BUILD.depth, _BUILD._alive = {}, []
    try:
        tree = _parser().parse(value)
    except (_TooDeep, _OutOfRange, VisitError) as error:
        cause = error.orig_exc if isinstance(error, VisitError) else error
        if isinstance(cause, _OutOfRange):
            start, end = cause.args
            message = "this number is too large or too small for a float"
            raise _error("E0306", text, start, end, message, "write one between 1e-300 and 1e300") from None
        if not isinstance(cause, _TooDeep):
            raise
        message = f"this expression nests more than {MAX_DEPTH} levels deep"
        raise _error("E0305", text, 0, 1, message, "name its parts under `where:`") from None
    except UnexpectedInput as error:
        raise _syntax_error(text, error) from None
    finally:
        _BUILD.depth, _BUILD._alive = {}, []
    assert isinstance(tree, ast.Expr)
    return tree


def _error(code: str, text: Text, start: int, end: int, message: str, help: str) -> SpecError:
    return SpecError((Diagnostic(code, message, place(text, start, end), help),))


# Mistakes that people make because another language spells it so: what stands at the place -> what to write.
_CHARACTERS = {
    "^": "a power is written `**`: `x ** 2`",
    "&": "write `and`",
    "|": "write `or`, and an absolute value as `abs(x)`",
    "!": "write `not`",
    "=": "a comparison for equality is written `==`",
    "≤": "write `<=`",
    "≥": "write `>=`",
    "≠": "write `!=`",
    "×": "write `*`",
    "·": "write `*`",
    "−": "write the ASCII minus `-`",
    "{": "an expression has only ( ) and, for indicators and indices, [ ]",
    "%": "there is no remainder; percentages are written as numbers: 0.05",
    "'": "expressions hold no text",
    '"': "expressions hold no text",
    ".": "names have no dots",
    ";": "one expression per key",
    "@": "`@` is not an operator here; products are written `*`",
}


def _syntax_error(text: Text, error: UnexpectedInput) -> SpecError:
    value = text.value
    if isinstance(error, UnexpectedCharacters):
        at = error.pos_in_stream or 0
        char = value[at]
        shown = char if char.isprintable() else f"U+{ord(char):04X}"
        return _error(
            "E0302",
            text,
            at,
            at + 1,
            f"`{shown}` does not belong here",
            _CHARACTERS.get(char, "expressions hold numbers, names, + - * / **, comparisons and calls"),
        )
    if isinstance(error, UnexpectedEOF) or (isinstance(error, UnexpectedToken) and error.token.type == "$END"):
        end = len(value.rstrip())
        open_at = _unclosed(value)
        if open_at is not None:
            closer = "]" if value[open_at] == "[" else ")"
            cut = text.span.source.text[text.chars[-1] : text.chars[-1] + 1] == ","
            return _error(
                "E0303",
                text,
                open_at,
                open_at + 1,
                f"this `{value[open_at]}` is never closed",
                'inside { } a comma ends the value: put the expression in "quotes" or on a line of its own'
                if cut
                else f"add the matching `{closer}`",
            )
        return _error(
            "E0304", text, max(end - 1, 0), end, "the expression ends too early", "something must follow here"
        )
    assert isinstance(error, UnexpectedToken)
    token = error.token
    start, end = _start(token), _end(token)
    before = value[:start].rstrip()
    return _error("E0302", text, start, end, f"`{token}` does not belong here", _hint(str(token), before))


def _hint(token: str, before: str) -> str:
    last = before[-1:]
    if token in (")", "]"):
        return "no bracket is open here" if _unclosed(before) is None else "something is missing before it"
    if token == "[" and re.search(r"\b(1|[A-Za-z_]\w*)$", before) is None:
        return "brackets stand only in `1[condition]`, `pi[v]` and `x in [a, b]`"
    if last.isalnum() and (token[:1].isalnum() or token == "("):
        return f"two values stand side by side; a product is written `{before.split()[-1][-12:]} * {token}`"
    if last == ")" and (token[:1].isalnum() or token == "("):
        return "a product needs its `*`"
    if token == "if" or (token == "else" and " if " not in before):
        return "write `value if condition else other`"
    if token in ("<", ">", "<=", ">=", "==", "!="):
        return (
            "a value is missing before the comparison" if not last.isalnum() else "chain comparisons as `a <= x <= b`"
        )
    if token == ",":
        return "a comma separates arguments or the ends of an interval"
    if token[:1] in "+*/" and (not last or last in "+-*/(,<>="):
        return "a value is missing before this operator"
    return "an operator, a bracket or a value is missing around here"


def _unclosed(value: str) -> int | None:
    stack: list[int] = []
    for at, char in enumerate(value):
        if char in "([":
            stack.append(at)
        elif char in ")]" and stack:
            stack.pop()
    return stack[-1] if stack else None
