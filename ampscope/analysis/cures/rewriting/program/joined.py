"""Several changes of one file as one diff."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

from ampscope.analysis.cures.rewriting.applied import applied, file_of
from ampscope.analysis.cures.rewriting.edit import diff_of
from ampscope.analysis.cures.rewriting.source_file import SourceFile, path_below, read


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
