"""A part of a page that redraws itself while the run on screen is being written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import streamlit as st

from ampscope.errors import AmpscopeError
from blocks.basics.text import alarm
from data.current_run import current_run, refreshed_run
from data.run_results import alarms_of
from data.run_snapshot import RunSnapshot

#: Seconds between two looks at a run that is being written.
LOOK_EVERY = 2

Draw = Callable[[RunSnapshot], None]


def live_part(draw: Draw) -> None:
    """Draw a part of the page; while the run is being written it redraws itself, and nothing else, with what is new.

    What has gone wrong meanwhile has the whole page drawn again, so that no part of it is older than a mark in another.

    Args:
        draw: Draws it from the run as it is at that moment.
    """
    every = LOOK_EVERY if current_run().is_open else None
    st.fragment(_drawing(draw), run_every=every)()


def _drawing(draw: Draw) -> Callable[[], None]:
    told = alarms_of(current_run()) if current_run().is_open else None
    is_page = True  # what follows are redrawings of this part

    def drawn() -> None:
        nonlocal is_page
        run, was_page, is_page = current_run(), is_page, False
        try:
            if run.is_open and not was_page:
                run = refreshed_run()
                if alarms_of(run) != told:
                    st.rerun()
            draw(run)
        except AmpscopeError as error:  # the run was moved away, or damaged, while it was on screen
            alarm("This part cannot be shown", str(error))

    function = draw.func if isinstance(draw, partial) else draw
    drawn.__qualname__ = f"{function.__module__}.{function.__qualname__}"  # by which Streamlit tells fragments apart
    return drawn
