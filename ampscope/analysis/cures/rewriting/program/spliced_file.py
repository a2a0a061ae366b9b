"""A file of someone's program with other text at some of its places."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.cures.rewriting.changed_file import changed
from ampscope.analysis.cures.rewriting.source_file import SourceFile
from ampscope.analysis.cures.rewriting.statement import Splice, Statement


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
