"""The file in which a line of the user's program stands, where it is at hand and still reads as it was recorded.

A trace is someone else's: what it calls a file is opened only where it is Python source below one folder, by no link,
and is used only if the recorded line stands where it stood.
"""

from __future__ import annotations

import ast
import io
import os
import re
import stat
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePath
from typing import NamedTuple, Protocol

from ampscope.cures.rewriting.names import NameScope, scope_at
from ampscope.cures.rewriting.statement import parsed

#: Folders of packages that were installed, and what leads out of a folder.
_NOT_ONES_OWN = frozenset({"..", "site-packages", "dist-packages"})
#: Bytes of a file that is read.
_LARGEST = 4 << 20
_LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_root: ContextVar[Path | None] = ContextVar("_root", default=None)


class HasPlace(Protocol):
    """A line of a program, as a trace has it."""

    @property
    def file(self) -> str:
        """The path of its file."""

    @property
    def line(self) -> int:
        """Its number, from 1."""

    @property
    def code(self) -> str:
        """Its text, stripped."""


class Row(NamedTuple):
    """A line of a program, as its file has it."""

    file: str
    line: int
    code: str


class SourceFile(NamedTuple):
    """A file of someone's program."""

    path: Path
    encoding: str
    lines: tuple[str, ...]  #: with their ends

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.lines)

    def of_text(self, text: str) -> SourceFile:
        """The same file with another text."""
        return self._replace(lines=tuple(_LINES.findall(text)))

    def code(self, number: int) -> str:
        """A line without indentation and end, by its number from 1; empty where there is none."""
        return self.lines[number - 1].strip() if 1 <= number <= len(self.lines) else ""

    def indent(self, number: int) -> str:
        """Returns the white space that a line begins with."""
        line = self.lines[number - 1]
        return line[: len(line) - len(line.lstrip())]

    @property
    def end(self) -> str:
        """How its lines end."""
        return next((end for line in self.lines[:1] for end in ("\r\n", "\r") if line.endswith(end)), "\n")

    def tree(self) -> ast.Module | None:
        """Its parse; None where it is no Python."""
        return parsed(self.text)


@contextmanager
def files_below(root: Path) -> Iterator[None]:
    """Looks for files below ``root`` rather than below the working directory."""
    token = _root.set(root)
    try:
        yield
    finally:
        _root.reset(token)


def source_file(place: HasPlace) -> SourceFile | None:
    """The file of a recorded line; None where it is not at hand, or reads otherwise there."""
    path = path_below(place.file)
    found = read(path) if path is not None else None
    return found if found is not None and place.code and found.code(place.line) == place.code.strip() else None


def read(path: Path) -> SourceFile | None:
    """A file as it stands; None where it is no source that can be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except (OSError, SyntaxError, UnicodeDecodeError, LookupError):
        return None
    is_exact = len(content) <= _LARGEST and _encoded(text, encoding) == content  # what is written back is the same
    return SourceFile(path, encoding, tuple(_LINES.findall(text))) if is_exact else None


def _encoded(text: str, encoding: str) -> bytes | None:
    try:
        return text.encode(encoding)
    except (UnicodeError, LookupError):
        return None


def path_below(name: str) -> Path | None:
    """Returns the path of a file of a trace; None for what is no plain file of Python source below the root."""
    pure = PurePath(name)
    if not name.isprintable() or pure.suffix != ".py" or _NOT_ONES_OWN.intersection(pure.parts):
        return None
    try:
        root = (_root.get() or Path.cwd()).resolve(strict=True)
        path = root / pure
        kind = os.lstat(path).st_mode
        is_below = path.is_relative_to(root) and path.resolve(strict=True) == path
    except (OSError, ValueError, RuntimeError):
        return None
    return path if is_below and stat.S_ISREG(kind) else None


def name_in_diff(name: str) -> str:
    """How a diff names a file of a trace: as seen from the root, or from that of the file system where it is elsewhere.

    ``git apply`` and ``patch -p1`` find it from there; what follows ``a/`` as an absolute path they refuse.
    """
    pure = PurePath(name)
    if not pure.is_absolute():
        return name
    root = (_root.get() or Path.cwd()).resolve()
    return pure.relative_to(root if pure.is_relative_to(root) else pure.anchor).as_posix()


class FoundStatement(NamedTuple):
    """A statement in its file."""

    source: SourceFile
    first: int  #: the number of its first line
    last: int
    row: int  #: of the recorded line among them, from 0
    code: str  #: its text, without the indentation of its first line and without the last line's end
    scope: NameScope  #: where it reads its names


def statement_at(place: HasPlace) -> FoundStatement | None:
    """The statement that a recorded line is a part of, or the head of the block; None as in `source_file`."""
    source = source_file(place)
    tree = source.tree() if source is not None else None
    if source is None or tree is None:
        return None
    first, last = _extent(tree, place.line)
    text = "".join(source.lines[first - 1 : last]).strip()
    return FoundStatement(source, first, last, place.line - first, re.sub(r"\r\n?", "\n", text), scope_at(tree, first))


def _extent(tree: ast.Module, line: int) -> tuple[int, int]:
    """The first and the last line of the innermost statement on a line; of a block its head."""
    first, last = line, line
    for node in ast.walk(tree):  # outer ones come before inner ones
        if not isinstance(node, (ast.stmt, ast.ExceptHandler)):
            continue
        start, end = _own_lines(node)
        if start <= line <= end:
            first, last = start, end
    return first, last


def _own_lines(node: ast.stmt | ast.ExceptHandler) -> tuple[int, int]:
    body = getattr(node, "body", ())
    return node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
