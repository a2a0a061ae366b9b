"""The places closest to overflow as a table that can be sorted; a click on one shows it close up."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from ampscope.analysis.precision.ranges.ranges import RangeRow, Ranges
from ampscope.report.numbers import share, value
from ampscope.report.wording import ranges_words
from blocks.basics.table import table
from blocks.components.data_table.data_table import Cell

_COLUMNS = (
    "Place",
    "Headroom, bits",
    "Phase",
    "Type",
    "Line",
    "Largest",
    "Bits in 100 steps",
    "Overflows at",
    "Subnormal",
    "Zero",
    "Not in float32",
)
_NUMERIC = ("Headroom, bits", "Largest", "Bits in 100 steps", "Subnormal", "Zero", "Not in float32")


def closest_table(seen: Ranges, on_pick: Callable[[str, int | None], None]) -> None:
    """The table; ``on_pick`` gets the key of the place that was clicked."""
    rows = seen.rows
    table(
        "Closest to overflow",
        _COLUMNS,
        [_cells(row) for row in rows],
        numeric=_NUMERIC,
        on_pick=lambda number: on_pick(rows[number].key, None),
    )
    st.caption(
        "Click on a place to see it close up. Gradients carry the loss scale, which makes room for them by itself; "
        "they come after the rest, and what cannot grow comes last. Subnormal is the share of the non-zero values, "
        "zero that of all; not in float32: zero though float32 keeps them."
    )


def _cells(row: RangeRow) -> tuple[str | Cell, ...]:
    return (
        ranges_words.place_words(row),
        _number(row.headroom_bits, "" if row.headroom_bits is None else f"{row.headroom_bits:.1f}"),
        row.phase,
        row.dtype,
        ranges_words.line(row),
        _number(row.largest, value(row.largest, missing="")),
        _number(row.bits_per_step, ranges_words.growth(row)),
        ranges_words.forecast(row),
        *(_number(part, share(part, missing="")) for part in (row.underflow_share, row.zero_share, row.flushed_share)),
    )


def _number(key: float | None, words: str) -> Cell:
    return Cell(words, key)
