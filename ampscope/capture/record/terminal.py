"""What is printed beside a training, on standard error: few lines, each with the command that explains it."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.user_line import Place
from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import MISTAKES_IN_WORDS, Cause

#: How many incidents are told; all are in the trace.
MAX_INCIDENTS = 5
#: Of the reason why a step could not be replayed, at most this many characters.
_REASON = 100


class Terminal:
    """Prints the lines of one run.

    Args:
        folder: The run's folder.
        quiet: Print nothing.
    """

    def __init__(self, folder: Path, *, quiet: bool) -> None:
        self._folder = folder
        self._quiet = quiet
        self._incidents = 0
        self._mistakes: set[Cause] = set()

    def line(self, text: str) -> None:
        """Prints a line of AMPscope's."""
        if not self._quiet:
            with Suppressed():  # there may be no terminal any more
                sys.stderr.write(f"ampscope: {text}\n")
                sys.stderr.flush()

    def incident(self, what: str, step: int, status: ReplayStatus, reason: str) -> None:
        """Tells of a step that went wrong; the last one that is told says so."""
        self._incidents += 1
        if self._incidents > MAX_INCIDENTS:
            return
        last = " Further incidents are recorded but not printed." if self._incidents == MAX_INCIDENTS else ""
        self._look(f"step {step}: {what} ({_replay(status, reason)}).{last}")

    def mistake(self, cause: Cause, step: int, place: Place, evidence: dict[str, Any]) -> None:
        """Tells of a usage mistake, the first of its kind."""
        if cause in self._mistakes or "optimizer_steps" in evidence:  # whether that did harm, later steps tell
            return
        self._mistakes.add(cause)
        where = f" at {place.file}:{place.line}" if place.file else ""
        self._look(f"step {step}: {MISTAKES_IN_WORDS.get(cause, cause.value)}{where}.")

    def _look(self, text: str) -> None:
        self.line(f"{text} Look: ampscope diagnose {self._folder}")


def _replay(status: ReplayStatus, reason: str) -> str:
    if status is ReplayStatus.UNAVAILABLE and reason:
        return f"replay unavailable: {textwrap.shorten(reason, _REASON, placeholder=' ...')}"
    if status is ReplayStatus.RECEIVED:
        return "from another rank: finite here when it was run again"
    return f"replay: {status.replace('_', ' ')}"
