"""These plain values say what was wrong with a step and what replays of it came to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.tracing.batch_rows import RowShare
from ampscope.trace.evidence import Evidence, Reduction
from ampscope.trace.schema import Change, Form, ReplayStatus, Trial


class Symptom(NamedTuple):
    """Names what was not finite in the real step; false when nothing was."""

    gradients: frozenset[str] = frozenset()
    loss: bool = False
    judged: frozenset[str] = frozenset()  #: the parameters whose gradients were looked at; empty for all
    buffers: frozenset[str] = frozenset()  #: that the step left so, by name, whether or not it found them so

    def __bool__(self) -> bool:
        return bool(self.gradients) or self.loss


@dataclass(slots=True)
class ReplayResult:
    """The outcome of a faithful replay."""

    status: ReplayStatus
    reason: str = ""
    seconds: float = 0.0
    finite: bool = False  #: nothing bad came of it
    within_rounding: bool = False  #: it diverged, and why by no more than that is known
    bad_rows: dict[str, list[int]] = field(default_factory=dict)  #: of each input that is not finite, by name
    few_rows: RowShare | None = None  #: of a finite step: the rows that make its gradient
    standing_out: dict[str, list[int]] = field(default_factory=dict)  #: likewise: of each input, its outlying rows
    reduced: Reduction | None = None  #: how the real step's gradients were put together with those of other ranks

    @property
    def failed_elsewhere(self) -> bool:
        """Whether the ops of this rank show nothing of what went wrong: every value among them is finite."""
        received = self.status is ReplayStatus.RECEIVED
        return received and not (self.reduced is not None and self.reduced.overflows)

    def added_to(self, evidence: Evidence) -> Evidence:
        """The evidence of an incident with what the replay of its step has shown."""
        rows = {name: tuple(rows) for name, rows in self.bad_rows.items()}
        return replace(evidence, rows=rows, reduction=self.reduced)


class ChangedResult(NamedTuple):
    """The outcome of a replay with one thing changed."""

    outcome: Trial
    reason: str = ""
    loss: float | None = None
    seconds: float = 0.0


class FormUsed(NamedTuple):
    """Another form of one call of the user's code, as a replay used it."""

    form: Form
    call: str  #: the torch function in whose place it stood: ``log``, ``div``
    place: Place  #: the user's line that calls it
    argument: int | None = None  #: the operand that was changed; 0 is the first, of a method the tensor itself
    value: float | None = None  #: the number that went in
    was: float | None = None  #: the number that stood there
    made_by: Any = None  #: the form itself
    good_change: float | None = None  #: largest relative change of what was finite before, in units of the dtype's eps


class TrialResult(NamedTuple):
    """A change that was tried on a bad step, with what came out."""

    change: Change
    modules: tuple[str, ...]  #: that ran in float32
    conversions: tuple[Place, ...]  #: the lines that asked for a half dtype by name and were given another
    scale: float | None  #: the loss scale it ran with
    result: ChangedResult
    low: float | None = None  #: least value that the op gave at which the step failed
    high: float | None = None
    form: FormUsed | None = None  #: what stood in the place of one call
    extra_time: float | None = None  #: what the change adds to the step's duration, as a share
    extra_bytes: int | None = None  #: bytes that the step's ops write more
    followed: int = 0  #: later bad steps that the same change made finite
