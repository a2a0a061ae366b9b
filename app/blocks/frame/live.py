"""Follows a run that is being written: parts of a page that redraw themselves, its pulse in the side bar, alarms.

What went wrong anew can change anything on any page, and is rare: then the page is drawn again as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import streamlit as st
from data import loader

from ampscope.analysis.overview.pulse import Pulse
from ampscope.errors import AmpscopeError
from ampscope.report.html.markup import as_html
from ampscope.report.numbers import ago, count, seconds
from blocks.basics.notes import alarm

#: Seconds between two looks at a run that is being written.
LOOK_EVERY = 2
#: Seconds between two looks for new runs.
LOOK_FOR_RUNS_EVERY = 10
_HEARD = "_ampscope_heard"

Draw = Callable[[loader.Loaded], None]


def part(draw: Draw) -> None:
    """Draw a part of the page; while the run is being written it redraws itself, and nothing else, with what is new.

    Args:
        draw: Draws it from the run as it is at that moment.
    """
    every = LOOK_EVERY if loader.current().is_open else None
    st.fragment(_drawing(draw), run_every=every)()


def follow() -> None:
    """How fresh a run being written is; announces what goes wrong in it. A finished run is left alone."""
    run = loader.current()
    if run.is_open:
        _announce(run.path, run.pulse())
        st.fragment(_beat, run_every=LOOK_EVERY)()


def await_runs(found: Mapping[str, object], look: Callable[[], Mapping[str, object]]) -> None:
    """Draw the whole page again once ``look`` finds other runs than those ``found``: the next training has begun."""

    def look_again() -> None:
        if look().keys() != found.keys():
            st.rerun()

    st.fragment(look_again, run_every=LOOK_FOR_RUNS_EVERY)()


def _drawing(draw: Draw) -> Callable[[], None]:
    def drawn() -> None:
        known = loader.current()
        try:
            draw(loader.newest() if known.is_open else known)
        except AmpscopeError as error:  # the run was moved away, or damaged, while it was on screen
            alarm("This part cannot be shown", str(error))

    function = draw.func if isinstance(draw, partial) else draw
    drawn.__qualname__ = f"{function.__module__}.{function.__qualname__}"  # by which Streamlit tells fragments apart
    return drawn


def _beat() -> None:
    try:
        run = loader.newest()
        seen = run.pulse()
    except AmpscopeError as error:
        alarm("This run can no longer be read", str(error))
        return
    if not run.is_open or st.session_state.get(_HEARD) != _alarms(run.path, seen):
        st.rerun()  # the whole page once more; of a run that has ended it then stands still
    st.html(pulse_html(seen, time.time()))


def pulse_html(seen: Pulse, now: float) -> str:
    """When a run was last heard of; a silence that is too long says so."""
    silent = seen.silence(now)
    if silent is None:
        return '<div class="amp-place">No step yet.</div>'
    words = [f"Step {count(seen.last_step or 0)}, {ago(silent)}."]
    if seen.is_overdue(now):
        usual = f" where a step takes {seconds(seen.step_seconds)}" if seen.step_seconds else ""
        words.append(
            f"Nothing was heard since{usual}: it may be evaluating or saving; if this goes on, its process is stuck."
        )
    mark = '<span class="amp-chip warning">silent</span>' if seen.is_overdue(now) else ""
    return f'{mark}<div class="amp-place">{as_html(" ".join(words), 400)}</div>'


def _alarms(path: str, seen: Pulse) -> tuple[str, int, int]:
    """What has gone wrong so far."""
    return path, seen.incidents, seen.findings


def _announce(path: str, seen: Pulse) -> None:
    """A toast for what went wrong since the last look; what was there when the page was opened is on the page."""
    heard = st.session_state.get(_HEARD)
    st.session_state[_HEARD] = _alarms(path, seen)
    if not isinstance(heard, tuple) or heard[0] != path:
        return
    for kind, new, step in (
        ("incident", seen.incidents - heard[1], seen.last_incident),
        ("usage finding", seen.findings - heard[2], seen.last_finding),
    ):
        if new > 0 and step is not None:
            st.toast(f"{count(new, f'new {kind}')}, at step {count(step)}", icon=":material/error:")
