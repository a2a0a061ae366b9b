"""The typed results of analysis: what every page, text and JSON view is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.schema import UNMEASURED, Statistics
from ampscope.trace.vocabulary import Cause, Severity, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of someone's program."""

    file: str
    line: int
    function: str
    code: str

    @staticmethod
    def of(row: Any) -> SourceLine | None:
        """The line that a row with such fields, or evidence, names; None where there is none, or it names none."""
        if row is None or not row.file:
            return None
        return SourceLine(file=row.file, line=row.line, function=row.function, code=row.code)


class CodeLine(NamedTuple):
    """A line of someone's program where the function does not matter; JSON shows it as its text."""

    file: str
    line: int
    code: str

    @property
    def place(self) -> str:
        """``train.py:8``."""
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place} {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor an op read or wrote, with the statistics taken when it ran (null: not measured)."""

    role: str  #: ``input 0``, ``output 0``, or the name of an input, parameter or buffer
    dtype: str
    shape: str
    numel: int | None = None
    statistics: Statistics = UNMEASURED

    @property
    def exp_counts(self) -> tuple[int, ...]:
        """The bins of its exponent histogram; empty where there is none."""
        return self.statistics.exp_counts or ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PathNode:
    """One op on the way from the origin to the value that mattered, origin first."""

    seq: int
    op: str
    name: str  #: for inputs, parameters, losses and gradients
    module: str
    phase: str
    dtype: str
    shape: str
    min: float | None
    max: float | None
    source: SourceLine | None
    module_type: str = ""  #: empty outside every watched module; the model itself has a type, but no name


@dataclass(frozen=True, slots=True, kw_only=True)
class FormTried:
    """Another form of one call of the user's code, as a replay tried it."""

    form: str  #: a `ampscope.trace.schema.Form`
    call: str  #: the torch function in whose place it stood: ``log``, ``div``
    source: SourceLine | None  #: the line that calls it
    argument: int | None = None  #: the operand that was changed; 0 is the first, of a method the tensor itself
    value: float | None = None  #: the number that went in
    was: float | None = None  #: the number that stood there
    good_change: float | None = None  #: largest relative change of what was finite before, in units of the dtype's eps
    beside: FormTried | None = None  #: that of another call, which alone only moved the failure to this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One replay of an incident's step with one thing changed, and what came out."""

    step: int
    change: str  #: a `ampscope.trace.schema.Change`
    modules: tuple[str, ...] = ()  #: those that ran in float32; ``(loss)`` for the code outside every module
    scale: float | None = None  #: the loss scale it ran with
    outcome: str  #: a `ampscope.trace.schema.Trial`
    reason: str = ""
    loss: float | None = None
    seconds: float = 0.0
    op_min: float | None = None  #: what the op at the origin gave this time
    op_max: float | None = None
    #: lines that ask for a half dtype themselves and got another; None where it was not recorded
    conversions: tuple[CodeLine, ...] | None = None
    form: FormTried | None = None  #: what stood in the place of one call
    extra_time: float | None = None  #: what the change adds to the step's duration, as a share
    extra_bytes: int | None = None  #: bytes that the step's ops write more
    followed: int = 0  #: later bad steps that the same change made finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Describes the cost of a remedy, as its replay measured it."""

    time: float | None  #: what it adds to the step's duration, as a share; null where it was not measured
    bytes: int | None  #: that the step's ops write more


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that cures the cause; ``verified`` says whether a replay with it was tried and what came out."""

    text: str
    code: str = ""
    verified: bool | None = None
    kind: str = ""  #: a `ampscope.trace.schema.Form`, another `ampscope.trace.schema.Change`, or empty for advice
    diff: str | None = None  #: the user's own lines with the change, as a unified diff; null where it has no such form
    cost: Cost | None = None  #: what it costs, as measured; null where it was not
    changes_good_values: bool | None = None  #: whether values that were finite become others; null where not measured
    untried: str = ""  #: why no replay has tried it; empty where one has, and nowhere else

    def __post_init__(self) -> None:
        """Holds that what was not tried says why, and nothing else does.

        Raises:
            ValueError: It does not.
        """
        if self.verified is None and not self.untried:
            raise ValueError(f"no replay has tried this remedy, and it does not say why: {self.text}")
        if self.verified is not None and self.untried:
            object.__setattr__(self, "untried", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBy:
    """Describes the step and op that left a bad value in the weights, where a later step found it."""

    step: int  #: whose gradients were not finite, and which the optimizer took
    op: str = ""  #: where the value was born, as far as that is known
    module: str = ""
    source: SourceLine | None = None


class MoveKind(StrEnum):
    """Names the quantities that may have moved since the last good step: those given to a step, then its results."""

    SEGMENT = "segment"  #: the run was resumed, perhaps with other versions or settings
    SCALE = "scale"  #: the loss scale
    LEARNING_RATE = "lr"
    DTYPE = "dtype"
    SHAPE = "shape"  #: of an input
    BATCH = "batch"  #: how large an input is, or which share of it is zero
    RANGE = "range"  #: how large a parameter, or the result of an op, is
    LOSS = "loss"
    GRAD_NORM = "grad_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Something that is otherwise than it was at the last good step."""

    kind: MoveKind
    text: str  #: a clause, without full stop
    before: float | str | None
    after: float | str | None
    unit: str = ""  #: of both: ``share``, ``dtype``, ``shape``, ``setting``; empty for plain numbers
    score: float | None  #: the move over the usual one between good steps, for ops less, as they are many; 1000: it
    #: had never moved; null: seen too rarely
    seen: int  #: good steps, or recorded ones, that tell what is usual
    step: int  #: at which it was seen to have moved
    module: str = ""
    op: str = ""  #: or a node of the trace, such as an input
    name: str = ""  #: of an input or parameter; of a learning rate the further parameter group, or its number from 0
    source: SourceLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastGood:
    """The last step that went well before an incident, and what has moved since, the most unusual first."""

    step: int | None  #: the newest that was finite, stepped and had no incident; null where there is none
    calm_step: int | None = None  #: the newest of them whose loss and gradient norm were as in those before
    sampled_step: int | None = None  #: the newest whose ops can be compared with; null where none can
    summary: str
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(NotebookRepr):
    """A numerical failure (or a harmless oddity, severity ``info``) with its origin.

    It has many attributes because it is all that any view shows of one failure, and the JSON of one.
    """

    kind: str = "incident"
    step: int
    last_step: int
    count: int = 1
    severity: Severity
    cause: Cause
    phase: str  #: forward, backward, optimizer or input
    op: str = ""  #: that made the value; empty where no one op did, or none is known
    module: str = ""
    module_type: str = ""
    source: SourceLine | None = None
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    path: tuple[PathNode, ...] = ()
    lost: PathNode | None = None  #: the op before it whose result had already lost what this one needs
    replay: str = ""  #: a `ampscope.trace.schema.ReplayStatus`
    replay_reason: str = ""
    traced: str = ""  #: the ``source`` of the op rows it was read from: ``live``, ``replay`` or empty
    fp32_ok: bool | None = None  #: whether the same step is finite in float32; None where that is not known
    tried: tuple[Tried, ...] = ()
    trigger: str = ""
    tripped: tuple[str, ...] = ()  #: parameters whose gradients were not finite
    explanation: str = ""
    remedies: tuple[Remedy, ...] = ()
    rank: int = 0  #: the rank whose own calculation failed; op, operands and path are its
    also_on: tuple[int, ...] = ()  #: further ranks on which the same failed by itself
    received_by: tuple[int, ...] = ()  #: ranks whose own calculation was finite, and that got the value from this one
    world: int = 1  #: how many ranks train together
    written_by: WrittenBy | None = None  #: the step that left the value behind; None where it began in this one
    headroom_bits: float | None = None  #: of what has not happened yet: factors of two up to overflow,
    forecast_step: int | None = None  #: the step at which it will, if it goes on,
    forecast_low: int | None = None  #: not before this one,
    forecast_high: int | None = None  #: nor after it
    lasting: bool = False  #: a jump of the gradient norm from ``step`` on, which has not come back up to ``last_step``
    last_good: LastGood | None = None  #: of what a run is told first for, and where steps were looked at one by one
    loop_step: int | None = None  #: ``step`` by the loop's own count, where its checkpoint tells another


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(NotebookRepr):
    """A usage mistake."""

    kind: str = "finding"
    step: int
    last_step: int
    count: int
    severity: Severity
    cause: Cause
    counted: bool = True  #: whether ``last_step`` and ``count`` are known; capture takes down the first time only
    phase: str = "usage"
    source: SourceLine | None
    explanation: str = ""
    remedies: tuple[Remedy, ...] = ()
    rank: int = 0  #: the rank whose loop was seen to make it
    also_on: tuple[int, ...] = ()  #: further ranks whose loops make it, too
    world: int = 1  #: how many ranks train together
    loop_step: int | None = None  #: as for an `Incident`


#: Version of the JSON object that ``ampscope diagnose --json`` prints.
JSON_SCHEMA = 1


class ScaleVerdict(StrEnum):
    """How a loss scale fared."""

    STEADY = "steady"  #: hardly a step was lost
    CALIBRATED = "calibrated"  #: it started too high and came down to where the gradients fit
    PROBING = "probing"  #: it grew at its interval, and backed off where that was too much
    OSCILLATING = "oscillating"  #: it goes up and down so often that training suffers
    RUNAWAY = "runaway"  #: it grows and grows: nothing that it scales can overflow
    FLOORED = "floored"  #: it lies below 1, or at a floor where steps are skipped all the same
    COLLAPSED = "collapsed"  #: it fell and fell, and no step has worked since

    @property
    def is_calm(self) -> bool:
        """Whether this is how a ``GradScaler`` works."""
        return self in (ScaleVerdict.STEADY, ScaleVerdict.CALIBRATED, ScaleVerdict.PROBING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleHealth:
    """The verdict on the loss scale of one optimizer, with the numbers it rests on."""

    optimizer: int
    verdict: ScaleVerdict
    severity: Severity
    first_step: int  #: of the stretch that the verdict speaks of
    last_step: int
    steps: int  #: attempts in the whole run
    skipped: int
    calibrating: int  #: of the skipped ones, those lost while the scale first found its place
    growths: int
    backoffs: int
    current: float  #: scale of the newest attempt
    lowest: float
    held: float | None = None  #: the largest scale at which a stretch of steps worked
    explanation: str = ""
    remedies: tuple[Remedy, ...] = ()

    @property
    def lost_share(self) -> float:
        """Skipped attempts as a share of all attempts."""
        return self.skipped / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Describes a run: the facts of its manifest and its extent."""

    path: str
    name: str
    created: float  #: unix time, seconds
    status: str  #: ``open`` while the process writes, ``closed`` after, ``interrupted`` when it died
    steps: int  #: optimizer step attempts
    skipped: int
    segments: int
    device: str
    model: str  #: class name of the watched model
    parameters: int
    versions: dict[str, str] = field(default_factory=dict)
    world: int = 1  #: how many ranks train together
    missing: tuple[int, ...] = ()  #: ranks of which nothing is in the trace
    loop_step: int | None = None  #: the newest step by the loop's own count, where a checkpoint tells another than ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """How much of a run was looked at, on the rank whose steps are counted."""

    traced: int = 0  #: attempts whose ops were recorded
    gradients: int = 0  #: attempts whose gradients were judged
    state_looks: int = 0  #: how often all weights and optimizer state were read
    lost: int = 0  #: attempts between the first and the last whose rows are not in the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCure:
    """A change that healing has made in the training (``watch(..., heal=True)``)."""

    step: int  #: that went bad
    kind: str  #: a `ampscope.trace.schema.CureKind`
    modules: tuple[str, ...] = ()
    code: str = ""  #: what makes it permanent; empty for what was about that step alone
    lifted_at: int | None = None  #: the step at which it was taken back
    text: str = ""  #: what was changed, as a clause
    applied: bool = False  #: the step was made with the gradients of its replay
    lost: str = ""  #: why the step itself could not be saved, in words
    at_once: bool = False  #: it holds for the step itself, not from the next one on
    lifted_because: str = ""  #: in words
    optimizer: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file that the loop saved state of the run to."""

    path: str  #: absolute
    step: int  #: after which it was written; -1: before the first
    holds: tuple[str, ...]  #: ``weights``, ``optimizer``
    parts: tuple[str, ...] = ()  #: of which of these it holds a part alone


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFiles:
    """Tells which files, of those that a run saved its state to, are from before that was not finite any more."""

    last_whole: SavedFile | None = None  #: the last that was written while everything was whole; null: none is known
    written_again: int | None = None  #: the step after which that file was written again, so that it holds that now
    spoilt: int = 0  #: files that hold values which are not finite
    unknown: int = 0  #: files of which that is not known: when they were written nobody had looked, or they hold a part
    unknown_from: int | None = None  #: the first step after which one of those was written
    unknown_to: int | None = None  #: the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(NotebookRepr):
    """The whole verdict on a run; ``primary`` is the one thing to tell its owner first."""

    schema: int = JSON_SCHEMA
    run: RunInfo
    verdict: Verdict
    summary: str
    primary: Incident | Finding | None
    incidents: tuple[Incident, ...] = ()
    findings: tuple[Finding, ...] = ()
    scale: tuple[ScaleHealth, ...] = ()  #: one for each optimizer that was stepped with a loss scale
    note: str = ""  #: that only a part of healthy steps is recorded, and judged ahead; empty where all is
    ranks: tuple[str, ...] = ()  #: what there is to say of the ranks together, in sentences; empty where there is one
    cures: tuple[MadeCure, ...] = ()  #: what healing has changed
    since: str = ""  #: whether what is told first has come back since the run was resumed or healed
    checked: Checked = Checked()
    unobserved: tuple[str, ...] = ()  #: why not all was looked at that should be, in sentences; empty where all was
    saved: SavedFiles | None = None  #: of a run whose state was ruined, and that was seen to save it; null elsewhere
