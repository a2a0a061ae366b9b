"""Names of someone's program are resolved where a line reads them: by imports, assignments and arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Block = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
ScopeNode = ast.Module | ast.ClassDef | Function | Comprehension
#: Annotations of what is a number of Python's.
_NUMBERS = ("int", "float")


class Binding(NamedTuple):
    """One place where a name is given."""

    line: int
    path: str = ""  #: of an import, what it names outside the program: ``torch.nn.functional``
    value: ast.expr | None = None  #: of a plain assignment or a default, what is given
    is_number: bool = False  #: whether it is a number whatever is given
    always: bool = False  #: whether the scope, where it runs at all, runs this too


def bound_in(scope: ScopeNode) -> dict[str, list[Binding]]:
    """The names that a scope gives itself, those of scopes inside it left out."""
    found: dict[str, list[Binding]] = {}
    told: set[ast.AST] = set()
    for node in own_nodes(scope):
        for name, target, binding in _given(node):
            found.setdefault(name, []).append(binding._replace(always=node in _block(scope)))
            told.update([target] if target is not None else [])
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and node not in told:
            found.setdefault(node.id, []).append(Binding(node.lineno))
    for name in _declared(scope, ast.Global):
        found.pop(name, None)
    if isinstance(scope, ast.Module):
        for name, line in _made_global(scope):
            found.setdefault(name, []).append(Binding(line))
    return found


def own_nodes(scope: ScopeNode) -> Iterator[ast.AST]:
    """Every part of a scope, outer ones first, without what lies in scopes inside it; their heads are parts."""
    front = list(_inside(scope))
    for node in front:
        yield node
        if isinstance(node, Comprehension):  # what := gives is the scope's that holds the comprehension
            front.extend(each for each in ast.walk(node) if isinstance(each, ast.NamedExpr))
        elif isinstance(node, ast.If) and _is_for_checkers(node.test):
            front.extend(node.orelse)
        elif not isinstance(node, ScopeNode):
            front.extend(ast.iter_child_nodes(node))


def _inside(scope: ScopeNode) -> Iterator[ast.AST]:
    if isinstance(scope, Function):
        yield scope.args
    if isinstance(scope, Comprehension):
        yield from scope.generators
    elif isinstance(scope, ast.Lambda):
        yield scope.body
    else:
        yield from scope.body


def _block(scope: ScopeNode) -> list[ast.stmt]:
    return scope.body if isinstance(scope, ast.Module | Block) else []


def _is_for_checkers(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _given(node: ast.AST) -> Iterator[tuple[str, ast.AST | None, Binding]]:
    """The names that a part gives, with the part that is the name where there is one."""
    line = getattr(node, "lineno", 0)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((name, None, Binding(line, path)) for name, path in _imported(node))
    elif isinstance(node, Block):
        yield node.name, None, Binding(line)
    elif isinstance(node, ast.arguments):
        yield from _arguments(node)
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        yield from _assigned(node, line)
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        function = node.iter.func if isinstance(node.iter, ast.Call) else None
        counts = isinstance(function, ast.Name) and function.id == "range"
        if counts and isinstance(node.target, ast.Name):
            yield node.target.id, node.target, Binding(node.target.lineno, is_number=True)
    elif isinstance(node, ast.Nonlocal):
        yield from ((name, None, Binding(line)) for name in node.names)
    elif isinstance(node, (ast.ExceptHandler, ast.pattern)):
        held = getattr(node, "name", None) or getattr(node, "rest", None)
        if isinstance(held, str):
            yield held, None, Binding(line)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for each in node.names:
        if isinstance(node, ast.ImportFrom):
            parts = ("." * (node.level - 1), node.module or "", each.name)
            yield each.asname or each.name, ".".join(parts if node.level else parts[1:])
        else:
            root = each.name.partition(".")[0]
            yield each.asname or root, each.name if each.asname else root


def _arguments(node: ast.arguments) -> Iterator[tuple[str, ast.AST | None, Binding]]:
    placed = [*node.posonlyargs, *node.args]
    defaults = [*[None] * (len(placed) - len(node.defaults)), *node.defaults, *node.kw_defaults]
    for each, default in zip([*placed, *node.kwonlyargs], defaults, strict=True):
        yield each.arg, None, Binding(each.lineno, value=default, is_number=_tells_number(each.annotation))
    for rest in filter(None, (node.vararg, node.kwarg)):
        yield rest.arg, None, Binding(rest.lineno)


def _assigned(
    node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr, line: int
) -> Iterator[tuple[str, ast.AST | None, Binding]]:
    is_number = isinstance(node, ast.AnnAssign) and _tells_number(node.annotation)
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Name):
            yield target.id, target, Binding(line, value=node.value, is_number=is_number)
        elif isinstance(target, (ast.Tuple, ast.List)) and _is_shape(node.value):
            named = (each for each in target.elts if isinstance(each, ast.Name))
            yield from ((each.id, each, Binding(line, is_number=True)) for each in named)


def _is_shape(value: ast.expr | None) -> bool:
    """Whether a value is the sizes of a tensor, or some of them."""
    inner = value.value if isinstance(value, ast.Subscript) else value
    if isinstance(inner, ast.Call):
        return isinstance(inner.func, ast.Attribute) and inner.func.attr == "size"
    return isinstance(inner, ast.Attribute) and inner.attr == "shape"


def _tells_number(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id in _NUMBERS


def _declared(scope: ScopeNode, kind: type[ast.Global]) -> set[str]:
    return {name for node in own_nodes(scope) if isinstance(node, kind) for name in node.names}


def _made_global(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields the names that functions declare ``global``, with their lines."""
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            yield from ((name, node.lineno) for name in node.names)


class Kind(Enum):
    """Says what is known of a name."""

    OPEN = auto()  #: the program's text does not give it
    IMPORTED = auto()
    NUMBER = auto()  #: one of Python's
    VALUE = auto()  #: something of the program's own
    MIXED = auto()  #: now the one, now the other


class Meaning(NamedTuple):
    """Holds what a name stands for."""

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
class NameScope:
    """A function, a class, or a program, where a line of it is read."""

    names: Mapping[str, Sequence[Binding]] = field(default_factory=dict)
    outer: NameScope | None = None
    is_class: bool = False
    line: int = 0  #: the line that is read, from 1
    is_whole: bool = False  #: whether all of the program is at hand

    def inside(self, node: ScopeNode) -> NameScope:
        """A scope that lies in this one."""
        return NameScope(bound_in(node), self, isinstance(node, ast.ClassDef), self.line, self.is_whole)

    def meaning(self, name: str, seen: frozenset[str] = frozenset()) -> Meaning:
        """Returns what a name stands for in the scope."""
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

    def _visible(self) -> Iterator[NameScope]:
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
        """Returns what a chain of names is called outside the program; empty where it was not imported."""
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
NOWHERE = NameScope()
#: Functions and methods that give a number of Python's.
NUMBER_FUNCTIONS = frozenset({"len", "int", "float", "round"})
NUMBER_METHODS = frozenset({"item", "numel", "nelement", "dim", "size", "stride", "get_scale"})


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_one(index: ast.expr) -> bool:
    return not isinstance(index, (ast.Slice, ast.Tuple))


def scope_at(tree: ast.Module, line: int) -> NameScope:
    """The scope in which a program reads the names of a line.

    Args:
        tree: The whole program.
        line: The number of the line at which the statement begins, from 1.
    """
    scope, node = NameScope(_given_in(tree), line=line, is_whole=True), _block_around(tree, line)
    while node is not None:
        scope = NameScope(_given_in(node), scope, isinstance(node, ast.ClassDef), line, is_whole=True)
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


#: What modules are usually called, where the program's own imports are not at hand.
_USUAL = {
    **dict.fromkeys(("torch", "th"), "torch"),
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "functional": "torch.nn.functional",
    "np": "numpy",
    "sp": "scipy",
    "jnp": "jax.numpy",
    "tf": "tensorflow",
    **{name: name for name in ("math", "cmath", "numpy", "scipy", "jax", "statistics", "random")},
}


class KnownName(ast.Name):
    """A name of which it is known what it stands for."""

    meaning: Meaning


def of_statement(tree: ast.Module) -> NameScope:
    """The scope of a statement of whose program nothing else is at hand."""
    return NameScope(bound_in(tree))


def resolve(tree: ast.Module, scope: NameScope) -> None:
    """Puts what the names of a statement stand for into its parse.

    Args:
        tree: The parse, which nobody else has.
        scope: Where the statement stands.
    """
    front: list[tuple[ast.AST, NameScope]] = [(tree, scope)]
    while front:
        node, around = front.pop()
        inner = around.inside(node) if isinstance(node, ScopeNode) and node is not tree else around
        first = node.generators[0] if isinstance(node, Comprehension) else None
        for name, held in ast.iter_fields(node):
            parts = held if isinstance(held, list) else [held]
            known = [_known(each, inner) if isinstance(each, ast.Name) else each for each in parts]
            setattr(node, name, known if isinstance(held, list) else known[0])
            front.extend((each, inner) for each in known if isinstance(each, ast.AST))
        if first is not None and isinstance(first.iter, ast.Name):  # read before the comprehension has its own names
            first.iter = _known(first.iter, around)


def _known(node: ast.Name, scope: NameScope) -> KnownName:
    found = ast.copy_location(KnownName(id=node.id, ctx=node.ctx), node)
    found.meaning = scope.meaning(node.id)
    return found


def meaning_of(node: ast.AST) -> Meaning:
    """Returns what a name stands for; an open meaning for anything else, and for a name of which nothing is known."""
    return node.meaning if isinstance(node, KnownName) else Meaning()


def root_of(node: ast.AST) -> ast.Name | None:
    """The first of a chain of names; None for what is none."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node if isinstance(node, ast.Name) else None


def path_of(node: ast.AST) -> str:
    """Returns what a chain of names is called outside the program: ``torch.nn.functional``; empty for its own names."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    meaning = meaning_of(node)
    usual = _USUAL.get(node.id, "") if isinstance(node, ast.Name) and meaning.kind is Kind.OPEN else ""
    root = meaning.path or usual
    return ".".join([root, *reversed(parts)]) if root else ""


def is_number(node: ast.expr) -> bool:
    """Whether a part is a number of Python's, as far as it shows: a constant, a length, what is made of them."""
    if isinstance(node, (ast.UnaryOp, ast.BinOp)):
        parts = (node.operand,) if isinstance(node, ast.UnaryOp) else (node.left, node.right)
        return all(map(is_number, parts))
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    if isinstance(node, ast.Call):
        return _gives_number(node.func)
    return isinstance(node, ast.Constant) or meaning_of(node).kind is Kind.NUMBER


def _gives_number(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in (*NUMBER_FUNCTIONS, "max", "min") and meaning_of(function).kind is Kind.OPEN
    is_method = isinstance(function, ast.Attribute) and function.attr in NUMBER_METHODS
    return path_of(function).startswith("math.") or is_method
