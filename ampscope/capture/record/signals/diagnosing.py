"""Has a run diagnosed by another process, so that an alert can say what is wrong; the training's is not held up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ampscope
from ampscope.capture.record.signals.alert import Alert, AlertKind
from ampscope.trace.vocabulary import Severity

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
