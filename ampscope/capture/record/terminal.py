"""The lines beside a training, on standard error, are few: each with the command that explains it, mistakes once."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim.optimizer import Optimizer

from ampscope.capture.record.alerts import Alert, AlertKind
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.signals import Signals
from ampscope.capture.torch_support import dynamo
from ampscope.capture.torch_support.guard import Suppressed, is_interruption
from ampscope.capture.torch_support.user_line import NOWHERE, Place
from ampscope.capture.usage.mistake import Mistake, framework
from ampscope.trace.evidence import FindingEvidence
from ampscope.trace.files.layout import ranks
from ampscope.trace.read.find import from_here
from ampscope.trace.schema import EventKind, ReplayStatus
from ampscope.trace.vocabulary import MISTAKES_IN_WORDS, Cause
from ampscope.trace.write.writer import TraceWriter

#: How many incidents are told; all are in the trace.
MAX_INCIDENTS = 5
#: How many places that will overflow are told.
MAX_AHEAD = 3
#: Where in the run's folder ranks mark what was told; dotted, so that readers pass it over.
MARKS = ".told"
#: Of the reason why a step could not be replayed, at most this many characters.
_REASON = 100


def say(text: object) -> None:
    """Prints a line of AMPscope's, from whatever thread; there may be no terminal any more."""
    with Suppressed():
        sys.stderr.write(f"ampscope: {text}\n")
        sys.stderr.flush()


class Terminal:
    """Prints the lines of one run; of a job on several ranks, each line on one of them.

    Args:
        folder: The folder that the run is written to.
        rank: Of this process.
        world_size: How many ranks there are.
        signals: Told of what needs a look, printed or not; None where nobody is to be told.
        quiet: Print nothing.
        home: Where readers find the run, if elsewhere.
    """

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        world_size: int = 1,
        signals: Signals | None = None,
        *,
        quiet: bool,
        home: Path | None = None,
    ) -> None:
        self._folder = folder
        self.shown = from_here(home or folder)  #: the run's folder as lines name it
        self._quiet = quiet
        self._rank = rank
        self._signals = signals
        self.world_size = world_size
        self._incidents = 0
        self._ahead = 0
        self._mistakes: set[Cause] = set()
        self._received: _Received | None = None

    @classmethod
    def of(cls, writer: TraceWriter, signals: Signals | None, *, quiet: bool) -> Terminal:
        """The terminal of the run that is being written."""
        size = writer.manifest.world_size
        return cls(writer.folder, writer.rank, size, signals, quiet=quiet, home=writer.home)

    def line(self, text: str) -> None:
        """Prints a line of AMPscope's."""
        if not self._quiet:
            say(text)

    def begins(self, segment: int) -> None:
        """Says where the run goes; any rank may, for rank 0 need not be watched.

        Args:
            segment: Of the run, for each says it anew.
        """
        self.once(f"segment-{segment}", f"recording to {self.shown}")

    def once(self, key: str, text: str) -> None:
        """Prints a line, unless another rank of the job has said the same.

        Args:
            key: What it says, as the name of a file.
            text: The line.
        """
        if self.world_size == 1 or self._is_first(key):
            self.line(text)

    def incident(self, what: str, step: int, status: ReplayStatus, reason: str, *, elsewhere: bool = False) -> None:
        """Tells of a step that went wrong; the last one that is told says so.

        Args:
            what: What was noticed.
            step: When.
            status: What its replay came to.
            reason: Why.
            elsewhere: It did not go wrong on this rank. The rank on which it did says more, so this one waits until
                that had its time.
        """
        self._incidents += 1
        last = " Further incidents are recorded but not printed." if self._incidents == MAX_INCIDENTS else ""
        where = f"rank {self._rank}, " if self.world_size > 1 and not elsewhere else ""
        replay = _replay(status, reason, rank=self._rank, elsewhere=elsewhere)
        text = f"{where}step {step}: {what} ({replay}).{last}" if self._incidents <= MAX_INCIDENTS else ""
        look = partial(self._look, f"step-{step}", text, AlertKind.INCIDENT, step, what, replay=status.value)
        if elsewhere:
            self._received = _Received(look)
        else:
            look()

    def ahead(self, key: str, step: int, text: str) -> None:
        """Tells of something that has not happened yet, the first few times.

        Args:
            key: What it is about, as a part of the name of a file.
            step: When it was seen.
            text: What was seen.
        """
        self._ahead += 1
        line = f"step {step}: {text}." if self._ahead <= MAX_AHEAD else ""
        self._look(f"ahead-{key}", line, AlertKind.AHEAD, step, text)

    def passed(self) -> None:
        """A step is over. With the end of the next, every rank has judged the one before: they reduce gradients."""
        received = self._received
        if received is not None and received.fresh:
            self._received = received._replace(fresh=False)
        elif received is not None:
            self._received = None
            received.look()

    def mistake(self, cause: Cause, step: int, place: Place, evidence: FindingEvidence) -> None:
        """Tells of a usage mistake, the first of its kind."""
        waits = cause is Cause.MISUSE_SCHEDULER_ORDER or evidence.optimizer_steps is not None
        if cause in self._mistakes or waits:  # whether that did harm, later steps tell
            return
        self._mistakes.add(cause)
        where = f" at {place.file}:{place.line}" if place.file else ""
        what = MISTAKES_IN_WORDS.get(cause, cause.value)
        known = {"cause": cause.value, "file": place.file, "line": place.line if place.file else 0}
        self._look(cause.value, f"step {step}: {what}{where}.", AlertKind.FINDING, step, what, **known)

    def close(self) -> None:
        """Nothing more will come: what another rank would have said is said here where that rank is not watched."""
        received, self._received = self._received, None
        if received is not None:
            with Suppressed():  # the folder may be gone
                if len(ranks(self._folder)) < self.world_size:
                    received.look()

    def end_signals(self) -> None:
        """The run's record is complete: waits a little for those who are told of it."""
        if self._signals is not None:
            self._signals.close()

    def _look(self, key: str, text: str, kind: AlertKind, step: int, what: str, **known: Any) -> None:
        """Prints a line, unless it is empty, and tells others what it is about; of ranks that would, the first."""
        suppressed = self._signals.admits() if self._signals is not None else None
        if not text and suppressed is None:
            return
        look, is_first = f"ampscope diagnose {self.shown}", self.world_size == 1 or self._is_first(key)
        if is_first and text:
            self.line(f"{text} Look: {look}")
        if self._signals is not None and suppressed is not None:
            known |= {"rank": self._rank, "world_size": self.world_size, "suppressed": suppressed}
            alert = Alert(kind=kind, step=step, what=what, run=str(self._folder), look=look, time=time.time(), **known)
            self._signals.alert(alert, to_all=is_first)

    def _is_first(self, key: str) -> bool:
        """Whether no other rank has said it; the first leaves a mark in the run's folder."""
        marks = self._folder / MARKS
        try:
            marks.mkdir(exist_ok=True)
            (marks / key).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError as error:
            if is_interruption(error):  # a `TimeoutError` is one of these
                raise
            return True  # rather twice than not at all
        return True


class _Received(NamedTuple):
    """A line that waits for the rank that knows more."""

    look: Callable[[], None]  #: tells it
    fresh: bool = True  #: the step it is about is not over


def _replay(status: ReplayStatus, reason: str, *, rank: int, elsewhere: bool) -> str:
    if status is ReplayStatus.UNAVAILABLE and reason:
        return f"not replayed: {textwrap.shorten(reason, _REASON, placeholder=' ...')}"
    if status is ReplayStatus.RECEIVED:
        return (
            f"from another rank: finite on rank {rank} when it was run again"
            if elsewhere
            else "lost in the reduction itself"
        )
    return f"replay: {status.replace('_', ' ')}"


class MistakeReport:
    """Takes one mistake after another.

    Args:
        recorder: Where findings go.
        terminal: Where the user is told.
        step_of: Gives the number of the step an optimizer (None: the first) is working on.
    """

    def __init__(self, recorder: Recorder, terminal: Terminal, step_of: Callable[[Optimizer | None], int]) -> None:
        self._recorder = recorder
        self._terminal = terminal
        self._step_of = step_of

    def __call__(self, mistake: Mistake) -> None:
        """Writes it down, at the present step unless it has another."""
        step = self._step_of(None) if mistake.step is None else mistake.step
        where, evidence = mistake.place or NOWHERE, replace(mistake.evidence, framework=framework())
        self._recorder.finding(mistake.cause, step, where, form=mistake.form, evidence=evidence)
        self._terminal.mistake(mistake.cause, step, where, evidence)


#: Steps after which it is said.
PATIENCE = 2

_NOT_CALLED = (
    "no call of the watched model was seen: watch the object that the loop calls, and call it as model(x), "
    "not model.forward(x)"
)
_COMPILED = (
    "no call of the watched model was seen, for what runs inside a function that torch.compile compiled is hidden, and "
    "a bad step cannot be replayed: compile the model alone, model.compile(), and call it outside compiled functions"
)


class UnseenCalls:
    """Counts the steps of a segment until a call of a watched model is seen.

    Args:
        recorder: Where it is written.
        terminal: Where the user is told, once.
    """

    def __init__(self, recorder: Recorder, terminal: Terminal) -> None:
        self._recorder = recorder
        self._terminal = terminal
        self._steps = 0
        self._told = False

    def stepped(self, step: int, *, called: bool) -> None:
        """An optimizer of the run has stepped.

        Args:
            step: The next step.
            called: Whether a call of a watched model was ever seen.
        """
        self._steps += 1
        if self._told and called:
            self._told = False
            self._recorder.event(EventKind.SEEN, step, "")
        elif self._steps == PATIENCE:
            self._tell(step, called=called)

    def ended(self, step: int, *, called: bool) -> None:
        """The segment ends."""
        if 0 < self._steps < PATIENCE:
            self._tell(step, called=called)

    def _tell(self, step: int, *, called: bool) -> None:
        if not called:
            self._told = True
            text = _COMPILED if dynamo.in_use() else _NOT_CALLED
            self._recorder.event(EventKind.UNSEEN, step, text)
            self._terminal.once("unseen", text)
