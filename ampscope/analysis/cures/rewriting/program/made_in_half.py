"""A tensor that a program keeps, made in float32 where it is made; the line that writes it is known."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampscope.analysis.cures.rewriting.changed_file import diff_at
from ampscope.analysis.cures.rewriting.forms.conversions import converted, with_dtype
from ampscope.analysis.cures.rewriting.program.own_names import function_around
from ampscope.analysis.cures.rewriting.source_file import HasPlace, SourceFile, source_file
from ampscope.analysis.cures.rewriting.statement import dotted
from ampscope.analysis.results import CodeLine


def in_float32(written_at: HasPlace) -> str | None:
    """The tensor that a line writes, made in float32 where the program makes it, as a diff of the file.

    Args:
        written_at: The line that writes it: an assignment, or a method that works in place.

    Returns:
        The diff; None where it is not clear what is written, or where and in which dtype that is made.
    """
    source = source_file(written_at)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    scope, line = _scope(tree, written_at.line), written_at.line
    statements = [node for node in ast.walk(scope) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    here = [node for node in statements if node.lineno <= line <= (node.end_lineno or 0)]
    written = {_held_in(scope, dotted(each), line): each for node in here for each in _written(node)}
    made = [
        node
        for node in statements
        if node not in here and isinstance(node, ast.Assign) and len(node.targets) == 1
        if len(written) == 1 and dotted(node.targets[0]) in written and dotted(node.targets[0])
    ]
    if len(made) != 1:
        return None
    return _made_wide(source, written_at.file, made[0])


def _scope(tree: ast.Module, line: int) -> ast.AST:
    """The class around a line, whose methods share what ``self`` holds; else the function, or the program."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    around = [node for node in around if node.lineno <= line <= (node.end_lineno or 0)]
    return around[-1] if around else function_around(tree, line)


def _held_in(scope: ast.AST, name: str, line: int) -> str:
    """The list that a loop around a line takes a name's values from, alone or in a ``zip``; else the name itself."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.For) or not node.body[0].lineno <= line <= (node.end_lineno or 0):
            continue
        if dotted(node.target) == name and dotted(node.iter):
            return dotted(node.iter)
        together = isinstance(node.iter, ast.Call) and dotted(node.iter.func) == "zip" and not node.iter.keywords
        if together and isinstance(node.iter, ast.Call) and isinstance(node.target, ast.Tuple):
            for each, source in zip(node.target.elts, node.iter.args, strict=False):
                if dotted(each) == name and dotted(source):
                    return dotted(source)
    return name


def _written(node: ast.stmt) -> Iterator[ast.expr]:
    """What a statement writes, without the subscripts of what is a part of it."""
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        found = node.targets if isinstance(node, ast.Assign) else [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        found = [node.value.func.value] if node.value.func.attr.endswith("_") else []
    else:
        found = []
    for each in found:
        inner = each
        while isinstance(inner, ast.Subscript) or _is_in_place(inner):
            inner = inner.value if isinstance(inner, ast.Subscript) else inner.func.value  # type: ignore[attr-defined]
        yield inner


def _is_in_place(node: ast.expr) -> bool:
    """Whether a part is what a method that works in place returned: ``x.mul_(0.9)`` of ``x.mul_(0.9).add_(y)``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_")


def _made_wide(source: SourceFile, file: str, made: ast.Assign) -> str | None:
    """The statement that makes a tensor with float32 for the dtype that it names."""
    place = CodeLine(file, made.lineno, source.code(made.lineno))
    return diff_at(place, lambda code, _, scope: converted(code, "float32", scope) or with_dtype(code, scope))
