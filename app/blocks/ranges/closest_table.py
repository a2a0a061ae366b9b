"""The places closest to overflow as a table that can be sorted; a click on one shows it close up."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from ampscope.analysis.precision.ranges.ranges import RangeRow, Ranges
from ampscope.report import ranges_words
from ampscope.report.numbers import count
from ampscope.report.safe_text import short

_KEY = "closest-places"
_COLUMNS = {
    "Headroom, bits": st.column_config.NumberColumn(format="%.1f", width=112),
    "Place": st.column_config.TextColumn(width=330),
    "Phase": st.column_config.TextColumn(width=80),
    "Type": st.column_config.TextColumn(width=72),
    "Largest": st.column_config.NumberColumn(format="%.5g", width=90, help="Largest magnitude of all recorded steps"),
    "Bits in 100 steps": st.column_config.NumberColumn(format="%.2g", width=120, help="Growth, robustly"),
    "Subnormal": st.column_config.NumberColumn(format="percent", width=90, help="Share of the non-zero values"),
    "Zero": st.column_config.NumberColumn(format="percent", width=80, help="Share of all values"),
    "Not in float32": st.column_config.NumberColumn(
        format="percent",
        width=110,
        help="Share of all values: zero though float32 keeps them; empty: not known",
    ),
}


def closest_table(seen: Ranges, on_pick: Callable[[str, int | None], None]) -> None:
    """The table; ``on_pick`` gets the key of the place that was clicked."""
    rows = seen.rows

    def picked() -> None:
        cells = st.session_state[_KEY].selection.cells
        if cells and 0 <= cells[0][0] < len(rows):
            on_pick(rows[cells[0][0]].key, None)

    st.dataframe(
        [_cells(row) for row in rows],
        hide_index=True,
        height=min(38 + 35 * len(rows), 460),
        column_config=_COLUMNS,
        selection_mode="single-cell",
        on_select=picked,
        key=_KEY,
    )
    more = (
        f" The {count(len(seen.rows) - len(rows))} places that are farther are not shown." if rows != seen.rows else ""
    )
    st.caption(
        "Click on a place to see it close up. Gradients carry the loss scale, which makes room for them by itself; "
        f"they come after the rest, and what cannot grow comes last.{more}"
    )


def _cells(row: RangeRow) -> dict[str, object]:
    return {
        "Headroom, bits": row.headroom_bits,
        "Place": short(ranges_words.place_words(row), 120),
        "Phase": row.phase,
        "Type": row.dtype,
        "Line": short(ranges_words.line(row), 60),
        "Largest": row.largest,
        "Bits in 100 steps": 100 * row.bits_per_step if row.bits_per_step is not None else None,
        "Overflows at": ranges_words.forecast(row),
        "Subnormal": row.underflow_share,
        "Zero": row.zero_share,
        "Not in float32": row.flushed_share,
    }
