"""Parts of a page redraw themselves while the run on screen is being written; its pulse beats in the side bar.

What went wrong anew can change anything on any page, and is rare: then the page is drawn again as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import streamlit as st

from ampscope.analysis.overview.run_list import Pulse
from ampscope.errors import AmpscopeError
from ampscope.report.html.markup import as_html
from ampscope.report.numbers import ago, count, seconds
from blocks.text import alarm
from data.run_results import alarms_of, pulse_of
from data.run_snapshot import RunSnapshot, current_run, refreshed_run

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


_ANNOUNCED = "_ampscope_announced"


def run_pulse() -> None:
    """How fresh a run being written is; announces what goes wrong in it. A finished run is left alone."""
    run = current_run()
    if run.is_open:
        _announce(run.path, pulse_of(run))
        st.fragment(_redrawn_pulse, run_every=LOOK_EVERY)()


def pulse_html(pulse: Pulse, now: float) -> str:
    """When a run was last heard of; a silence that is too long says so."""
    silent = pulse.silence(now)
    if silent is None:
        return '<div class="amp-place">No step yet.</div>'
    words = [f"Step {count(pulse.last_step or 0)}, {ago(silent)}."]
    if pulse.is_overdue(now):
        usual = f" where a step takes {seconds(pulse.step_seconds)}" if pulse.step_seconds else ""
        words.append(
            f"Nothing was heard since{usual}: it may be evaluating or saving; if this goes on, its process is stuck."
        )
    mark = '<span class="amp-chip warning">silent</span>' if pulse.is_overdue(now) else ""
    return f'{mark}<div class="amp-place">{as_html(" ".join(words), 400)}</div>'


def _redrawn_pulse() -> None:
    try:
        run = refreshed_run()
        pulse = pulse_of(run)
    except AmpscopeError as error:
        alarm("This run can no longer be read", str(error))
        return
    if not run.is_open or st.session_state.get(_ANNOUNCED) != _troubles(run.path, pulse):
        st.rerun()  # the whole page once more; of a run that has ended it then stands still
    st.html(pulse_html(pulse, time.time()))


def _announce(path: str, pulse: Pulse) -> None:
    """A toast for what went wrong since the last look; what was there when the page was opened is on the page."""
    before = st.session_state.get(_ANNOUNCED)
    st.session_state[_ANNOUNCED] = _troubles(path, pulse)
    if not isinstance(before, tuple) or before[0] != path:
        return
    for kind, new, step in (
        ("incident", pulse.incidents - before[1], pulse.last_incident),
        ("usage finding", pulse.findings - before[2], pulse.last_finding),
    ):
        if new > 0 and step is not None:
            st.toast(f"{count(new, f'new {kind}')}, at step {count(step)}", icon=":material/error:")


def _troubles(path: str, pulse: Pulse) -> tuple[str, int, int]:
    """Returns the counts of what has gone wrong so far, for comparison with later ones."""
    return path, pulse.incidents, pulse.findings
