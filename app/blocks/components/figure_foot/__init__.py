"""The foot of a figure: saving it as a picture; over steps also its range, a crosshair and a name for who listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import streamlit as st

from blocks.components.declared import declared

#: What follows uses what stands before it: the browser gets one script.
_SCRIPTS = ("shapes", "picture", "steps", "foot")
_FOOT = declared(__file__, "figure_foot", '<div class="foot"></div>', _SCRIPTS)
#: Pixels; it has them before its script has run.
_HEIGHT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureFoot:
    """The foot of a figure, and the words that a picture of the figure says beside it."""

    figure: str  #: the figure's key; what is saved is in the container ``figure-`` and that
    title: str  #: stands above it in a picture, and in the buttons' names
    under: str  #: whose figure it is
    label: str  #: what it shows, for those who do not see it
    name: str  #: of the file it is saved in, without its ending
    steps: bool = False  #: whether it is a Plotly figure over steps
    range: str = ""  #: the steps in sight, in words; empty for all
    clickable: bool = False  #: whether its marks can be clicked


def figure_foot(foot: FigureFoot, on_range: Callable[[str], None]) -> None:
    """The foot; ``on_range`` is called before the page is drawn again.

    Args:
        foot: What it says.
        on_range: Gets the two ends of what a zoom has left in sight, or ``all``.
    """
    key = f"{foot.figure}-foot"

    def chosen() -> None:
        state = st.session_state.get(key)
        if told := state.get("range") if state else None:
            on_range(str(told))

    _FOOT(key=key, data=asdict(foot), height=_HEIGHT, on_range_change=chosen)
