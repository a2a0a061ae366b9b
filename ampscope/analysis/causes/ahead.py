"""Causes that have not struck yet: values that come close to the end of their dtype, or are on their way there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.causes.cause_entry import USE_BFLOAT16, CauseEntry, Occurrence, Reason, float32_region
from ampscope.analysis.results import Remedy
from ampscope.analysis.words import capitalized
from ampscope.forecast import Forecast
from ampscope.numerals import number
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Change
from ampscope.trace.vocabulary import Cause, Severity

_RECOGNISED_IN = "analysis.diagnosis.risks"
_BFLOAT16 = replace(USE_BFLOAT16, untried=cause_entry.AHEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Near(Reason):
    """A result that is close to the end of its dtype."""

    dtype: str
    largest: float
    bits: float  #: factors of two that are left
    step: int

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States how large the result became, and where its dtype ends."""
        times = f"{2.0**self.bits:.2f} times"
        return (
            f"{_what(occurrence)} reached {number(self.largest)} at step {self.step:,}, and "
            f"{self.dtype} ends at {_end(self.dtype)}: {times} as much is too much."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving(Reason):
    """A magnitude that grows, or falls, towards the end of its dtype."""

    dtype: str
    newest: float
    step: int  #: when that was
    ahead: Forecast  #: when it gets there
    others: int = 0  #: further places that are on their way

    def explanation(self, occurrence: Occurrence, /) -> str:
        """States how it has moved so far, and where that leads."""
        moved = f"{self._pace} since step {self.ahead.since:,} and"
        newest, goes_on = f"{number(self.newest)} at step {self.step:,}", "If it goes on like that,"
        when = f"at about step {self.ahead.step:,} (between {self.ahead.low:,} and {self.ahead.high:,})"
        others = f" {self.others:,} further {'places go' if self.others > 1 else 'place goes'} the same way."
        if self.ahead.bits_per_step < 0:
            smallest = number(FINFO[self.dtype].smallest_normal)
            told = (
                f"The largest gradient that {occurrence.op_in_words} gives has fallen {moved} was {newest}, loss scale "
                f"included. {goes_on} all of it is below {smallest} {when}: from there {self.dtype} loses its digits, "
                "and then the rest."
            )
        else:
            told = (
                f"{_what(occurrence)} has grown {moved} reached {newest}. {goes_on} it passes {_end(self.dtype)}, "
                f"where {self.dtype} ends, {when}."
            )
        return told + (others if self.others else "")

    @property
    def _pace(self) -> str:
        """How fast, as people say it: ``by 2 % a step``, or the steps in which it doubles."""
        bits = self.ahead.bits_per_step
        percent = 100 * abs(2.0**bits - 1)
        if percent >= 1:
            return f"by {percent:.2g} % a step"
        return f"{'by half' if bits < 0 else 'twofold'} in {1 / abs(bits):,.0f} steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideWindow(Reason):
    """A loss scale that is smaller than what saves the gradients."""

    scale: float
    low: float  #: smallest scale at which nothing is lost
    high: float  #: largest at which nothing overflows
    share: float  #: of the gradients' non-zero values, those that are subnormal
    zeros: float  #: of all values, those that are zero: what is lost altogether is among them
    least: bool  #: they are so many that the smallest scale may be a larger one
    step: int

    def explanation(self, _: Occurrence, /) -> str:
        """States what the gradients lose at this scale, and between which scales they lose nothing."""
        lost = f", and {self.zeros:.0%} of all values were zero" if self.least else ""
        low, high = number(self.low), number(self.high)
        window = (
            f"What is left is saved from a scale of {low} on, what has become zero needs a larger one; nothing "
            f"overflows up to {high}."
            if self.least
            else f"Nothing is lost, and nothing overflows, between {low} and {high}."
        )
        return (
            f"With a loss scale of {number(self.scale)}, {self.share:.0%} of the gradients' non-zero values were "
            f"subnormal in float16 at step {self.step:,}{lost}. {window}"
        )


def _what(occurrence: Occurrence) -> str:
    """Names the measured result, or the place, at the beginning of a sentence."""
    words = occurrence.op_in_words
    return f"The result of {words}" if "." in occurrence.op else capitalized(words)


def _end(dtype: str) -> str:
    """The largest number of a dtype."""
    return number(FINFO[dtype].max)


def _in_float32(occurrence: Occurrence) -> Remedy:
    if not occurrence.module:
        return replace(float32_region(""), untried=cause_entry.AHEAD)
    return Remedy(
        text=f"Run module {occurrence.module} in float32.",
        code=f"ampscope.keep_fp32(model, [{occurrence.module!r}])",
        kind=Change.MODULES_FP32,
        untried=cause_entry.AHEAD,
    )


def _against_range(occurrence: Occurrence) -> tuple[Remedy, ...]:
    return (_in_float32(occurrence), _BFLOAT16)


def _against_growth(occurrence: Occurrence) -> tuple[Remedy, ...]:
    halt = Remedy(
        text="Stop the growth: normalise what grows (a norm on queries and keys, or before the residual is added), or "
        "use a smaller learning rate or more weight decay there.",
        untried=cause_entry.MEANING,
    )
    reason = occurrence.reason
    wide = isinstance(reason, Moving) and reason.dtype != "float16"
    return (halt,) if wide else (halt, *_against_range(occurrence))


def _against_fall(occurrence: Occurrence) -> tuple[Remedy, ...]:
    raised = Remedy(
        text="Let the loss scale grow sooner, so that it follows.",
        code="scaler = torch.amp.GradScaler(growth_interval=200)",
        untried=cause_entry.SCALER,
    )
    return (raised, *_against_range(occurrence))


def _against_scale(occurrence: Occurrence) -> tuple[Remedy, ...]:
    reason = occurrence.reason
    begin = f"2.0**{_power_between(reason)}" if isinstance(reason, OutsideWindow) else "2.0**16"
    return (
        Remedy(
            text="Begin with a loss scale inside that window: two bits below its upper end.",
            code=f"scaler = torch.amp.GradScaler(init_scale={begin})",
            untried=cause_entry.SCALER,
        ),
        _BFLOAT16,
    )


def _power_between(reason: OutsideWindow) -> int:
    """The largest power of two that leaves two bits to overflow, and saves the gradients."""
    return math.floor(math.log2(max(reason.low, reason.high / 4)))


def _entry(
    cause: Cause,
    noun: str,
    sentence: str,
    remedies: Callable[[Occurrence], tuple[Remedy, ...]],
) -> CauseEntry:
    return CauseEntry(
        cause=cause,
        noun=noun,
        sentence=sentence,
        remedies=remedies,
        severity=Severity.WARNING,
        recognised_in=_RECOGNISED_IN,
        cured_by_precision=False,
    )


ENTRIES = (
    _entry(
        Cause.NEAR_OVERFLOW,
        "a value close to overflow",
        "A result is close to the end of its dtype.",
        _against_range,
    ),
    _entry(
        Cause.TREND_OVERFLOW,
        "a value that grows towards overflow",
        "A result grows towards the end of its dtype.",
        _against_growth,
    ),
    _entry(
        Cause.TREND_UNDERFLOW,
        "gradients that fall below float16's range",
        "A gradient falls below what its dtype holds.",
        _against_fall,
    ),
    _entry(
        Cause.SCALE_WINDOW,
        "a loss scale too small for the gradients",
        "The loss scale is smaller than what saves the gradients.",
        _against_scale,
    ),
)
