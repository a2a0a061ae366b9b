"""A model whose weights a program makes in half precision, made in float32: autocast chooses half op by op."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampscope.analysis.cures.rewriting import kept_modules
from ampscope.analysis.cures.rewriting.changed_file import diff_at
from ampscope.analysis.cures.rewriting.edit import Edit
from ampscope.analysis.cures.rewriting.forms.conversions import converted, with_dtype
from ampscope.analysis.cures.rewriting.names.scopes import Scope
from ampscope.analysis.cures.rewriting.program.joined import joined
from ampscope.analysis.cures.rewriting.program.own_names import function_around, own_nodes
from ampscope.analysis.cures.rewriting.source_file import HasPlace, source_file
from ampscope.analysis.cures.rewriting.statement import dotted
from ampscope.analysis.results import CodeLine


def in_float32(watched_at: HasPlace) -> str | None:
    """The one model that ``watch`` is given, made in float32, as a diff of the file.

    Every statement that gives it its name, or calls a method of it, and names a half dtype gets float32; where none
    does, the model is converted before it is watched.

    Args:
        watched_at: The line that calls ``watch``, as it was recorded.

    Returns:
        The diff; None where the file is not at hand, and where it is not clear what the model is called there.
    """
    source, names = source_file(watched_at), kept_modules.watched(watched_at)
    tree = source.tree() if source is not None else None
    if source is None or tree is None or len(names) != 1:
        return None
    lines = sorted(set(_makes(tree, names[0], watched_at.line)))
    places = [CodeLine(watched_at.file, line, source.code(line)) for line in lines]
    diffs = [diff for place in places if (diff := diff_at(place, _wide)) is not None]
    return joined(diffs) if diffs else kept_modules.widened(watched_at, 0, "")


def _wide(code: str, _: int | None, scope: Scope | None) -> Edit | None:
    return converted(code, "float32", scope) or with_dtype(code, scope)


def _makes(tree: ast.Module, name: str, line: int) -> Iterator[int]:
    """The first lines of the statements that give a model its name, or call a method of it for its own sake."""
    inside = function_around(tree, line)
    for scope in dict.fromkeys([inside, tree]):
        for node in own_nodes(scope):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if name in map(dotted, targets):
                    yield node.lineno
            elif isinstance(node, ast.Expr) and name == dotted(_root(node.value)):
                yield node.lineno


def _root(node: ast.expr) -> ast.expr:
    """What the first of a chain of methods is called of."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return node
