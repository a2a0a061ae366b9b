"""Numbers for people: what `ampscope.report.numbers` says in a terminal, and what only a page says."""

from __future__ import annotations

from datetime import UTC, datetime

from ampscope.analysis.results import Operand
from ampscope.report import numbers

#: What stands where nothing was measured.
UNMEASURED = "not measured"


def count(number: float) -> str:
    """``41,873``."""
    return f"{number:,.0f}"


def share(part: float | None) -> str:
    """A share between 0 and 1 as a percentage with the digits it deserves."""
    if part is None:
        return "unknown"
    percent = 100 * part
    if percent in (0, 100) or percent >= 10:
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if percent >= 0.1 else "under 0.1 %"


def value(number: float | None) -> str:
    """A tensor's value: short, NaN and infinities by name."""
    return numbers.value(number) or UNMEASURED


def span(low: float | None, high: float | None) -> str:
    """The values between two bounds."""
    return numbers.span(low, high) or UNMEASURED


def trouble(operand: Operand) -> str:
    """What of a tensor is not finite; empty when all of it is, as far as it was measured."""
    return numbers.nonfinite(operand)


def part(number: int | None, total: int | None) -> str:
    """A count as a share of all elements."""
    if number is None:
        return UNMEASURED
    if not number:
        return "none"
    return f"{number:,} ({share(number / total)})" if total else count(number)


def seconds(duration: float | None) -> str:
    """``1.2 ms``, ``340 ms``, ``2.5 s``."""
    if duration is None:
        return "unknown"
    return f"{1000 * duration:.3g} ms" if duration < 1 else f"{duration:.3g} s"


def ago(duration: float) -> str:
    """How long ago something was, coarsely."""
    for size, noun in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if duration >= size:
            return f"{numbers.count(int(duration // size), noun)} ago"
    return f"{numbers.count(max(int(duration), 0), 'second')} ago"


def when(moment: float, now: float) -> str:
    """A unix time: how long ago within a week, a date before."""
    if now - moment < 7 * 86400:
        return ago(now - moment)
    return f"on {datetime.fromtimestamp(moment, tz=UTC):%Y-%m-%d}"


def size(number: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:,.3g} TiB"
