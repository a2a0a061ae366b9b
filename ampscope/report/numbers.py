"""Numbers for people, one function for each kind of number: a terminal and a page say the same.

What was not measured is ``missing``, which is nothing where a caller does not say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime

from ampscope import numerals
from ampscope.analysis.results import Operand
from ampscope.analysis.words import counted

#: What a page puts where nothing was measured, or where something is not known.
UNMEASURED, UNKNOWN = "not measured", "unknown"

#: A part of a whole below this is told as being below it.
_LEAST_PERCENT = 0.1
_DAY_S, _HOUR_S, _MINUTE_S = 86400, 3600, 60


def value(number: float | None, *, missing: str = "") -> str:
    """A tensor's value with the digits it deserves, NaN and infinities by name."""
    return missing if number is None else numerals.number(number)


def signed(number: float, digits: int = 2) -> str:
    """A difference, with its sign."""
    return f"{'' if number < 0 else '+'}{numerals.number(number, digits)}"


def span(low: float | None, high: float | None, *, missing: str = "") -> str:
    """From the smallest to the largest value; ``NaN`` if any is NaN."""
    if low is None or high is None:
        return missing
    if math.isnan(low) or math.isnan(high):
        return "NaN"
    return value(low) if low == high else f"{value(low)} to {value(high)}"


def count(number: float, noun: str = "") -> str:
    """``41,873``; with a noun ``1 step``, ``2,000 steps``."""
    return counted(round(number), noun) if noun else f"{number:,.0f}"


def share(part: float | None, *, narrow: bool = False, missing: str = "") -> str:
    """A share between 0 and 1 as a percentage with the digits it deserves.

    Args:
        part: The share.
        narrow: Without spaces and words, for a column of a terminal.
        missing: What stands for a share that is not known.
    """
    if part is None:
        return missing
    percent = 100 * part
    if 0 < percent < _LEAST_PERCENT:
        return f"<{_LEAST_PERCENT}%" if narrow else f"under {_LEAST_PERCENT} %"
    digits = f"{percent:.0f}" if percent in (0, 100) or percent >= 10 else f"{percent:.1f}"
    return f"{digits}%" if narrow else f"{digits} %"


def part(number: int | None, total: int | None, *, missing: str = "") -> str:
    """A count and its share of the whole: ``3 (1.2 %)``."""
    if number is None:
        return missing
    if not number:
        return "none"
    return f"{number:,} ({share(number / total)})" if total else count(number)


def nonfinite(operand: Operand) -> str:
    """Says which elements of a tensor are not finite, with counts where they were taken; empty when all are finite."""
    counts = ((operand.statistics.nan, "NaN"), (operand.statistics.posinf, "inf"), (operand.statistics.neginf, "-inf"))
    counted = [f"{number:,} {word}" for number, word in counts if number]
    return ", ".join(counted or dict.fromkeys(map(value, _nonfinite_bounds(operand))))


def _nonfinite_bounds(operand: Operand) -> Iterator[float]:
    for bound in (operand.statistics.min, operand.statistics.max):
        if bound is not None and not math.isfinite(bound):
            yield bound


def size(number: float) -> str:
    """Bytes with a binary unit."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = next((power for power in range(len(units)) if number < 1024 ** (power + 1)), len(units) - 1)
    number /= 1024**power
    return f"{number:,.0f} {units[power]}" if not power or number >= 100 else f"{number:.3g} {units[power]}"


def seconds(duration: float | None, *, missing: str = "") -> str:
    """How long something took: ``1.2 ms``, ``2.5 s``, ``3 min 7 s``, ``2 h 5 min``."""
    if duration is None:
        return missing
    if duration < 1:
        return f"{1000 * duration:.3g} ms"
    if duration < _MINUTE_S or not math.isfinite(duration):
        return f"{duration:.3g} s"
    minutes, rest = divmod(round(duration), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


def ago(duration: float) -> str:
    """How long ago something was, coarsely."""
    for unit, noun in ((_DAY_S, "day"), (_HOUR_S, "hour"), (_MINUTE_S, "minute")):
        if duration >= unit:
            return f"{count(int(duration // unit), noun)} ago"
    return f"{count(max(int(duration), 0), 'second')} ago"


def since(unix_time: float, now: float) -> str:
    """A time in the past: how long ago within a week, a date before."""
    if now - unix_time < 7 * _DAY_S:
        return ago(now - unix_time)
    return f"on {_local(unix_time):%Y-%m-%d}"


def moment(unix_time: float) -> str:
    """A time of day in the reader's time zone, to the minute."""
    return f"{_local(unix_time):%Y-%m-%d %H:%M}"


def _local(unix_time: float) -> datetime:
    return datetime.fromtimestamp(unix_time, tz=UTC).astimezone()
