"""The table of every page: sorted, filtered, unfolded, copied and saved by the reader; rows may lead on."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

import streamlit as st

from blocks.components.data_table import Cell, TableData, data_table
from blocks.page_links import Way, switch_to
from blocks.text import keep_room

_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)
#: Neighbouring rows that say the same from which on they are one at first.
_ALIKE = 4
_WENT = "_ampscope_table_went"
#: Pixels: a row whose cells have one line each, and the filter of a table of more than so many rows.
_ROW, _FILTER, _FEW = 31, 39, 8


def table(
    label: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Cell]],
    *,
    numeric: Collection[str] = (),
    ways: Sequence[Way] = (),
    on_pick: Callable[[int], None] | None = None,
    fold: str = "",
    filters: bool = True,
) -> None:
    """``rows`` under ``columns``.

    Args:
        label: What it shows; no other table of the page has the same.
        columns: Their names.
        rows: Of each row the cells.
        numeric: Columns that are set to the right and sorted by the number that a cell begins with.
        ways: Where the first cell of each row leads; nowhere where there are none.
        on_pick: Gets the number of the row whose first cell was picked, before the page is drawn again.
        fold: The column that counts: neighbours that differ in it alone are one row that opens.
        filters: Whether it has a field that filters it; not where the page has one.
    """
    by = columns.index(fold) if fold else 0
    cells = [tuple(_cell(cell, name in numeric) for name, cell in zip(columns, row, strict=True)) for row in rows]
    key = f"table {label}"

    def go(number: int) -> None:
        if on_pick is not None:
            on_pick(number)
        else:
            st.session_state[_WENT] = key, ways[number]  # of the rows that were clicked: now they may be others

    told = TableData(
        label=label,
        columns=tuple(columns),
        numeric=frozenset(numeric),
        rows=cells,
        links=tuple(way.address for way in ways),
        picks=on_pick is not None,
        folds=folds(cells, by) if fold else (),
        fold=fold,
        filters=filters,
    )
    keep_room(key, _room(told))
    data_table(key, told, go)
    if st.session_state.get(_WENT, ("",))[0] == key:
        switch_to(st.session_state.pop(_WENT)[1])


def folds(rows: Sequence[tuple[Cell, ...]], by: int) -> list[tuple[int, int]]:
    """First and last of neighbouring rows, at least four, that are the same but for the cell ``by``."""
    alike = [(*row[:by], *row[by + 1 :]) for row in rows]
    ends = [at for at in range(len(rows)) if at + 1 == len(rows) or alike[at] != alike[at + 1]]
    starts = [0, *(end + 1 for end in ends)]
    return [(start, end) for start, end in zip(starts, ends, strict=False) if end - start + 1 >= _ALIKE]


def _room(told: TableData) -> int:
    """The least height of the table: head, rows and foot."""
    folded = sum(last - first for first, last in told.folds)
    rows = len(told.rows) - folded
    shown = rows if rows <= told.shown + 3 else told.shown
    return _ROW * (shown + 2) + (_FILTER if told.filters and len(told.rows) > _FEW else 0)


def _cell(cell: str | Cell, is_number: bool) -> Cell:
    if isinstance(cell, Cell):
        return cell
    found = _NUMBER.match(cell) if is_number else None
    return Cell(cell, float(found[0].replace(",", ""))) if found else Cell(cell)
