"""Finds the line of the user's program that led to the code running now."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from enum import Enum, auto
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

import ampscope.capture
import ampscope.cures
from ampscope.trace.evidence import ProgramLine
from ampscope.trace.redaction import redacted

_TORCH = str(Path(torch.__file__).parent) + os.sep
#: What of AMPscope runs inside the training process, below calls of the user's.
_CAPTURE = tuple(str(Path(room.__path__[0])) + os.sep for room in (ampscope.capture, ampscope.cures))
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = sysconfig.get_paths()["purelib"] + os.sep
#: Packages and modules that run a training loop around models and losses which others wrote.
_LOOP_RUNNERS = frozenset(
    {
        "accelerate",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "pytorch_lightning",
        "transformers.trainer",
        "transformers.trainer_seq2seq",
    }
)


#: Lines of a call that are read for the name of what a line of it gives.
_LINES_ABOVE = 4


class Place(NamedTuple):
    """A line of a program, cheap to take and to compare."""

    code: CodeType | None
    line: int

    @property
    def file(self) -> str:
        """Path of the file as it goes into a trace (see `shown_path`), empty when unknown."""
        return shown_path(self.code.co_filename) if self.code else ""

    @property
    def function(self) -> str:
        """Qualified name of the function, empty when unknown."""
        return self.code.co_qualname if self.code else ""

    @property
    def text(self) -> str:
        """The line itself, stripped, without credentials: of what begins further up, these lines may tell so."""
        lines = linecache.getlines(self.code.co_filename)[: self.line] if self.code else []
        if not lines or len(lines) < self.line or not lines[-1].strip():
            return ""
        return redacted("".join(lines[-_LINES_ABOVE:])).rstrip().rpartition("\n")[2].strip()


def program_line(place: Place) -> ProgramLine:
    """A place for the evidence of an incident."""
    return ProgramLine(file=place.file, line=place.line, function=place.function, code=place.text)


NOWHERE = Place(None, 0)


class _Home(Enum):
    """The owner of the code that a frame runs."""

    INNER = auto()  #: torch's, AMPscope's or the standard library's
    FRAMEWORK = auto()  #: of a framework that runs the loop
    USER = auto()


_MOST_HOMES = 20_000
_places: dict[tuple[int, int], Place] = {}  # the same lines are asked for at every step
_homes: dict[int, tuple[CodeType, _Home]] = {}  # by ``id``: a code object's own hash reads all of it


@cache
def shown_path(filename: str) -> str:
    """A path without what is private to a machine: relative to the working directory or to the installed packages.

    Files elsewhere keep their absolute path.
    """
    path = Path(filename).absolute() if not filename.startswith("<") else None
    homes = (Path.cwd(), Path(_SITE), Path(_STDLIB))
    home = next((home for home in homes if path is not None and path.is_relative_to(home)), None)
    return str(path.relative_to(home) if path is not None and home is not None else path or filename)


def is_capture(filename: str) -> bool:
    """Whether a file is AMPscope's own, of the part inside the training process."""
    return filename.startswith(_CAPTURE)


@cache
def is_inner(filename: str) -> bool:
    """Whether a file belongs to torch, to AMPscope's capture or to the standard library."""
    if filename.startswith((_TORCH, *_CAPTURE, "<frozen")):
        return True
    return filename.startswith(_STDLIB) and not filename.startswith(_SITE)


@cache
def _runs_loop(module: str) -> bool:
    """Whether a module, by name, is part of a framework that runs the loop."""
    parts = module.split(".")
    return not _LOOP_RUNNERS.isdisjoint(".".join(parts[:end]) for end in range(1, len(parts) + 1))


def user_place(*stops: CodeType) -> Place | None:
    """The innermost frame outside torch, AMPscope and the standard library.

    A framework that runs the loop (Lightning, Accelerate, the Trainer of transformers) is passed over for whoever
    called it, unless nobody else did. The models of transformers are code like the user's own.

    Args:
        stops: Code objects at which the search ends (the replay's own call of the user's code).

    Returns:
        The place, or None when the search ended without one.
    """
    return place_of(sys._getframe(1), *stops)


def place_of(frame: FrameType | None, *stops: CodeType) -> Place | None:
    """Returns the user's line from a frame outwards; see `user_place`."""
    in_framework: Place | None = None
    while frame is not None:
        code = frame.f_code
        if code in stops:
            return None
        known = _homes.get(id(code)) or _look(code, frame)
        home = known[1]
        if home is _Home.USER:
            line = frame.f_lineno
            place = _places.get((id(code), line))
            if place is None or place.code is not code:
                if len(_places) >= _MOST_HOMES:
                    _places.clear()
                place = _places[id(code), line] = Place(code, line)
            return place
        if home is _Home.FRAMEWORK and in_framework is None:
            in_framework = Place(code, frame.f_lineno)
        frame = frame.f_back
    return in_framework


class UserFrame(NamedTuple):
    """A frame of the user's program, known without being kept alive."""

    identity: int
    code: CodeType

    @staticmethod
    def now() -> UserFrame | None:
        """The innermost one; None where there is none."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_inner(frame.f_code.co_filename):
            frame = frame.f_back
        return UserFrame(id(frame), frame.f_code) if frame is not None else None

    def runs_on(self) -> bool:
        """Whether it has not ended: what it called and raised, it has caught.

        The frame of a whole program ends with the process; what it has not caught is known then.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not (id(frame) == self.identity and frame.f_code is self.code):
            frame = frame.f_back
        return frame is not None or self.code.co_name == "<module>"


def _look(code: CodeType, frame: FrameType) -> tuple[CodeType, _Home]:
    """Finds out whose code runs in a frame, and remembers it: the same frames are passed at every call."""
    if is_inner(code.co_filename):
        home = _Home.INNER
    else:
        module = frame.f_globals.get("__name__")  # whatever a program has put there
        home = _Home.FRAMEWORK if type(module) is str and _runs_loop(module) else _Home.USER
    if len(_homes) >= _MOST_HOMES:  # a program that makes code as it runs
        _homes.clear()
    _homes[id(code)] = code, home
    return code, home
