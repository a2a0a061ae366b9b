"""An `Alert` says that a run needs a look: rarely, and diagnosed by another process, so as not to hold up training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import ampscope
from ampscope.trace.vocabulary import Severity


class AlertKind(StrEnum):
    """The kinds of events that an alert tells of."""

    INCIDENT = "incident"  #: a step went wrong
    FINDING = "finding"  #: the loop misuses autocast or the scaler
    AHEAD = "ahead"  #: a value is near overflow, or on its way there


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing that a run tells; what `ampscope.watch` hands to ``on_incident``, and trackers and webhooks tell.

    It has many attributes because it has to be understood far from the run, by people and programs.
    """

    kind: AlertKind
    step: int  #: at which it was seen
    what: str  #: what was seen, as a clause: ``non-finite gradient``
    run: str  #: the run's folder, absolute
    look: str  #: the command that explains it
    time: float  #: unix time, seconds
    rank: int = 0  #: that tells it
    world_size: int = 1  #: how many ranks train together
    replay: str = ""  #: of an incident: a `ampscope.trace.schema.ReplayStatus`
    verdict: str = ""  #: of the run so far, a `ampscope.trace.vocabulary.Verdict`; empty where it was not diagnosed
    summary: str = ""  #: the diagnosis in a sentence or a few; empty where there is none
    cause: str = ""  #: a `ampscope.trace.vocabulary.Cause`; empty where it is not known
    severity: str = ""  #: a `ampscope.trace.vocabulary.Severity`, ``info`` for what is harmless; empty where not known
    op: str = ""  #: that made the value, e.g. ``aten.bmm.default``
    module: str = ""  #: that ran it
    file: str = ""  #: of the user's line
    line: int = 0  #: its number, from 1; 0 where it is not known
    remedy: str = ""  #: the first of what to change
    suppressed: int = 0  #: alerts since the one before that were not told, for they came too fast

    @property
    def headline(self) -> str:
        """Step and what was seen, in one line."""
        where = f"rank {self.rank}, " if self.world_size > 1 else ""
        replay = f" (replay: {self.replay.replace('_', ' ')})" if self.replay else ""
        return f"{where}step {self.step:,}: {self.what}{replay}"

    @property
    def place(self) -> str:
        """Op, module and line, as far as they are known."""
        known = (self.op, f"in {self.module}" if self.module else "", f"{self.file}:{self.line}" if self.file else "")
        return ", ".join(part for part in (" ".join(filter(None, known[:2])), known[2]) if part)

    @property
    def text(self) -> str:
        """All of it, in lines."""
        more = f"{self.suppressed} further alerts since the last one were not told." if self.suppressed else ""
        remedy = f"Remedy: {self.remedy}" if self.remedy else ""
        lines = (f"{self.headline}.", self.summary, self.place, remedy, more, f"Look: {self.look}")
        return "\n".join(line for line in lines if line)


#: Alerts that are told at once, and seconds between those after them.
FIRST, INTERVAL_S = 5, 600.0


class RateLimit:
    """Lets the first few pass, then one in an interval, and counts the others.

    Args:
        first: How many pass at once.
        interval: Seconds between the others.
        clock: Tells the time, in seconds.
    """

    def __init__(
        self, first: int = FIRST, interval: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first = first
        self._interval = interval
        self._clock = clock
        self._last = float("-inf")
        self._held = 0

    def admits(self) -> int | None:
        """Asks for one more: how many were held back since the one before, or None where this one is, too."""
        now = self._clock()
        if self._first <= 0 and now - self._last < self._interval:
            self._held += 1
            return None
        self._first -= 1
        self._last, held, self._held = now, self._held, 0
        return held


#: Seconds that a diagnosis may take.
TIMEOUT_S = 60.0
#: Seconds between looks at whether it is done; or whether the run has ended, and nobody waits any longer.
_LOOK_S = 0.1
#: How much the training goes before it (``nice``).
_NICENESS = 15
_BY_SEVERITY = list(Severity)  # the worst first


class Diagnosing:
    """Runs ``ampscope diagnose --json`` on one run.

    Args:
        folder: The run's.
        command: How that is begun; by default with this very package and interpreter.

    Attributes:
        deadline: By the clock of ``time.monotonic``: a diagnosis that is not done by then is broken off.
    """

    def __init__(self, folder: Path, command: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._command = command or (sys.executable, "-P", "-m", "ampscope", "diagnose", "--json")
        self.deadline = float("inf")

    def __call__(self) -> dict[str, Any] | None:
        """Returns the diagnosis that ``ampscope diagnose --json`` prints; None where there is none, or none in time."""
        until = time.monotonic() + TIMEOUT_S
        if time.monotonic() >= self.deadline:
            return None
        with suppress(OSError, ValueError, subprocess.SubprocessError), self._started() as process:
            try:
                while time.monotonic() < min(until, self.deadline):
                    with suppress(subprocess.TimeoutExpired):
                        printed, _ = process.communicate(timeout=_LOOK_S)
                        found = json.loads(printed)
                        return found if isinstance(found, dict) else None
            finally:
                process.kill()
        return None

    def _started(self) -> subprocess.Popen[bytes]:
        home = str(Path(ampscope.__file__).parent.parent)
        paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [*self._command, str(self._folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
        )
        with suppress(OSError, AttributeError):  # it may be over; other systems have no such thing
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        return process


def diagnosed(alert: Alert, diagnosis: dict[str, Any]) -> Alert:
    """The alert with what the diagnosis says of it.

    Args:
        alert: As the training saw it.
        diagnosis: What ``ampscope diagnose --json`` prints.
    """
    primary = diagnosis.get("primary")
    about = sorted(_about(alert, diagnosis), key=lambda each: _BY_SEVERITY.index(each["severity"]))
    if not about:
        return replace(alert, verdict=diagnosis["verdict"])
    found = about[0]
    source = found.get("source") or {}
    return replace(
        alert,
        verdict=diagnosis["verdict"],
        summary=diagnosis["summary"] if found == primary else found["explanation"],
        cause=found["cause"],
        severity=found["severity"],
        op=found.get("op", ""),
        module=found.get("module", ""),
        file=source.get("file", alert.file),
        line=source.get("line", alert.line),
        remedy=next((each["text"] for each in found["remedies"]), ""),
    )


def _about(alert: Alert, diagnosis: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the parts of a diagnosis that an alert is about."""
    if alert.kind is AlertKind.FINDING:
        yield from (each for each in diagnosis["findings"] if each["cause"] == alert.cause)
    elif alert.kind is AlertKind.AHEAD:
        yield from (each for each in diagnosis["incidents"] if each["headroom_bits"] is not None)
    else:
        covers = (each for each in diagnosis["incidents"] if each["step"] <= alert.step <= each["last_step"])
        yield from (each for each in covers if each["headroom_bits"] is None)
