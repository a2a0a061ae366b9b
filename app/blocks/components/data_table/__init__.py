"""A table that can be sorted, filtered, unfolded, copied and saved; its rows lead on. Text in it is text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import streamlit as st

from ampscope.report.safe_text import short
from blocks.components.declared import declared

#: It looks like the report's tables, by the same style sheet.
_TABLE = declared(__file__, "data_table", '<div class="amp-data"></div>', isolate_styles=False)
#: Characters of a cell, and rows of a table, that go to the browser.
_LONGEST, _MOST = 600, 2000


class Cell(NamedTuple):
    """The content of a table's cell."""

    text: str
    key: float | None = None  #: by which its column sorts; without one, by the text
    kind: str = ""  #: ``error``, ``warning``, ``good`` or ``info``: drawn as a chip
    part: float | None = None  #: how much of the cell is filled, 0 to 1
    curve: tuple[int, ...] = ()  #: heights of a small curve beside the text, 0 to 100; -1 for a value not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class TableData:
    """The content of a table, as the browser draws it."""

    label: str  #: what it shows, for a reader who does not see it, and for the name of a file
    columns: tuple[str, ...]
    numeric: frozenset[str]  #: columns that are set to the right
    rows: Sequence[tuple[Cell, ...]]
    links: Sequence[str] = ()  #: where the first cell of each row leads
    picks: bool = False  #: whether the first cell of a row can be picked
    folds: Sequence[tuple[int, int]] = ()  #: first and last of neighbouring rows that are one at first
    fold: str = ""  #: the column by which the rows of a fold differ
    filters: bool = True  #: whether it has a field that filters it
    shown: int = 30  #: rows before a button that shows the rest


def data_table(key: str, table: TableData, on_go: Callable[[int], None]) -> None:
    """The table; ``on_go`` gets the number of a row whose first cell was clicked, before the page is drawn again."""

    def went() -> None:
        state = st.session_state.get(key)
        number = state.get("row") if state else None
        if isinstance(number, int) and 0 <= number < len(table.rows):
            on_go(number)

    _TABLE(key=key, data=_told(table), on_row_change=went)


def _told(table: TableData) -> dict[str, object]:
    rows = tuple(tuple(_cell(cell) for cell in row) for row in table.rows[:_MOST])
    return {
        "label": table.label,
        "columns": table.columns,
        "numeric": tuple(name in table.numeric for name in table.columns),
        "rows": rows,  # tuples: of a list, Streamlit asks pandas whether it is a table
        "links": tuple(table.links[:_MOST]),
        "picks": table.picks,
        "folds": tuple(fold for fold in table.folds if fold[1] < _MOST),
        "fold": table.fold,
        "filters": table.filters,
        "shown": table.shown,
        "left": max(len(table.rows) - _MOST, 0),
    }


def _cell(cell: Cell) -> str | tuple[object, ...]:
    text = short(cell.text, _LONGEST)
    key = cell.key if cell.key is not None and math.isfinite(cell.key) else None  # JSON knows no other number
    if cell.curve:
        return text, key, cell.kind, cell.part, cell.curve
    return (text, key, cell.kind, cell.part) if key is not None or cell.kind else text
