"""Scopes of a program, and what a name stands for in one of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from ampscope.analysis.cures.rewriting.names.bindings import Binding, Block, ScopeNode, bound_in, own_nodes


class Kind(Enum):
    """What is known of a name."""

    OPEN = auto()  #: the program's text does not give it
    IMPORTED = auto()
    NUMBER = auto()  #: one of Python's
    VALUE = auto()  #: something of the program's own
    MIXED = auto()  #: now the one, now the other


class Meaning(NamedTuple):
    """What a name stands for."""

    kind: Kind = Kind.OPEN
    path: str = ""  #: of what is imported, its name outside the program: ``torch.nn.functional``


class Reached(NamedTuple):
    """A name as a line can write it."""

    text: str
    imports: tuple[str, ...] = ()  #: statements that the file needs for it


#: Names that are followed one to the next, and parts of what is given to one.
_LONGEST, _LARGEST = 20, 100
_MIXED = Meaning(Kind.MIXED)


@dataclass(frozen=True, eq=False)
class Scope:
    """A function, a class, or a program, where a line of it is read."""

    names: Mapping[str, Sequence[Binding]] = field(default_factory=dict)
    outer: Scope | None = None
    is_class: bool = False
    line: int = 0  #: the line that is read, from 1
    is_whole: bool = False  #: whether all of the program is at hand

    def inside(self, node: ScopeNode) -> Scope:
        """A scope that lies in this one."""
        return Scope(bound_in(node), self, isinstance(node, ast.ClassDef), self.line, self.is_whole)

    def meaning(self, name: str, seen: frozenset[str] = frozenset()) -> Meaning:
        """What a name stands for."""
        holder = next((each for each in self._visible() if name in each.names), None)
        if holder is None:
            return Meaning()
        if name in seen or len(seen) > _LONGEST:
            return _MIXED
        given = [each for each in holder.names[name] if not _is_none(each.value)] or holder.names[name]
        found = {holder._of_binding(each, seen | {name}) for each in given}
        return found.pop() if len(found) == 1 else _MIXED

    def spelled(self, path: str) -> str:
        """How the line can write what is called ``path`` outside the program; empty where it has no name for it."""
        ways, hidden = [], set[str]()
        for scope in self._visible():
            of_function = scope is self or scope.outer is not None  # what a program imports, its functions find
            for name, given in scope.names.items():
                is_there = all(each.always for each in given) and not (of_function and given[0].line >= self.line)
                meaning = self.meaning(name) if is_there and name not in hidden else _MIXED
                if meaning.kind is Kind.IMPORTED and f"{path}.".startswith(f"{meaning.path}."):
                    ways.append((-len(meaning.path), name + path[len(meaning.path) :]))
            hidden.update(scope.names)
        return min(ways)[1] if ways else ""

    def reached(self, path: str) -> Reached | None:
        """How the line can write what is called ``path``, with an import if it needs one; None where it cannot."""
        text, root = self.spelled(path), path.partition(".")[0]
        if text:
            return Reached(text)
        return Reached(path, (f"import {root}",)) if self.meaning(root).kind is Kind.OPEN else None

    def _visible(self) -> Iterator[Scope]:
        yield self
        outer = self.outer
        while outer is not None:
            if not outer.is_class:
                yield outer
            outer = outer.outer

    def _of_binding(self, given: Binding, seen: frozenset[str]) -> Meaning:
        if given.path:
            return Meaning(Kind.IMPORTED, given.path)
        is_short = given.value is not None and len(list(islice(ast.walk(given.value), _LARGEST))) < _LARGEST
        if given.is_number or (given.value is not None and is_short and self._is_number(given.value, seen)):
            return Meaning(Kind.NUMBER)
        path = self.path(given.value, seen) if given.value is not None else ""
        return Meaning(Kind.IMPORTED, path) if path else Meaning(Kind.VALUE)

    def path(self, value: ast.expr, seen: frozenset[str] = frozenset()) -> str:
        """What a chain of names is called outside the program; empty for what was not imported."""
        parts = []
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        root = self.meaning(value.id, seen) if isinstance(value, ast.Name) else _MIXED
        return ".".join([root.path, *reversed(parts)]) if root.kind is Kind.IMPORTED else ""

    def _is_number(self, value: ast.expr, seen: frozenset[str]) -> bool:
        """Whether a value is a number of Python's by its text: a literal, a length, what is computed of such."""
        if isinstance(value, ast.Constant):
            return isinstance(value.value, (int, float)) and not isinstance(value.value, bool)
        if isinstance(value, (ast.UnaryOp, ast.BinOp)):
            parts = (value.operand,) if isinstance(value, ast.UnaryOp) else (value.left, value.right)
            return all(self._is_number(each, seen) for each in parts)
        if isinstance(value, ast.Subscript):
            return isinstance(value.value, ast.Attribute) and value.value.attr == "shape" and _is_one(value.slice)
        if isinstance(value, ast.Call):
            return self._gives_number(value.func, seen)
        if isinstance(value, ast.Attribute):  # torch.finfo(x.dtype).eps
            call = value.value
            return isinstance(call, ast.Call) and self.path(call.func, seen) in ("torch.finfo", "torch.iinfo")
        return isinstance(value, ast.Name) and self.meaning(value.id, seen).kind is Kind.NUMBER

    def _gives_number(self, function: ast.expr, seen: frozenset[str]) -> bool:
        if isinstance(function, ast.Name) and function.id in NUMBER_FUNCTIONS:
            return self.meaning(function.id, seen).kind is Kind.OPEN
        if self.path(function, seen).startswith("math."):
            return True
        return isinstance(function, ast.Attribute) and function.attr in NUMBER_METHODS


#: Where nothing is known of any name.
NOWHERE = Scope()
#: Functions and methods that give a number of Python's.
NUMBER_FUNCTIONS = frozenset({"len", "int", "float", "round"})
NUMBER_METHODS = frozenset({"item", "numel", "nelement", "dim", "size", "stride", "get_scale"})


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_one(index: ast.expr) -> bool:
    return not isinstance(index, (ast.Slice, ast.Tuple))


def scope_at(tree: ast.Module, line: int) -> Scope:
    """The scope in which a program reads the names of a line.

    Args:
        tree: The whole program.
        line: The number of the line at which the statement begins, from 1.
    """
    scope, node = Scope(_given_in(tree), line=line, is_whole=True), _block_around(tree, line)
    while node is not None:
        scope = Scope(_given_in(node), scope, isinstance(node, ast.ClassDef), line, is_whole=True)
        node = _block_around(node, line)
    return scope


@lru_cache(maxsize=256)
def _given_in(node: ScopeNode) -> dict[str, list[Binding]]:
    return bound_in(node)


@lru_cache(maxsize=256)
def _blocks_in(node: ScopeNode) -> list[Block]:
    return [each for each in own_nodes(node) if isinstance(each, Block)]


def _block_around(scope: ScopeNode, line: int) -> Block | None:
    """The outermost function or class in a scope whose body holds a line."""
    found = (each for each in _blocks_in(scope) if each.body[0].lineno <= line <= (each.end_lineno or 0))
    return next(found, None)
