"""Where a line of the user's program stands, in few words."""

from __future__ import annotations

from pathlib import PurePosixPath

from ampscope.analysis.results import SourceLine
from ampscope.report.safe_text import short

#: Characters of a file's name.
_LONGEST = 40


def place(source: SourceLine | None) -> str:
    """``train.py:42``, with the folder left out; empty where no line is known."""
    return f"{short(_file_name(source.file), _LONGEST)}:{source.line}" if source else ""


def _file_name(path: str) -> str:
    return PurePosixPath(path.replace("\\", "/")).name or path
