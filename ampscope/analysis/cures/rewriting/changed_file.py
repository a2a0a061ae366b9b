"""A change of someone's program as a diff: of its file where that is at hand, else of the recorded line alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence

from ampscope.analysis.cures.rewriting.edit import Edit, diff_of, unified
from ampscope.analysis.cures.rewriting.names.scopes import Scope
from ampscope.analysis.cures.rewriting.source_file import HasPlace, SourceFile, statement_at

#: Writes a change into a statement, of whose lines the one that is meant is given, and where it stands in its program
#: if that is at hand; None where it has no place there.
Writer = Callable[[str, int | None, Scope | None], Edit | None]


def diff_at(place: HasPlace, write: Writer) -> str | None:
    """A change of one statement as a diff.

    Args:
        place: A line of the statement, as it was recorded.
        write: Makes the change.

    Returns:
        The diff; None where the change cannot be made there.
    """
    found = statement_at(place)
    if found is not None:
        edit = write(found.code, found.row, found.scope)
        return _of_file(found.source, place.file, found.first, found.last, edit) if edit is not None else None
    edit = write(place.code, None, None) if place.file.isprintable() and place.line > 0 else None
    return unified(edit, place.file, place.line) if edit is not None else None


def _of_file(source: SourceFile, file: str, first: int, last: int, edit: Edit) -> str | None:
    if any(re.search(rf"\b{each.split(' = ')[0]}\b", source.text) for each in edit.first):
        return None  # the program has a use of its own for the name
    indent, rows = source.indent(first), edit.after.split("\n")
    deeper = indent if first == last else ""
    after = [f"{indent}{row}" for row in edit.first]
    after += [f"{deeper if number else indent}{row}" for number, row in enumerate(rows)]
    return changed(source, file, [(first, last, after)], edit.imports)


def changed(
    source: SourceFile, file: str, changes: Sequence[tuple[int, int, Sequence[str]]], imports: Sequence[str] = ()
) -> str | None:
    """A file with other lines in the place of some, as a diff; None where it would be no program any more.

    Args:
        source: The file.
        file: Its path, as the trace has it.
        changes: Of each change the first and the last line, and what comes in their place; a last line before the
            first inserts there.
        imports: Statements that the file needs, if it has them not.
    """
    lines = list(source.lines)
    ends = lines[-1:] == [] or lines[-1].endswith(("\n", "\r"))
    if not ends:
        lines[-1] += source.end
    for first, last, after in sorted(changes, reverse=True):
        lines[first - 1 : last] = [f"{row}{source.end}" for row in after]
    missing = [each for each in imports if not _has(source, each)]
    at = _first_import(source)
    lines[at:at] = [f"{each}{source.end}" for each in missing]
    text = "".join(lines) if ends else "".join(lines).removesuffix(source.end)
    is_program = source._replace(lines=(text,)).tree() is not None
    return diff_of(source.text, text, file) or None if is_program else None


def _has(source: SourceFile, statement: str) -> bool:
    """Whether a file imports what ``import torch`` does."""
    name, tree = statement.removeprefix("import "), source.tree()
    imports = [node for node in tree.body if isinstance(node, ast.Import)] if tree is not None else []
    return any(each.asname is None and each.name.split(".")[0] == name for node in imports for each in node.names)


def _first_import(source: SourceFile) -> int:
    """After how many lines an import can stand: before the first one that is none of the future."""
    tree = source.tree()
    at = 0
    for node in tree.body if tree is not None else ():
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        at = node.end_lineno or at
    return at
