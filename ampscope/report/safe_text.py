"""Text out of a trace is made safe to show, and a place in few words: a terminal obeys what a name may contain."""

from __future__ import annotations

import unicodedata
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ampscope.analysis.results import SourceLine

#: Control, format, surrogate and private characters: they move the cursor, reorder text or cannot be encoded.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co"})
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
#: Characters of a file's name.
_LONGEST = 40


def visible(text: str) -> str:
    """``text`` on one line, control characters written as escapes."""
    return "".join(_visible(character) for character in text)


def visible_lines(text: str) -> list[str]:
    """The lines of ``text``, each of them `visible`; indentation stays."""
    return [visible(line) for line in text.expandtabs(4).splitlines()]


def short(text: str, limit: int) -> str:
    """``text`` on one line, its middle left out where it is longer than ``limit``."""
    line = visible(text)
    if len(line) <= limit:
        return line
    head = (limit - 1) * 2 // 3
    return line[:head] + ELLIPSIS + line[len(line) - (limit - 1 - head) :]


def _visible(character: str) -> str:
    if character in "\n\r\t":
        return " "
    if unicodedata.category(character) not in _UNSAFE:
        return character
    return character.encode("unicode_escape").decode("ascii")


def place(source: SourceLine | None) -> str:
    """``train.py:42``, with the folder left out; empty where no line is known."""
    return f"{short(_file_name(source.file), _LONGEST)}:{source.line}" if source else ""


def _file_name(path: str) -> str:
    return PurePosixPath(path.replace("\\", "/")).name or path
