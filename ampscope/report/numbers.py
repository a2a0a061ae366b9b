"""Numbers for a terminal: values, ranges, counts and shares, short and aligned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from ampscope.analysis.results import Operand


def value(number: float | None) -> str:
    """A tensor's value with the digits it deserves; empty when it was not measured."""
    if number is None:
        return ""
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    return f"{number:,.0f}" if number.is_integer() and abs(number) < 1e6 else f"{number:.4g}"


def count(number: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def span(low: float | None, high: float | None) -> str:
    """From the smallest to the largest value; ``NaN`` if any is NaN; empty when they were not measured."""
    if low is None or high is None:
        return ""
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    return value(low) if low == high else f"{value(low)} to {value(high)}"


def nonfinite(operand: Operand) -> str:
    """What of a tensor is not finite, with counts where they were taken; empty when all of it is finite."""
    told = [_counted(operand.nan, "NaN"), _counted(operand.posinf, "inf"), _counted(operand.neginf, "-inf")]
    if any(told):
        return ", ".join(word for word in told if word)
    return ", ".join(dict.fromkeys(value(bound) for bound in _strange((operand.min, operand.max))))


def share(part: int | None, whole: int | None) -> str:
    """A count as a percentage of all elements; empty when it was not measured."""
    if part is None or not whole:
        return ""
    percent = 100 * part / whole
    return "<0.1%" if 0 < percent < 0.1 else f"{percent:.3g}%"


def moment(unix_time: float) -> str:
    """A time of day in the reader's time zone, to the minute."""
    return datetime.fromtimestamp(unix_time, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def lasted(seconds: float | None) -> str:
    """``2 h 5 min``; empty when it is not known."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _counted(number: int | None, word: str) -> str:
    return f"{number:,} {word}" if number else ""


def _strange(bounds: Sequence[float | None]) -> list[float]:
    return [bound for bound in bounds if bound is not None and not math.isfinite(bound)]
