"""Causes that harm nothing by themselves: values that are not finite, cost a step or stand out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.cause_entry import CauseEntry, Occurrence, Reason
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import capitalized, op_in_words
from ampscope.numerals import number
from ampscope.trace.schema import Node
from ampscope.trace.vocabulary import Cause, Severity

_QUANTITIES = {"grad_norm": "gradient norm", "loss": "loss"}


class FarOut(NamedTuple):
    """A loss or a gradient norm that is far out of its band."""

    quantity: str  #: ``loss`` or ``grad_norm``
    value: float
    usual: float  #: median of the good steps before
    highest: float  #: the largest of them
    steps: int  #: how many they are

    @property
    def in_words(self) -> str:
        """States the value of the loss or gradient norm, and its usual one."""
        name, times = _QUANTITIES.get(self.quantity, self.quantity), self.value / self.usual
        return (
            f"the {name} was {number(self.value)}, {times:,.0f} times its usual {number(self.usual)} (at most "
            f"{number(self.highest)} in the {self.steps} good steps before)"
        )


class Rise(NamedTuple):
    """Holds an input or an op's result that was larger in a step than in a good step before it."""

    op: str
    name: str  #: of an input
    module: str
    size: float  #: largest magnitude
    before: float  #: likewise, in the good step
    step: int  #: the number of that

    @property
    def in_words(self) -> str:
        """States which value rose, to what magnitude, and from what."""
        where = f" in {self.module}" if self.module else ""
        what = f"The input {self.name}" if self.op == Node.INPUT else f"The result of {op_in_words(self.op)}{where}"
        return f"{what} reached {number(self.size)}; in step {self.step:,} it reached {number(self.before)}."


class Since(NamedTuple):
    """Holds what was otherwise than before, each as a pair of old and new value; None where it was the same."""

    rate: tuple[float, float] | None = None  #: learning rate, of the step before
    scale: tuple[float, float] | None = None  #: loss scale, likewise
    batch: tuple[int, int] | None = None  #: rows of the first input, of a good step that was traced
    dtype: tuple[str, str] | None = None  #: of an op's result, likewise
    op: str = ""  #: which
    module: str = ""  #: its module

    @property
    def in_words(self) -> str:
        """States in a sentence what changed; empty where nothing did."""
        told = []
        if self.rate is not None:
            told.append(f"the learning rate ({number(self.rate[0])}, now {number(self.rate[1])})")
        if self.scale is not None:
            told.append(f"the loss scale ({self.scale[0]:,.0f}, now {self.scale[1]:,.0f})")
        if self.batch is not None:
            told.append(f"the rows of the batch ({self.batch[0]:,}, now {self.batch[1]:,})")
        if self.dtype is not None:
            where = f" in {self.module}" if self.module else ""
            told.append(f"the dtype of {op_in_words(self.op)}{where} ({self.dtype[0]}, now {self.dtype[1]})")
        return f"Otherwise than before: {', '.join(told)}." if told else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spiked(Reason):
    """A step that stood far out of those before it; many attributes because each is a thing to tell of it."""

    step: int
    far_out: tuple[FarOut, ...]
    parameters: tuple[tuple[str, float], ...] = ()  #: with the largest gradients, and their shares of the squared norm
    rows: tuple[int, ...] = ()  #: the few of the batch that make the gradient
    batch: int = 0  #: rows in the batch
    share: float = 0.0  #: of the gradient that is theirs
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()  #: with rows that stand out, and which
    rise: Rise | None = None
    since: Since | None = None
    stepped: float | None = None  #: norm of the gradients that the optimizer was given; None where nobody looked
    lasting: bool = False  #: the gradient norm did not come back
    outcome: str = ""  #: what became of the training, in a sentence

    def explanation(self, _: Occurrence, /) -> str:
        """States how far out the step was, what made it so, and what became of the training."""
        first = " and ".join(each.in_words for each in self.far_out)
        seen = (each.in_words for each in (self.rise, self.since) if each is not None)
        return " ".join(filter(None, (f"{capitalized(first)}.", *_made_by(self), *seen, self.outcome)))

    @property
    def by_gradients(self) -> bool:
        """Whether the gradient norm was out of its band, with or without the loss."""
        return any(each.quantity == "grad_norm" for each in self.far_out)

    @property
    def main_parameter(self) -> str:
        """The parameter that most of the gradient belongs to; empty where there is none."""
        return self.parameters[0][0] if self.parameters and self.parameters[0][1] > 1 / 2 else ""


def _made_by(seen: Spiked) -> list[str]:
    told = []
    if seen.rows:
        which = ", ".join(map(str, seen.rows))
        many = f"the row at index {which}" if len(seen.rows) == 1 else f"the rows at index {which}"
        told.append(f"At the model's output {seen.share:.0%} of the gradient is that of {many}, of {seen.batch} rows.")
    for name, rows in seen.inputs:
        told.append(f"Of {name}, index {', '.join(map(str, rows))} holds values far above those of the other rows.")
    if seen.parameters:
        shares = ", ".join(f"{name} ({share:.0%})" for name, share in seen.parameters)
        told.append(f"Most of the squared gradient norm is that of {shares}.")
    return told


def _against_spikes(occurrence: Occurrence) -> tuple[Remedy, ...]:
    seen = occurrence.reason
    norms = [each for each in seen.far_out if each.quantity == "grad_norm"] if isinstance(seen, Spiked) else []
    most = f"{norms[0].highest:.2g}" if norms else "1.0"
    clip = Remedy(
        text="Clip the gradients, so that one step cannot undo many; with a scaler, after scaler.unscale_(optimizer).",
        code=f"torch.nn.utils.clip_grad_norm_(model.parameters(), {most})",
        untried=cause_entry.LOOP,
    )
    if isinstance(seen, Spiked) and seen.lasting:
        text = f"Look for what is otherwise from step {seen.step:,} on: a term of the loss, a constant, the data."
        return (Remedy(text=f"{text} Clipping only hides it.", untried=cause_entry.SCALER),)
    alone = isinstance(seen, Spiked) and bool(seen.rows or seen.inputs)
    look = Remedy(
        text="Look at these rows of the batch: their values or targets may be wrong.", untried=cause_entry.BATCH
    )
    return (look, clip) if alone else (clip,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFell(Reason):
    """Steps were skipped, and the loss scale halved for each."""

    recovered: bool  #: a good step followed


def _harmless(
    cause: Cause, recognised_in: str, *, noun: str, sentence: str | Callable[[Occurrence], str]
) -> CauseEntry:
    return CauseEntry(
        cause=cause,
        noun=noun,
        sentence=sentence,
        severity=Severity.INFO,
        recognised_in=recognised_in,
        cured_by_precision=False,
    )


def _moving(then: str, unfinished: str) -> Callable[[Occurrence], str]:
    """Returns a function that states what the loss scale did.

    The sentence says ``then`` where a good step showed that the scale was low enough, ``unfinished`` where the run
    ended before.
    """

    def sentence(occurrence: Occurrence) -> str:
        reason = occurrence.reason
        ended = isinstance(reason, ScaleFell) and not reason.recovered
        return f"{unfinished if ended else then}: this is how GradScaler works."

    return sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Unexplained(Reason):
    """A step was skipped once, and what made its gradients bad was not found."""

    why: str  #: it was not found; without full stop


def _single_skip(occurrence: Occurrence) -> str:
    reason = occurrence.reason
    because = f" ({reason.why})" if isinstance(reason, Unexplained) and reason.why else ""
    return (
        f"The gradients of one step were not finite, and what made them so is not known{because}. The scaler skipped "
        "that step, and training went on with finite gradients."
    )


ENTRIES = (
    CauseEntry(
        cause=Cause.SPIKE,
        noun="a loss or gradient norm far out of its band",
        sentence="A loss or gradient norm was far out of its band.",
        remedies=_against_spikes,
        severity=Severity.WARNING,
        recognised_in="analysis.diagnosis.loss_spikes",
        cured_by_precision=False,
    ),
    _harmless(
        Cause.BENIGN_INITIAL_CALIBRATION,
        "analysis.scale.scaler_course",
        noun="the scale finding its place",
        sentence=_moving(
            "The loss scale started high and halved until the gradients fit",
            "The loss scale started high and was being halved when what was recorded ends",
        ),
    ),
    _harmless(
        Cause.BENIGN_PERIODIC_GROWTH,
        "analysis.scale.scaler_course",
        noun="the scale probing for room to grow",
        sentence=_moving(
            "The loss scale had grown to probe for room and was halved again",
            "The loss scale had grown to probe for room and was being halved again when what was recorded ends",
        ),
    ),
    _harmless(
        Cause.BENIGN_SCALE_ADJUSTMENT,
        "analysis.scale.scaler_course",
        noun="the scale making room for larger gradients",
        sentence=_moving(
            "Gradients outgrew the loss scale; it was lowered and training went on",
            "Gradients outgrew the loss scale, which was being lowered when what was recorded ends",
        ),
    ),
    _harmless(
        Cause.BENIGN_SINGLE_SKIP,
        "analysis.diagnosis.examiner",
        noun="a single skipped step that is not explained",
        sentence=_single_skip,
    ),
    _harmless(
        Cause.BENIGN_INF_MASK,
        "analysis.diagnosis.diagnosis",
        noun="a mask of -inf, as intended",
        sentence=(
            "{op} writes infinities on purpose, as masks do, and they are gone again before loss, gradients and "
            "buffers."
        ),
    ),
    _harmless(
        Cause.BENIGN_METRIC_NAN,
        "analysis.diagnosis.diagnosis",
        noun="a metric that is NaN and reaches no weight",
        sentence=(
            "{op} makes a non-finite value that no loss, gradient, weight or buffer depends on, as in a metric or a "
            "log."
        ),
    ),
    _harmless(
        Cause.BENIGN_SATURATED,
        "analysis.diagnosis.diagnosis",
        noun="an overflow that saturates",
        sentence=(
            "{op} makes an infinity, and a bounded function such as tanh or sigmoid takes it to its limit, as it would "
            "any number that large."
        ),
    ),
    _harmless(
        Cause.BENIGN_MASKED_INTERNAL,
        "analysis.diagnosis.diagnosis",
        noun="an internal value that is not finite, and masked again",
        sentence=(
            "{op} makes a non-finite value that is masked or replaced before it reaches loss, gradients or buffers."
        ),
    ),
)
