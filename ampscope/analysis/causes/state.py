"""State that outlives a step and is not finite: found after a step in which nothing told."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.cause_entry import CauseEntry, Occurrence, Reason
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import number
from ampscope.trace.schema import Change, Form, Looked, StateKind
from ampscope.trace.vocabulary import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedBad(Reason):
    """A tensor that outlives the step was not finite after it."""

    kind: str  #: a `StateKind`
    name: str  #: of a weight or buffer; of optimizer state, what the optimizer calls it
    owner: str = ""  #: the parameter whose state it is
    module: str = ""
    dtype: str = ""
    nan: int = 0  #: elements that are NaN
    inf: int = 0  #: elements that are inf
    numel: int = 0
    others: int = 0  #: further tensors that were found so at the same look
    finite_at: int | None = None  #: the last step after which it was seen finite; None where it never was
    bad_at: int = 0  #: the first step after which it was seen not to be
    when: str = Looked.AFTER  #: a `Looked`: when in that step

    @property
    def key(self) -> str:
        """The name of the tensor in a trace."""
        return f"{self.name} of {self.owner}" if self.owner else self.name

    @property
    def in_words(self) -> str:
        """States in a sentence or two which tensor held how many NaN and inf, and when it was last seen finite."""
        held = (
            " and ".join(f"{count:,} {what}" for count, what in ((self.nan, "NaN"), (self.inf, "inf")) if count)
            or "values that are not finite"
        )
        more = f", and so did {self.others:,} more" if self.others else ""
        if self.when == Looked.FORESEEN:
            text = f"{self._subject} would hold {held} among {self.numel:,} elements after step {self.bad_at:,}"
            return f"{text}{more.replace('did', 'would')}: its optimizer was stepped on copies first."
        when = "before the update of" if self.when == Looked.BEFORE else "after"
        if self.kind == StateKind.SETTING:
            text = f"{self._subject} was {'NaN' if self.nan else 'infinite'} {when} step {self.bad_at:,}{more}: every "
            text += "weight that it steps takes a value that is not finite, whatever its gradient."
            since = self.finite_at
            return (
                text if since is None else f"{text} It was finite when the optimizer stepped last, at step {since:,}."
            )
        text = f"{self._subject} held {held} among {self.numel:,} elements {when} step {self.bad_at:,}{more}."
        if self.finite_at is None:
            return f"{text} It was not seen finite before."
        if self.finite_at + 1 == self.bad_at:
            return f"{text} It was finite after the step before."
        return f"{text} It was finite after step {self.finite_at:,}; in between nobody looked."

    @property
    def _subject(self) -> str:
        if self.kind == StateKind.SETTING:
            return f"The optimizer's {self.name}, by which it steps {self.owner} and the others of its group,"
        dtype = f" ({self.dtype})" if self.dtype else ""
        if self.kind == StateKind.OPTIMIZER:
            return f"{self.name}{dtype}, which the optimizer keeps of {self.owner},"
        what = {StateKind.WEIGHT: "The parameter", StateKind.BUFFER: "The buffer"}.get(StateKind(self.kind))
        return f"{what} {self.name}{dtype}" if what else f"{self.name}{dtype}, which the loop carries along,"


@dataclass(frozen=True, slots=True, kw_only=True)
class StandsStill(Reason):
    """A tensor stays where it is, because its dtype rounds its updates away."""

    name: str
    dtype: str
    since: int  #: the first step at which it was looked at
    last: int  #: the last one
    share: float  #: of its elements
    value: float  #: their mean magnitude
    off_by: float  #: how far they are, on the average, from where they should be

    @property
    def in_words(self) -> str:
        """States in two sentences how much of the tensor did not move, and why."""
        raise NotImplementedError

    @property
    def remedy(self) -> Remedy:
        """The change that lets the tensor move."""
        raise NotImplementedError

    def kept_wide(self, text: str, otherwise: str) -> Remedy:
        """The remedy of keeping the module that holds it in float32; of what no module holds, ``otherwise``."""
        module, _, name = self.name.rpartition(".")
        code = f"model.get_submodule({module!r}).float()  # holds {name}" if module else otherwise
        return Remedy(text=text, code=code, verified=True, kind=Change.FP32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerHeld(StandsStill):
    """A buffer, or an average that the loop keeps, does not follow what it is made of."""

    is_buffer: bool  #: else something that the loop itself writes between steps

    @property
    def in_words(self) -> str:
        """States in two sentences how much of it did not move, and how far it is from what it should follow."""
        what = f"the buffer {self.name}" if self.is_buffer else self.name
        return (
            f"{self.share:.0%} of {what} did not move in the steps from {self.since:,} to {self.last:,} that were "
            f"looked at. In float32 it does, the same way each time: each update is too small for {self.dtype}. They "
            f"are {number(self.value)} on the average, and {number(self.off_by)} away from what they should follow."
        )

    @property
    def remedy(self) -> Remedy:
        """The change that keeps its updates: the buffer or average in float32."""
        with_module = ", with the module that writes it" if "." in self.name else ""
        return self.kept_wide(f"Keep {self.name} in float32{with_module}.", "average = average.float()")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightHeld(StandsStill):
    """A weight stays where it is, because its dtype rounds the optimizer's updates of it away."""

    looks: int  #: steps that were looked at
    update: float  #: root mean square of its updates
    spacing: float  #: of its dtype's numbers there
    others: int = 0  #: further weights of the same optimizer

    @property
    def in_words(self) -> str:
        """States how much of the weight did not move, and how small its updates are beside the spacing of its dtype."""
        return (
            f"{self.share:.0%} of the weight {self.name} did not move in any of {self.looks:,} steps from "
            f"{self.since:,} to {self.last:,} that were looked at{_and_more(self.others)}. Its updates, about "
            f"{number(self.update)} each, are rounded away: numbers of {self.dtype} are {number(self.spacing)} "
            f"apart at {number(self.value)}. In float32 they would have moved it by about {number(self.off_by)}."
        )

    @property
    def remedy(self) -> Remedy:
        """The change that keeps its updates: the weight, or a master copy of it, in float32."""
        text = f"Keep {self.name} in float32, or give the optimizer a float32 master of it."
        return self.kept_wide(text, "model.float()")


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageHeld(StandsStill):
    """A running average of an optimizer does not decay, because its dtype rounds that away."""

    owner: str  #: the parameter whose state it is
    looks: int
    update: float  #: share of it that a step replaces
    spacing: float  #: of its dtype's numbers, as a share of them
    others: int = 0

    @property
    def in_words(self) -> str:
        """States in two sentences how much of the average did not move, and where it should have come down to."""
        return (
            f"{self.share:.0%} of {self.name} of {self.owner}, which the optimizer keeps in {self.dtype}, did not move "
            f"in any of {self.looks:,} steps from {self.since:,} to {self.last:,} that were looked at"
            f"{_and_more(self.others)}. A step is to replace {number(self.update)} of it, and numbers of "
            f"{self.dtype} are up to {number(self.spacing)} of themselves apart: it stays at {number(self.value)}, "
            f"where it should come down to {number(self.off_by)}, and updates that are divided by it remain too small."
        )

    @property
    def remedy(self) -> Remedy:
        """The change that lets the average decay: the optimizer's state in float32, or a smaller beta."""
        return Remedy(
            text="Keep the optimizer's state in float32: give it float32 parameters, or a smaller beta.",
            code="model.float()  # before the optimizer is made; autocast computes in half precision",
            kind=Change.FP32,
            untried=cause_entry.BEFORE,
        )


def _and_more(others: int) -> str:
    return f", and neither did {others:,} more" if others else ""


def _bad_state(occurrence: Occurrence) -> str:
    reason = occurrence.reason
    text = reason.in_words if isinstance(reason, TurnedBad) else "The optimizer's state is not finite."
    if isinstance(reason, TurnedBad) and reason.kind == StateKind.SETTING:
        return text
    if isinstance(reason, TurnedBad) and reason.when != Looked.AFTER:
        return f"{text} An update that is made with it leaves the weight where it is, or makes NaN of it."
    return f"{text} Every later update is made with it, so the weight stands still or becomes NaN; nothing undoes it."


def _against_bad_state(occurrence: Occurrence) -> tuple[Remedy, ...]:
    reason = occurrence.reason
    if isinstance(reason, TurnedBad) and reason.kind == StateKind.SETTING:
        text = f"Keep {reason.name} finite where the loop computes it; the gradients of skipped steps are not."
        code = f"if not math.isfinite({reason.name}):\n    raise ValueError(f'{reason.name} is {{{reason.name}}}')"
        return (cause_entry.advice(cause_entry.BEFORE, text, code),)
    return _STATE_REMEDIES


_STATE_REMEDIES = (
    Remedy(
        text="Throw the state of that parameter away, or load a checkpoint from before it went bad: later "
        "steps do not repair it.",
        code="optimizer.state.pop(parameter)",
        untried=cause_entry.BEFORE,
    ),
    Remedy(
        text="Keep gradients from growing so large that their squares leave the range of the state's dtype, "
        "and keep the state in float32.",
        code="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)",
        kind=Form.OPTIMIZER_CLIPPED,
        untried="a replay tries it where the optimizer's own step made the value",
    ),
)

ENTRIES = (
    CauseEntry(
        cause=Cause.BAD_OPTIMIZER_STATE,
        noun="optimizer state that is not finite",
        sentence=_bad_state,
        remedies=_against_bad_state,
        recognised_in="analysis.diagnosis.bad_state",
        cured_by_precision=None,
    ),
)
