"""Completes runs in a shell: those at hand, told by their folders alone, for the shell waits for the answer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from ampscope.cli.shared.newest import DEFAULT_FOLDER

#: As `ampscope.trace.schema` has it, which loads Arrow.
MANIFEST = "run.json"
#: Entries of a folder that are looked at.
_MOST = 1000
#: Names that are offered. Shells put them into lines of their own, some of them unquoted: one that holds more than
#: these characters, which somebody else may have chosen, could be run there.
_OFFERED = re.compile(r"[\w.,+@%=~/ -]+")


def complete_run(incomplete: str) -> list[str]:
    """The runs in the folder that is being typed, or below ``./ampscope_runs``; without any, shells offer files.

    Args:
        incomplete: What is typed.
    """
    typed, slash, _ = incomplete.rpartition("/")
    folder = f"{typed}{slash}" if slash else f"{DEFAULT_FOLDER}/"
    found = [run for run in _runs(folder) if run.startswith(incomplete) and _OFFERED.fullmatch(run)]
    return [_in_line(run) for run in sorted(found)]


def _runs(folder: str) -> Iterator[str]:
    for name in _folders(folder):
        if os.path.isfile(f"{folder}{name}/{MANIFEST}"):  # noqa: PTH113  # importing less is quicker
            yield f"{folder}{name}"
        else:
            below = f"{folder}{name}/"
            yield from (f"{below}{each}" for each in _folders(below) if os.path.isfile(f"{below}{each}/{MANIFEST}"))  # noqa: PTH113


def _folders(folder: str) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, _MOST) if not entry.name.startswith(".") and entry.is_dir()]
    return []


class _InBash(str):
    """A run as it stands in bash's line. It begins as what was typed before that was escaped."""

    __slots__ = ()

    def startswith(self, typed: Any, *_: Any) -> bool:
        """Whether it is what was being typed, as typer asks."""
        return self.replace("\\ ", " ").startswith(typed)


def _in_line(run: str) -> str:
    """A run as it stands in the line: bash takes it as it is, other shells quote it themselves."""
    is_bash = os.environ.get("_AMPSCOPE_COMPLETE", "").endswith("_bash")
    return _InBash(run.replace(" ", "\\ ")) if is_bash else run
