"""Changes while a run trains what is recorded of its healthy steps: by call, or by a file in the run's folder."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ampscope.capture.budgets import TraceBudget
from ampscope.capture.events import StepObserver, StepStart
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.settings import NAMES, checked, quoted
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.torch_support.guard import Guard, is_interruption
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.selection import Filters
from ampscope.errors import WatchError
from ampscope.trace.files.whole_files import read_regular
from ampscope.trace.schema import EventKind

#: What a step may be compared with.
REFERENCES = ("float32", "float64")


class AuditRequests:
    """Holds the audits that were asked for, until a healthy step has served them."""

    def __init__(self) -> None:
        self._every: int | None = None
        self._asked: deque[str] = deque()
        self._served: dict[int, int] = {}  # by optimizer, which of the turns that come every so many steps

    @property
    def every(self) -> int | None:
        """Audit one step in so many; None for none."""
        return self._every

    @every.setter
    def every(self, every: int | None) -> None:
        if every != self._every:
            self._every = every
            self._served.clear()  # turns of other lengths

    def ask(self, dtype: Any) -> None:
        """Asks for an audit of the next healthy step, from any thread.

        Raises:
            WatchError: Nothing can be compared with that dtype.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in REFERENCES:
            raise WatchError(f"audit(dtype={quoted(dtype)}): give {' or '.join(map(repr, REFERENCES))}")
        self._asked.append(name)

    def due(self, step: int, optimizer: int) -> str:
        """The dtype that a step is to be compared with; empty where no audit is due.

        Args:
            step: Its number.
            optimizer: That of its optimizer.
        """
        if self._asked:
            return self._asked[0]
        if not self._every:
            return ""
        return REFERENCES[0] if self._turn(step) > self._served.setdefault(optimizer, step // self._every) else ""

    def served(self, step: int, optimizer: int) -> None:
        """Takes the audit that was due as done: it was made, or cannot be."""
        if self._asked:
            self._asked.popleft()
        if self.every:
            self._served[optimizer] = self._turn(step)

    @property
    def waiting(self) -> int:
        """How many were asked for and have found no healthy step."""
        return len(self._asked)

    def _turn(self, step: int) -> int:
        return (step + 1) // (self.every or 1)


#: The file that a colleague may write, and how large it may be.
FILE, _MOST_BYTES = "configure.json", 1 << 16
#: Seconds between two looks at it; and the share of the time that looks may take where the disk is slow.
_EVERY_S, _SHARE = 1.0, 0.001


#: Stands for what is to stay as it is.
_SAME: Any = object()


class Configuration(StepObserver):
    """The settings of a run, as they are now. A change counts from the next step on.

    Args:
        models: The watched models.
        budget: Which steps are traced.
        recorder: Where changes are told; it holds what is written of these steps.
        terminal: Where a file that cannot be used is told.
        guard: Catches faults in reading.
        settings: What `watch` was asked for, by name.

    Attributes:
        step: The step that a change counts for.
        audits: Which steps are to be audited.
    """

    def __init__(
        self,
        models: Models,
        budget: TraceBudget,
        recorder: Recorder,
        terminal: Terminal,
        *,
        guard: Guard,
        settings: Mapping[str, Any],
    ) -> None:
        self.guard = guard
        self.step: Callable[[], int] = int
        self.audits = AuditRequests()
        self._file = recorder.written_to() / FILE
        self._models = models
        self._budget, self._recorder = budget, recorder
        self._terminal = terminal
        self._settings = dict(settings)
        self._asked: list[dict[str, Any]] = []  # and not yet in force
        self._stamp: tuple[int, int] | None = None  # of the file, as it was read last
        self._next_look = 0.0
        self._told = ""
        self._use()

    def change(self, **asked: Any) -> None:
        """Asks for other settings, from any thread.

        Raises:
            WatchError: One of them cannot be honoured; none is changed.
        """
        self._asked.append(checked(asked, self._models))

    def step_began(self, _: StepStart) -> None:
        """Puts the settings in force that were asked for since the last step."""
        now = time.monotonic()
        if now >= self._next_look:
            self._look()
            self._next_look = now + max(_EVERY_S, (time.monotonic() - now) / _SHARE)
        while self._asked:
            changed = {name: value for name, value in self._asked.pop(0).items() if self._settings[name] != value}
            if changed:
                self._settings |= changed
                self._use()
                told = ", ".join(f"{name}={quoted(_plain(value))}" for name, value in changed.items())
                self._recorder.event(EventKind.NOTE, self.step(), f"what is traced has changed: {told}")

    def _use(self) -> None:
        settings = self._settings
        self._budget.change(every=settings["every"], share=settings["overhead"])
        self.audits.every = settings["audit_every"]
        self._recorder.selection.filters = Filters(**{name: settings[name] for name in Filters._fields})

    def _look(self) -> None:
        """Reads the file, if there is one that was not read yet."""
        try:
            state = self._file.stat()
            stamp = state.st_mtime_ns, state.st_size
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self.change(**_settings(read_regular(self._file, _MOST_BYTES)))
        except FileNotFoundError:
            self._stamp = None
        except (OSError, ValueError, WatchError) as error:
            if is_interruption(error):
                raise
            text = f"{FILE} is left aside: {error}"
            if text == self._told:
                return
            self._told = text
            self._recorder.event(EventKind.WARNING, self.step(), text)
            self._terminal.once(f"configure-{self._stamp[0] if self._stamp else 0}", text)


class Configurable:
    """A run whose settings may be changed while it trains."""

    _configuration: Configuration

    def configure(
        self,
        *,
        every: int | None = _SAME,
        overhead: float = _SAME,
        audit_every: int | None = _SAME,
        modules: str | Sequence[str] | None = _SAME,
        ops: str | Sequence[str] | None = _SAME,
        parameters: str | Sequence[str] | None = _SAME,
    ) -> None:
        """Changes from the next step on what `watch` was asked for under these names; what is left out stays.

        A file ``configure.json`` in the run's folder, ``{"every": 10, "modules": "blocks.*.attn"}``, does the same
        whenever it is written anew. Each change is a note on the run's time line.

        Raises:
            WatchError: A setting cannot be honoured; none is changed.
        """
        asked: dict[str, Any] = {"every": every, "overhead": overhead, "audit_every": audit_every}
        asked |= {"modules": modules, "ops": ops, "parameters": parameters}
        self._configuration.change(**{name: value for name, value in asked.items() if value is not _SAME})

    def audit(self, dtype: str | torch.dtype = "float32") -> None:
        """Asks for an audit of the next healthy step: what each of its ops loses by its dtype (``ampscope audit``).

        Returns at once. The step is run again where it ends, before its weights move, which takes ten to twenty times
        as long as the step itself; nothing of the training is different for it.

        Args:
            dtype: What the step is compared with: ``"float32"``, or ``"float64"``.

        Raises:
            WatchError: Nothing can be compared with that dtype.
        """
        self._configuration.audits.ask(dtype)


def _settings(content: bytes) -> dict[str, Any]:
    """Parses the settings that the file asks for.

    Raises:
        ValueError: It is no JSON object.
    """
    try:
        asked = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(asked, dict):
        raise ValueError(f"give a JSON object with some of {', '.join(NAMES)}")
    return asked


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
