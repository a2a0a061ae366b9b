"""A part of a page that redraws itself while the run on screen is being written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import streamlit as st

from ampscope.errors import AmpscopeError
from blocks.basics.text import alarm
from data.current_run import current_run, refreshed_run
from data.run_snapshot import RunSnapshot

#: Seconds between two looks at a run that is being written.
LOOK_EVERY = 2

Draw = Callable[[RunSnapshot], None]


def live_part(draw: Draw) -> None:
    """Draw a part of the page; while the run is being written it redraws itself, and nothing else, with what is new.

    Args:
        draw: Draws it from the run as it is at that moment.
    """
    every = LOOK_EVERY if current_run().is_open else None
    st.fragment(_drawing(draw), run_every=every)()


def _drawing(draw: Draw) -> Callable[[], None]:
    def drawn() -> None:
        run = current_run()
        try:
            draw(refreshed_run() if run.is_open else run)
        except AmpscopeError as error:  # the run was moved away, or damaged, while it was on screen
            alarm("This part cannot be shown", str(error))

    function = draw.func if isinstance(draw, partial) else draw
    drawn.__qualname__ = f"{function.__module__}.{function.__qualname__}"  # by which Streamlit tells fragments apart
    return drawn
