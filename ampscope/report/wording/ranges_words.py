"""Ranges in words: what comes closest to overflow, and each cell of a table of places."""

from __future__ import annotations

from ampscope.analysis.precision.ranges.measured import NEAR_BITS
from ampscope.analysis.precision.ranges.ranges import RangeRow, Ranges
from ampscope.analysis.words import place_in_words
from ampscope.report import numbers
from ampscope.trace.dtypes import FINFO, HALF_DTYPES
from ampscope.trace.schema import Node, Phase

#: Growth that is told, in bits a step: less is none.
LEAST_GROWTH = 5e-5


def sampled_sentence(found: Ranges) -> str:
    """How many of the steps all that is told of a rank rests on."""
    share = numbers.share(found.sampled_share)
    replayed = f", {found.replayed_steps:,} more in a replay" if found.replayed_steps else ""
    steps = f"{found.sampled_steps:,} of {numbers.count(found.steps, 'step')} ({share})"
    return f"{steps} were recorded op by op as they ran{replayed}."


def closest_sentence(found: Ranges) -> str:
    """Says which value came closest to overflow, how close, when, and where it is going."""
    row = next(
        (row for row in found.rows if row.headroom_bits is not None and not (row.fixed and not row.overflowed)), None
    )
    if row is None:
        return "No value that can grow was measured in this run."
    if row.overflowed:
        return f"{_first_upper(place_words(row))} {overflows(row)} in {row.dtype}."
    where = f"{place_words(row)}, {distance(row)}{_when(row)}"
    if row.scale is not None:
        return f"Only gradients were measured, with their loss scale. The closest to overflow: {where}."
    going = _going(row)
    if row.headroom_bits is not None and row.headroom_bits >= NEAR_BITS and row.forecast_step is None:
        nothing = "Gradients with a loss scale aside, nothing" if found.scaled else "Nothing"
        return f"{nothing} is near overflow. The closest value: {where}{going}. {gradients_sentence(found)}".rstrip()
    return f"The closest value to overflow: {where}{going}. {gradients_sentence(found)}".rstrip()


def gradients_sentence(found: Ranges) -> str:
    """Says which value overflowed because of the loss scale; empty where none did."""
    row = found.scaled_overflow
    if row is None:
        return ""
    backward = " in backward" if row.phase == Phase.BACKWARD else ""
    return f"With the loss scale, {place_words(row)}{backward} {overflows(row)}."


def place_words(row: RangeRow) -> str:
    """``gelu in h.3.mlp``, ``the gradient of fc.weight``."""
    what = "the scaled loss" if row.op == Node.LOSS and row.scale is not None else place_in_words(row.op, row.name)
    return f"{what} in {row.module}" if row.module and f"{row.module}." not in row.name else what


def flushed(row: RangeRow) -> str:
    """The share of zeros that float32 would not have had; empty of what is not in half precision."""
    if row.flushed_share is None and row.dtype not in HALF_DTYPES:
        return ""
    return numbers.share(row.flushed_share, narrow=True, missing="not known")


def distance(row: RangeRow) -> str:
    """``4.2 bits below float16's 65,504``."""
    return f"{bits(row.headroom_bits)} bits below {row.dtype}'s {numbers.value(FINFO[row.dtype].max)}"


def bits(number: float | None) -> str:
    """Powers of two with one digit."""
    return "" if number is None else f"{number:.1f}"


def growth(row: RangeRow) -> str:
    """Bits in a hundred steps, with a sign."""
    rate = row.bits_per_step
    if rate is None:
        return ""
    return numbers.signed(100 * rate, 3) if abs(rate) >= LEAST_GROWTH else "0"


def forecast(row: RangeRow) -> str:
    """When it overflows, or how often it did."""
    if row.overflowed:
        return overflows(row)
    if row.forecast_step is None or row.forecast_low is None or row.forecast_high is None:
        return ""
    return f"step {row.forecast_step:,} ({row.forecast_low:,} to {row.forecast_high:,})"


def overflows(row: RangeRow) -> str:
    """``overflowed 3 times``; ``at least`` where older steps were not looked at."""
    return f"overflowed {'at least ' if row.overflowed_at_least else ''}{numbers.count(row.overflowed, 'time')}"


def line(row: RangeRow) -> str:
    """Returns the user's line as ``model.py:34``; empty where none is known."""
    return f"{row.source.file.rpartition('/')[2]}:{row.source.line}" if row.source else ""


def steps_words(first: int, last: int) -> str:
    """``step 300``, ``steps 3,056 to 3,333``."""
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _when(row: RangeRow) -> str:
    if row.largest_step is None or row.largest_last is None:
        return ""
    if row.largest_step == row.largest_last:
        return f", at step {row.largest_step:,}"
    return f", between steps {row.largest_step:,} and {row.largest_last:,}"


def _going(row: RangeRow) -> str:
    if row.forecast_step is None or row.forecast_low is None or row.forecast_high is None or row.bits_per_step is None:
        return ""
    return (
        f"; it grows {row.bits_per_step:.2g} bits a step and would get there near step {row.forecast_step:,} "
        f"({row.forecast_low:,} to {row.forecast_high:,})"
    )


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
