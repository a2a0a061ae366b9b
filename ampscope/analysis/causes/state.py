"""State that outlives a step and is not finite: found after a step in which nothing told."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.cause_entry import CauseEntry, Occurrence, Reason
from ampscope.analysis.results import Remedy
from ampscope.numerals import number
from ampscope.trace.evidence import BadTensor, LostUpdates
from ampscope.trace.schema import Change, Form, Looked, StateKind
from ampscope.trace.vocabulary import Cause

_NEXT_UPDATE = "An update that is made with it leaves the weight where it is, or makes NaN of it."
_LATER_UPDATES = "Every later update is made with it, so the weight stands still or becomes NaN; nothing undoes it."


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedBad(Reason):
    """A tensor that outlives the step was not finite after it."""

    seen: BadTensor
    others: int = 0  #: further tensors that were found so at the same look

    @property
    def key(self) -> str:
        """The name of the tensor in a trace."""
        return f"{self.seen.name} of {self.seen.owner}" if self.seen.owner else self.seen.name

    def explanation(self, _: Occurrence, /) -> str:
        """States what was found, and of optimizer state what comes of it."""
        if self.seen.kind != StateKind.OPTIMIZER:
            return self.in_words
        if self.seen.when in (Looked.BEFORE, Looked.FORESEEN):
            return f"{self.in_words} {_NEXT_UPDATE}"
        return f"{self.in_words} {_LATER_UPDATES}"

    @property
    def in_words(self) -> str:
        """States in a sentence or two which tensor held how many NaN and inf, and when it was last seen finite."""
        seen = self.seen
        held = (
            " and ".join(f"{count:,} {what}" for count, what in ((seen.nan, "NaN"), (seen.inf, "inf")) if count)
            or "values that are not finite"
        )
        more = f", and so did {self.others:,} more" if self.others else ""
        if seen.when == Looked.FORESEEN:
            text = f"{self._subject} would hold {held} among {seen.numel:,} elements after step {seen.bad_at:,}"
            return f"{text}{more.replace('did', 'would')}: its optimizer was stepped on copies first."
        when = "before the update of" if seen.when == Looked.BEFORE else "after"
        if seen.kind == StateKind.SETTING:
            text = f"{self._subject} was {'NaN' if seen.nan else 'infinite'} {when} step {seen.bad_at:,}{more}: every "
            text += "weight that it steps takes a value that is not finite, whatever its gradient."
            since = seen.finite_at
            return (
                text if since is None else f"{text} It was finite when the optimizer stepped last, at step {since:,}."
            )
        text = f"{self._subject} held {held} among {seen.numel:,} elements {when} step {seen.bad_at:,}{more}."
        if seen.finite_at is None:
            return f"{text} It was not seen finite before."
        if seen.finite_at + 1 == seen.bad_at:
            return f"{text} It was finite after the step before."
        return f"{text} It was finite after step {seen.finite_at:,}; in between nobody looked."

    @property
    def _subject(self) -> str:
        seen = self.seen
        if seen.kind == StateKind.SETTING:
            return f"The optimizer's {seen.name}, by which it steps {seen.owner} and the others of its group,"
        dtype = f" ({seen.dtype})" if seen.dtype else ""
        if seen.kind == StateKind.OPTIMIZER:
            return f"{seen.name}{dtype}, which the optimizer keeps of {seen.owner},"
        what = {StateKind.WEIGHT: "The parameter", StateKind.BUFFER: "The buffer"}.get(StateKind(seen.kind))
        return f"{what} {seen.name}{dtype}" if what else f"{seen.name}{dtype}, which the loop carries along,"


@dataclass(frozen=True, slots=True, kw_only=True)
class StandsStill(Reason):
    """A tensor stays where it is, because its dtype rounds its updates away."""

    seen: LostUpdates
    others: int = 0  #: further ones that were found so at the same look

    @property
    def remedy(self) -> Remedy:
        """The change that lets the tensor move."""
        raise NotImplementedError

    def kept_wide(self, text: str, otherwise: str) -> Remedy:
        """The remedy of keeping the module that holds it in float32; of what no module holds, ``otherwise``."""
        module, _, name = self.seen.name.rpartition(".")
        code = f"model.get_submodule({module!r}).float()  # holds {name}" if module else otherwise
        return Remedy(text=text, code=code, verified=True, kind=Change.FP32)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerHeld(StandsStill):
    """A buffer, or an average that the loop keeps, does not follow what it is made of."""

    is_buffer: bool  #: else something that the loop itself writes between steps

    def explanation(self, _: Occurrence, /) -> str:
        """States in two sentences how much of it did not move, and how far it is from what it should follow."""
        seen = self.seen
        what = f"the buffer {seen.name}" if self.is_buffer else seen.name
        return (
            f"{seen.share:.0%} of {what} did not move in the steps from {seen.since:,} to {seen.last:,} that were "
            f"looked at. In float32 it does, the same way each time: each update is too small for {seen.dtype}. They "
            f"are {number(seen.value)} on the average, and {number(seen.off_by)} away from what they should follow."
        )

    @property
    def remedy(self) -> Remedy:
        """The change that keeps its updates: the buffer or average in float32."""
        with_module = ", with the module that writes it" if "." in self.seen.name else ""
        return self.kept_wide(f"Keep {self.seen.name} in float32{with_module}.", "average = average.float()")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightHeld(StandsStill):
    """A weight stays where it is, because its dtype rounds the optimizer's updates of it away."""

    def explanation(self, _: Occurrence, /) -> str:
        """States how much of the weight did not move, and how small its updates are beside the spacing of its dtype."""
        seen = self.seen
        return (
            f"{seen.share:.0%} of the weight {seen.name} did not move in any of {seen.looks:,} steps from "
            f"{seen.since:,} to {seen.last:,} that were looked at{_and_more(self.others)}. Its updates, about "
            f"{number(seen.update)} each, are rounded away: numbers of {seen.dtype} are {number(seen.spacing)} "
            f"apart at {number(seen.value)}. In float32 they would have moved it by about {number(seen.off_by)}."
        )

    @property
    def remedy(self) -> Remedy:
        """The change that keeps its updates: the weight, or a master copy of it, in float32."""
        text = f"Keep {self.seen.name} in float32, or give the optimizer a float32 master of it."
        return self.kept_wide(text, "model.float()")


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageHeld(StandsStill):
    """A running average of an optimizer does not decay, because its dtype rounds that away."""

    def explanation(self, _: Occurrence, /) -> str:
        """States in two sentences how much of the average did not move, and where it should have come down to."""
        seen = self.seen
        return (
            f"{seen.share:.0%} of {seen.name} of {seen.owner}, which the optimizer keeps in {seen.dtype}, did not move "
            f"in any of {seen.looks:,} steps from {seen.since:,} to {seen.last:,} that were looked at"
            f"{_and_more(self.others)}. A step is to replace {number(seen.update)} of it, and numbers of "
            f"{seen.dtype} are up to {number(seen.spacing)} of themselves apart: it stays at {number(seen.value)}, "
            f"where it should come down to {number(seen.off_by)}, and updates that are divided by it remain too small."
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


def _against_bad_state(occurrence: Occurrence) -> tuple[Remedy, ...]:
    seen = occurrence.reason.seen if isinstance(occurrence.reason, TurnedBad) else BadTensor()
    if seen.kind == StateKind.SETTING:
        text = f"Keep {seen.name} finite where the loop computes it; the gradients of skipped steps are not."
        code = f"if not math.isfinite({seen.name}):\n    raise ValueError(f'{seen.name} is {{{seen.name}}}')"
        return (cause_entry.advice(cause_entry.BEFORE, text, code),)
    return _STATE_REMEDIES


_STATE_REMEDIES = (
    Remedy(
        text=f"Throw the state of that parameter away, or load {cause_entry.CHECKPOINT}: later steps do not repair it.",
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
        sentence=f"The optimizer's state is not finite. {_LATER_UPDATES}",
        remedies=_against_bad_state,
        recognised_in="analysis.diagnosis.bad_state",
        cured_by_precision=None,
    ),
)
