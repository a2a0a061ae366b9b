"""What went wrong in a run: incidents and findings, and what has moved since a good step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ampscope.analysis.results.lines import Operand, PathNode, SourceLine
from ampscope.analysis.results.remedies import Remedy, Tried
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.vocabulary import Cause, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBy:
    """What left a bad value in the weights that a later step found there."""

    step: int  #: whose gradients were not finite, and which the optimizer took
    op: str = ""  #: where the value was born, as far as that is known
    module: str = ""
    source: SourceLine | None = None


class MoveKind(StrEnum):
    """What may have moved since the last good step; first what a step is given, then what comes of it."""

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
