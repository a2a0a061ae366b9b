"""Where a scope of a program gives its names: imports, assignments, arguments, loops, functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    """What functions give to names of the program."""
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            yield from ((name, node.lineno) for name in node.names)
