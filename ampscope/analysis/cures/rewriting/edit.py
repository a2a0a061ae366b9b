"""A change of someone's program: what stands there, what comes in its place, and both as a unified diff."""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from ampscope.analysis.cures.rewriting.source_file import name_in_diff
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
