"""The side bar: the pages, and how the run on screen goes."""

from __future__ import annotations

import time

import streamlit as st

from ampscope.report.html.markup import as_html
from ampscope.report.numbers import since
from blocks.frame.live_part import live_part
from blocks.frame.navigation import page_links
from blocks.frame.run_pulse import run_pulse
from data.current_run import current_run
from data.run_results import diagnosis_of
from data.run_snapshot import RunSnapshot
from state.query_params import get_param


def side_bar(*, with_verdict: bool) -> None:
    """The pages that there are for the run on screen, since when it is there, and its pulse.

    Args:
        with_verdict: Whether it has been judged, which on a first look takes a while.
    """
    with st.sidebar:
        page_links(get_param("run") or "", current_run().world.size)
        st.divider()
        live_part(_facts)
        if with_verdict and current_run().is_open:
            live_part(_judged)
        run_pulse()


def unreadable_side_bar() -> None:
    """The pages alone, for a run that cannot be read."""
    with st.sidebar:
        page_links(get_param("run") or "", 1)


def _judged(run: RunSnapshot) -> None:
    st.html(f'<div class="amp-place">Judged after step {diagnosis_of(run).run.steps:,}</div>')


def _facts(run: RunSnapshot) -> None:
    words = {
        "open": "Being written now",
        "closed": "Finished",
        "interrupted": "Its process died; what it wrote until then is here",
    }
    started = f"Started {since(run.created, time.time())}" if run.created else ""
    lines = [words.get(run.status, run.status), started]
    st.html("".join(f'<div class="amp-place">{as_html(line)}</div>' for line in lines if line))
