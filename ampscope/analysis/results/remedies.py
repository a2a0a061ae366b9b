"""What was tried on an incident, and what helps against it."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.results.lines import CodeLine, SourceLine


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
    """What a remedy costs, as its replay measured it."""

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
