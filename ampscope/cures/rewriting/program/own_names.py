"""A program's own names stand for what it imported or made, and changed lines are spliced into its file by them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ampscope.cures.rewriting.edit import changed
from ampscope.cures.rewriting.names import scope_at
from ampscope.cures.rewriting.source_file import SourceFile
from ampscope.cures.rewriting.statement import Splice, Statement, dotted

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module


def imported_name(tree: ast.Module, node: ast.expr) -> str:
    """Returns what a chain of names is called outside the program: ``torch.autocast``; empty if it was not imported."""
    return scope_at(tree, node.lineno).path(node)


def function_around(tree: ast.Module, line: int) -> Function:
    """The innermost function whose body holds a line; the program where none does."""
    found: Function = tree
    for node in ast.walk(tree):  # outer ones come before inner ones
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if node.body[0].lineno <= line <= (node.end_lineno or 0):
            found = node
    return found


def own_nodes(scope: Function) -> Iterator[ast.AST]:
    """Every part of a function, without those of the functions and classes inside it."""
    front: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while front:
        node = front.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            front.extend(ast.iter_child_nodes(node))


def assigned_once(tree: ast.Module, name: str, line: int) -> ast.expr | None:
    """Returns the value of a name on a line, where its function, or else the program, assigns it just once."""
    scopes: list[Function] = [function_around(tree, line), tree]
    for scope in scopes:
        stored = [node for node in own_nodes(scope) if isinstance(node, ast.Name) and node.id == name]
        stored = [node for node in stored if not isinstance(node.ctx, ast.Load)]
        if not stored and not _is_argument(scope, name):
            continue
        simple = [node for node in own_nodes(scope) if isinstance(node, (ast.Assign, ast.AnnAssign))]
        values = [node.value for node in simple if stored and stored[0] in _targets(node)]
        return values[0] if len(stored) == 1 and values and not _is_argument(scope, name) else None
    return None


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _is_argument(scope: Function, name: str) -> bool:
    given = scope.args if not isinstance(scope, ast.Module) else None
    return given is not None and any(isinstance(each, ast.arg) and each.arg == name for each in ast.walk(given))


def given_once(tree: ast.Module, node: ast.expr, line: int) -> ast.expr | None:
    """Returns the value of a name, or of an attribute of ``self``, on a line, where one statement alone assigns it."""
    if isinstance(node, ast.Name):
        return assigned_once(tree, node.id, line)
    path = dotted(node)
    if not path.startswith("self."):
        return None
    inside = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
    inside = [each for each in inside if each.lineno <= line <= (each.end_lineno or 0)]
    parts = list(ast.walk(inside[-1])) if inside else []
    stored = [each for each in parts if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)]
    stored = [each for each in stored if dotted(each) == path]
    assigned = [each for each in parts if isinstance(each, (ast.Assign, ast.AnnAssign))]
    values = [each.value for each in assigned if stored and stored[0] in _targets(each)]
    return values[0] if len(stored) == 1 and values else None


def whole(source: SourceFile) -> Statement | None:
    """A file as one statement, whose parts are found in its own parse; None where its lines end in several ways."""
    tree, ends = source.tree(), {source.text.count(end) for end in ("\r", "\n")}
    is_plain = source.end == "\n" and "\r" not in source.text
    is_windows = source.end == "\r\n" and len(ends) == 1 and source.text.count("\r\n") in ends
    return Statement(source.text, "", "", tree) if tree is not None and (is_plain or is_windows) else None


def spliced(source: SourceFile, file: str, splices: Sequence[Splice], imports: Sequence[str] = ()) -> str | None:
    """The file with them as a diff; None where it would be no program any more, or the same.

    Args:
        source: The file.
        file: Its path, as the trace has it.
        splices: Text in the place of parts.
        imports: Statements that it needs, if it has them not.
    """
    program = whole(source)
    after = program.changed(splices) if program is not None and splices else None
    if after is None:
        return None
    rows = after.split(source.end)
    return changed(source, file, [(1, len(source.lines), rows[:-1] if rows[-1] == "" else rows)], imports)
