"""An edit of someone's file is a unified diff: made of changed lines, applied, joined with others."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

from ampscope.cures.rewriting.names import NameScope
from ampscope.cures.rewriting.source_file import (
    HasPlace,
    SourceFile,
    name_in_diff,
    path_below,
    read,
    statement_at,
)
from ampscope.trace.redaction import redacted

_LINES = re.compile(r"[^\n]*\n|[^\n]+")


class Edit(NamedTuple):
    """A statement and what comes in its place; both without the indentation of their first line."""

    before: str
    after: str
    imports: tuple[str, ...] = ()  #: statements without which ``after`` may not find its names
    first: tuple[str, ...] = ()  #: lines that come before ``after``, at its indentation


def unified(edit: Edit, file: str, line: int, *, indent: str = "") -> str:
    """A change as a unified diff without context.

    Args:
        edit: The change.
        file: The path of the file, as the trace has it.
        line: The number of the line at which the statement begins, from 1.
        indent: What the line begins with, where that is known.
    """
    before, after = edit.before.split("\n"), edit.after.split("\n")
    name = name_in_diff(file)
    head = [f"--- a/{name}", f"+++ b/{name}", f"@@ -{_range(line, before)} +{_range(line, [*edit.first, *after])} @@"]
    # what was added in front of the first line starts at its indentation, and so does all that follows in a new block
    deeper = indent if len(before) == 1 else ""
    was = [f"-{indent if number == 0 else ''}{text}" for number, text in enumerate(before)]
    now = [f"+{indent}{text}" for text in edit.first]
    now += [f"+{indent if number == 0 else deeper}{text}" for number, text in enumerate(after)]
    return "\n".join([*head, *was, *now, ""])


def _range(line: int, lines: list[str]) -> str:
    return f"{line}" if len(lines) == 1 else f"{line},{len(lines)}"


def diff_of(before: str, after: str, file: str) -> str:
    """A file and what becomes of it as a unified diff; empty where nothing does, or a credential would show.

    Args:
        before: The whole text.
        after: The same, changed.
        file: The path of the file, as the trace has it.
    """
    was, now = (_LINES.findall(text) for text in (before, after))
    name = name_in_diff(file)
    lines = difflib.unified_diff(was, now, f"a/{name}", f"b/{name}")
    diff = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return diff if redacted(diff) == diff else ""


_FILE = re.compile(r"--- a/(?P<file>.+)\n\+\+\+ b/(?P=file)\n")
_ROWS = re.compile(r"[^\n]*\n|[^\n]+")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


class Hunk(NamedTuple):
    """A part of a diff."""

    first: int  #: the number of its first line in the old file, from 1; of an empty part the one before it
    rows: list[str]  #: with the sign that they begin with, and their ends


def file_of(diff: str) -> str:
    """The file that a diff changes, as it names it; empty for what is no diff of one file."""
    match = _FILE.match(diff)
    return match["file"] if match else ""


def first_line(diff: str) -> int:
    """The number of the first line that a diff changes."""
    for hunk in _hunks(diff)[:1]:
        return hunk.first + next((at for at, row in enumerate(hunk.rows) if row[0] != " "), 0)
    return 0


def applied(diff: str, source: SourceFile) -> str | None:
    """A file with a diff applied; None where a line of it reads otherwise than the diff says."""
    lines, hunks = list(source.lines), _hunks(diff)
    for hunk in reversed(hunks):
        old = [row[1:] for row in hunk.rows if row[0] in " -"]
        new = [row[1:] for row in hunk.rows if row[0] in " +"]
        start = hunk.first - 1 if old else hunk.first
        if start < 0 or not old or lines[start : start + len(old)] != old:
            return None
        lines[start : start + len(old)] = new
    return "".join(lines) if hunks else None


def _hunks(diff: str) -> list[Hunk]:
    found: list[Hunk] = []
    head = _FILE.match(diff)
    for row in _ROWS.findall(diff, head.end()) if head else ():
        match = _HUNK.match(row)
        if match:
            found.append(Hunk(int(match[1]), []))
        elif row.startswith("\\") and found:
            found[-1].rows[-1] = found[-1].rows[-1].removesuffix("\n")
        elif found:
            found[-1].rows.append(row)
    return found


#: Writes a change into a statement, of whose lines the one that is meant is given, and where it stands in its program
#: if that is at hand; None where it has no place there.
Writer = Callable[[str, int | None, NameScope | None], Edit | None]


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


class _Change(NamedTuple):
    """Lines in the place of others, by numbers from 0."""

    first: int
    end: int
    rows: tuple[str, ...]


def joined(diffs: Sequence[str | None]) -> str | None:
    """Changes of one file as one diff; None where one is missing, where they touch, and without the file."""
    made = [diff for diff in diffs if diff]
    if len(made) <= 1:
        return made[0] if made and len(made) == len(diffs) else None
    path = path_below(file_of(made[0]))
    source = read(path) if path is not None else None
    if source is None or len(made) != len(diffs) or len({file_of(diff) for diff in made}) != 1:
        return None
    texts = [applied(diff, source) for diff in made]
    changes = sorted({change for text in texts if text is not None for change in _changes(source, text)})
    apart = all(one.end <= other.first and one.first < other.first for one, other in pairwise(changes))
    if None in texts or not apart:
        return None
    lines = list(source.lines)
    for change in reversed(changes):
        lines[change.first : change.end] = change.rows
    after = "".join(lines)
    is_program = source.of_text(after).tree() is not None
    return diff_of(source.text, after, file_of(made[0])) or None if is_program else None


def _changes(source: SourceFile, text: str) -> Iterator[_Change]:
    after = source.of_text(text).lines
    for kind, first, end, start, stop in SequenceMatcher(None, source.lines, after, autojunk=False).get_opcodes():
        if kind != "equal":
            yield _Change(first, end, after[start:stop])
