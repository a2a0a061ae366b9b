"""The verdict on a run, and on its loss scale."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ampscope.analysis.results.incidents import Finding, Incident
from ampscope.analysis.results.remedies import Remedy
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.vocabulary import Severity, Verdict

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
    """What a run is: the facts of its manifest and its extent."""

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
