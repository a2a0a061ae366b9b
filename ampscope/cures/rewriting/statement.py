"""A statement of someone's program, read from its text alone, and changed at the places of its parts."""

from __future__ import annotations

import ast
import builtins
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from ampscope.cures.rewriting.names import NOWHERE, Kind, KnownName, NameScope, of_statement, path_of, resolve

#: Characters of a statement that are parsed: a trace is someone else's, and deep nesting exhausts a parser.
_LONGEST = 4_000
#: How deep the parts of a statement may lie in each other.
_DEEPEST = 100
#: What a line may need around it before it is a program: the head of a block, a branch of one, a decorator.
_FRAMES = (
    ("", ""),
    ("", "\n pass"),
    ("if 0: pass\n", "\n pass"),
    ("try: pass\n", "\n pass"),
    ("", "\ndef _(): pass"),
)
#: Expressions to which a method can be called, or an operator applied, without parentheses.
_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)
#: Expressions that bind less than a sum.
_LOOSE = (ast.Compare, ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr, ast.Starred, ast.Yield, ast.YieldFrom)
_BELOW_SUMS = (ast.BitOr, ast.BitXor, ast.BitAnd, ast.LShift, ast.RShift)
#: Methods that change only a tensor's dtype.
CONVERSIONS = frozenset({"half", "float", "double", "bfloat16", "to", "type_as"})
#: Calls that give the same again, and draw nothing: what stands in an operand may be computed a second time then.
_REPEATABLE = CONVERSIONS.union(
    ("view", "reshape", "transpose", "permute", "squeeze", "unsqueeze", "flatten", "size", "t"),
    ("pow", "square", "mul"),
)

#: Calls that may stand a second time in a condition: they compare, and change nothing.
_PURE = frozenset(
    {"isfinite", "isnan", "isinf", "bool", "eq", "ne", "gt", "ge", "lt", "le", "any", "all", "abs", "sum"}
    | {"logical_and", "logical_or", "logical_not", "size", "unsqueeze"}
)


class Splice(NamedTuple):
    """Text in the place of a part of a statement; in bytes, as `ast` counts them."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Statement:
    """A statement with its parse."""

    code: str
    before: str  #: what was put before it, to parse it
    after: str
    tree: ast.Module
    row: int | None = None  #: the line of it that is meant, from 0; None where all of it is
    scope: NameScope = NOWHERE  #: where it stands: what names mean there

    @cached_property
    def _bytes(self) -> bytes:
        return self.code.encode()

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The byte at which each parsed line starts, counted from the start of the statement."""
        lines = (self.before + self.code).encode().split(b"\n")
        return tuple(accumulate((len(line) + 1 for line in lines), initial=-len(self.before.encode())))

    def nodes(self) -> Iterator[ast.AST]:
        """Every part of the statement itself."""
        return (node for node in ast.walk(self.tree) if getattr(node, "lineno", 0) > self.before.count("\n"))

    def is_meant(self, node: ast.AST) -> bool:
        """Whether a call stands on the line that is meant: one with a dot where the name after it stands."""
        dotted_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        line = node.func.end_lineno if dotted_call and isinstance(node, ast.Call) else getattr(node, "lineno", 0)
        return self.row is None or (line or 0) - 1 - self.before.count("\n") == self.row

    def span(self, node: ast.expr | ast.keyword | ast.stmt) -> tuple[int, int]:
        """Returns the bytes between which a part lies, without parentheses around it."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def enclosed(self, node: ast.expr) -> tuple[int, int] | None:
        """Returns the bytes between which a part lies with the parentheses around it; None where there are none."""
        start, end = self.span(node)
        left, right = self._bytes[:start].rstrip(), self._bytes[end:].lstrip()
        if not (left.endswith(b"(") and right.startswith(b")")):
            return None
        return len(left) - 1, len(self._bytes) - len(right) + 1

    def text(self, node: ast.expr | ast.keyword | ast.stmt) -> str:
        """The text of a part."""
        start, end = self.span(node)
        return self._bytes[start:end].decode()

    def text_with(self, node: ast.expr, splice: Splice) -> str:
        """The text of a part with other text in one place of it."""
        start, end = self.span(node)
        return f"{self._bytes[start : splice.start].decode()}{splice.text}{self._bytes[splice.end : end].decode()}"

    def parents(self, node: ast.AST) -> list[ast.AST]:
        """The parts of which one is a direct part: one, or none."""
        return [each for each in self.nodes() if node in ast.iter_child_nodes(each)]

    def atom(self, node: ast.expr) -> str:
        """The text of a part as a method can be called of it."""
        return self.text(node) if isinstance(node, _ATOMS) else f"({self.text(node)})"

    def factor(self, node: ast.expr) -> str:
        """The text of a part as it can stand in a product."""
        strong = isinstance(node, (*_ATOMS, ast.Constant)) or (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
        )
        return self.text(node) if strong else f"({self.text(node)})"

    def summand(self, node: ast.expr) -> str:
        """The text of a part as something can be added to it."""
        loose = isinstance(node, _LOOSE) or (isinstance(node, ast.BinOp) and isinstance(node.op, _BELOW_SUMS))
        return f"({self.text(node)})" if loose else self.text(node)

    def instead(self, node: ast.expr | ast.keyword | ast.stmt, text: str) -> Splice:
        """``text`` in the place of a part."""
        return Splice(*self.span(node), text)

    def instead_of_all(self, node: ast.expr, text: str) -> Splice:
        """``text`` in the place of a part and of the parentheses around it."""
        return Splice(*(self.enclosed(node) or self.span(node)), text)

    def changed(self, splices: Sequence[Splice]) -> str | None:
        """The statement with other text in these places; None where it does not parse any more, or is the same."""
        content = self._bytes
        for splice in sorted(splices, reverse=True):
            content = content[: splice.start] + splice.text.encode() + content[splice.end :]
        code = content.decode()
        tree, old = parsed(self.before + code + self.after), parsed(self.before + self.code + self.after)
        return code if tree is not None and (old is None or not same(tree, old)) else None

    def spelled(self, path: str) -> str:
        """How the statement can write what is called ``path`` outside the program, ``torch.where``.

        Where the program has no name for it, it is ``path`` itself: `needs` tells whether that can be read.
        """
        if self.scope.is_whole:
            return self.scope.spelled(path) or path
        owner, _, name = path.rpartition(".")
        return f"F.{name}" if owner == "torch.nn.functional" and self._shows_functional else path

    @cached_property
    def _shows_functional(self) -> bool:
        """Whether it calls a function of a module ``F``, and gives it more than a method takes."""
        calls = [node for node in self.nodes() if isinstance(node, ast.Call) and node.args]
        owners = [(each.func.value, each.args[0]) for each in calls if isinstance(each.func, ast.Attribute)]
        return any(dotted(owner) == "F" and path_of(owner) and not is_literal(first) for owner, first in owners)

    def needs(self, after: str, given: Sequence[str] = ()) -> tuple[str, ...] | None:
        """The imports without which a changed text does not find its names; None where it would find others.

        Args:
            after: The text that comes in the place of the statement's.
            given: Names that lines before it give.
        """
        changed, shown = fresh(self.before + after + self.after), [name.id for name in _names(self.tree)]
        if changed is None:
            return None
        resolve(changed, self.scope)
        names = list(_names(changed))
        new = [name for name in names if name.id not in (*shown, *given)]
        more_torch = [name.id for name in names].count("torch") > shown.count("torch")
        used = [*new, *(name for name in names if more_torch and name.id == "torch")]
        for name in used:
            is_open = name.meaning.kind is Kind.OPEN and (name.id == "torch" or name.id in vars(builtins))
            if not is_open and name.meaning.kind is not Kind.IMPORTED:
                return None
        if any(name.id == "torch" and path_of(name) != "torch" for name in used):
            return None
        missing = any(name.id == "torch" and name.meaning.kind is Kind.OPEN for name in used)
        return ("import torch",) if missing and "torch" not in shown else ()


def _names(tree: ast.AST) -> Iterator[KnownName]:
    known = (node for node in ast.walk(tree) if isinstance(node, KnownName))
    return (node for node in known if isinstance(node.ctx, ast.Load))


def statement(code: str, row: int | None = None, scope: NameScope | None = None) -> Statement | None:
    """A statement from its text; None where it is not a whole one.

    Args:
        code: The text, without the indentation of its first line.
        row: The line of it that is meant, from 0; None where all of it is.
        scope: Where it stands in its program; None where that is not at hand.
    """
    if len(code) > _LONGEST or not all(character.isprintable() or character in "\n\t" for character in code):
        return None
    for before, after in _FRAMES:
        tree = fresh(before + code + after)
        if tree is not None and not _is_deep(tree):
            around = scope if scope is not None else of_statement(tree)
            resolve(tree, around)
            return Statement(code, before, after, tree, row, around)
    return None


def _is_deep(tree: ast.Module) -> bool:
    """Whether parts lie deeper in each other than a person writes them: what reads them goes as deep."""
    level: list[ast.AST] = [tree]
    for _ in range(_DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return bool(level)


@lru_cache(maxsize=16)
def parsed(code: str) -> ast.Module | None:
    """The parse of a program, which nobody may change; None where it is none."""
    return fresh(code)


def fresh(code: str) -> ast.Module | None:
    """The parse of a program, another one each time; None where it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escape sequences in someone's strings
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def same(first: ast.AST, second: ast.AST) -> bool:
    """Whether two parts read the same, wherever they stand."""
    pairs: list[tuple[object, object]] = [(first, second)]
    for one, other in pairs:  # one part after another: a file may hold parts as deep in each other as its parser goes
        if isinstance(one, ast.AST) and isinstance(other, ast.AST):
            if one._fields != other._fields or not isinstance(one, (type(other), ast.Name)):
                return False
            pairs.extend((getattr(one, name, None), getattr(other, name, None)) for name in one._fields)
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            pairs.extend(zip(one, other, strict=True))
        elif type(one) is not type(other) or one != other:
            return False
    return True


def dotted(node: ast.AST) -> str:
    """``torch.nn.functional``; empty for what is no chain of names."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def is_literal(node: ast.expr) -> bool:
    """Whether a part spells a value: a number, a text, several of them."""
    kinds = (ast.Constant, ast.UnaryOp, ast.USub, ast.Tuple, ast.List, ast.Load)
    return all(isinstance(each, kinds) for each in ast.walk(node))


def is_plain(node: ast.expr) -> bool:
    """Whether a part may be written a second time: names, attributes, subscripts and what compares or negates them."""
    kinds = (
        *(ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Slice, ast.Tuple, ast.UnaryOp, ast.Compare),
        *(ast.BoolOp, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop),
    )
    return all(isinstance(each, kinds) for each in ast.walk(node))


def is_repeatable(node: ast.expr) -> bool:
    """Whether an expression may be computed again."""
    inside = list(ast.walk(node))
    calls = [each.func for each in inside if isinstance(each, ast.Call)]
    names = {each.attr if isinstance(each, ast.Attribute) else "" for each in calls}
    once = any(isinstance(each, (ast.NamedExpr, ast.Await, ast.Yield)) for each in inside)
    return not once and names <= _REPEATABLE


def can_repeat(condition: ast.expr) -> bool:
    """Whether a condition may be computed a second time."""
    calls = [node for node in ast.walk(condition) if isinstance(node, ast.Call)]
    names = [each.func.attr if isinstance(each.func, ast.Attribute) else dotted(each.func) for each in calls]
    return _PURE.issuperset(names) and not any(isinstance(node, ast.NamedExpr) for node in ast.walk(condition))
