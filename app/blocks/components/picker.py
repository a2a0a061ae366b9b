"""A list whose lines can be picked with a click or the keyboard, without a reload; text in it is text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import streamlit as st

from ampscope.report.safe_text import short
from blocks.components.declared import declared

_LIST = declared(__file__, "picker", '<div class="list" role="group"></div>')


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPiece:
    """A piece of a line's bar, in percent of its width."""

    left: float
    width: float
    kind: str  #: ``range``, ``values`` or ``alarm``
    color: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the list; ``id`` is what a pick of it reports."""

    id: int
    text: str
    lead: str = ""
    note: str = ""
    tail: str = ""
    hint: str = ""  #: the whole of what a narrow line cuts off
    href: str = ""  #: where it leads in a tab of its own
    depth: int = 0
    kind: str = ""  #: any of ``current``, ``bad``, ``near``, ``faint``
    bar: tuple[BarPiece, ...] | None = None


def picker(key: str, label: str, lines: Sequence[Line], on_pick: Callable[[int], None], *, height: int) -> None:
    """The list, at most ``height`` pixels tall and scrolled to its current line; ``on_pick`` gets a line's ``id``."""

    def picked() -> None:
        state = st.session_state.get(key)
        number = state.get("picked") if state else None
        if isinstance(number, int) and any(line.id == number for line in lines):
            on_pick(number)

    rows = tuple(_row(line) for line in lines)  # of a list, Streamlit asks pandas whether it is a table
    _LIST(key=key, data={"rows": rows, "label": label, "height": height}, on_picked_change=picked)


def _row(line: Line) -> dict[str, object]:
    row = asdict(line)
    return {**row, "text": short(line.text, 80), "note": short(line.note, 80), "hint": short(line.hint, 200)}
