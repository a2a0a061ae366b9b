"""The types of the results over a fleet of runs. Times are unix times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampscope.trace.vocabulary import Cause, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldCause:
    """One incident or finding of a run's diagnosis, as far as a fleet asks."""

    cause: Cause
    severity: Severity
    op: str
    module: str
    line: str  #: file and line; empty where none is known
    count: int  #: how often


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """Holds the verdict of the diagnosis of one run."""

    verdict: str  #: a `Verdict`; ``unreadable`` where it failed
    primary: Cause | None = None  #: of what it tells first
    told: tuple[ToldCause, ...] = ()  #: errors and warnings, without what is harmless
    problem: str = ""  #: why it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseCount:
    """A cause, over all runs that were diagnosed."""

    cause: Cause
    severity: Severity
    runs: int  #: runs in which it was told
    first: int  #: runs of which it is told first
    count: int  #: how often it was told in all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceCount:
    """A module and a line at which a cause was told."""

    cause: Cause
    op: str
    module: str
    line: str
    runs: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCount:
    """The runs that have something in common, as a host, a device or a version."""

    kind: str  #: ``host``, ``device``, ``torch``, ``ampscope`` or ``python``
    name: str  #: empty where it was not recorded
    runs: int
    problems: int  #: those whose diagnosis is a problem
    steps: int
    lost_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """A loss scale that ended below 1, where it makes gradients smaller instead of larger."""

    run: str
    rank: int
    optimizer: int
    step: int  #: the newest
    scale: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Steps that were skipped, and what they cost; one that ranks took together counts once on each of them."""

    steps: int = 0  #: attempts of all ranks
    skipped: int = 0
    calibrating: int = 0  #: of these, before the scale can have found its place: the first attempts of a run
    lost: int = 0  #: the others
    device_hours: float = 0.0  #: their durations, summed over all ranks of the job, recorded or not
    gpu_hours: float = 0.0  #: of these, on GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class RateChange:
    """How often something occurred in the runs that began in the window, and in those of the window before it."""

    kind: str  #: ``cause``, or a kind of `GroupCount`, of which the problems are counted
    name: str
    runs_before: int
    hit_before: int
    runs: int
    hit: int
    deviations: float  #: standard deviations between the two shares, as of one share in both; positive for more

    @property
    def share(self) -> float:
        """The share of the runs in the window in which it occurred."""
        return self.hit / self.runs if self.runs else 0.0

    @property
    def share_before(self) -> float:
        """The share of the runs in the window before in which it occurred."""
        return self.hit_before / self.runs_before if self.runs_before else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The newest runs against those just before."""

    days: float
    ends: float  #: when the newest run of the fleet began
    runs: int
    runs_before: int
    changes: tuple[RateChange, ...] = ()  #: the farthest from what chance makes first


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableRun:
    """A run that is left out of a table, or of all."""

    path: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All that is told of a fleet."""

    runs: int  #: that were found
    ranks: int  #: that they were trained on
    first: float | None = None  #: when the oldest began
    last: float | None = None
    recorded: int = 0  #: runs that recorded an incident or a finding, harmless ones among them
    #: runs by what their diagnosis says; of ``not_diagnosed`` ones nobody asked it
    verdicts: dict[str, int] = field(default_factory=dict)
    causes: tuple[CauseCount, ...] = ()
    places: tuple[PlaceCount, ...] = ()
    groups: tuple[GroupCount, ...] = ()
    collapsed_runs: int = 0
    collapses: tuple[Collapse, ...] = ()  #: the lowest scales first, at most 100
    lost: Lost = field(default_factory=Lost)
    window: Window | None = None  #: null where no run says when it began
    unreadable: tuple[UnreadableRun, ...] = ()
