"""The side bar: which run is on screen, and whether it is still being written."""

from __future__ import annotations

import time

import streamlit as st

from ampscope.analysis.causes.catalogue import cause_in_words
from ampscope.errors import AmpscopeError
from ampscope.report.html.markup import as_html
from ampscope.report.numbers import since
from ampscope.report.terminal.run_list import verdict_in_words
from ampscope.trace.vocabulary import Verdict
from blocks.choices.select_box import choose
from blocks.frame.live_part import live_part
from blocks.frame.navigation import page_links
from blocks.frame.run_pulse import run_pulse
from data.current_run import select_run
from data.run_folders import OfferedRun
from data.run_results import diagnosis_of
from data.run_snapshot import RunSnapshot
from state.query_params import switch_run


def choose_run(offered: dict[str, OfferedRun], *, with_verdict: bool) -> None:
    """Let the reader choose among ``offered`` and open the choice.

    Args:
        offered: The runs by key.
        with_verdict: Whether to say what is wrong with it, which on a first look takes a while.

    Raises:
        RunError: the chosen run cannot be read; the others still can be chosen.
    """
    with st.sidebar:
        pages = st.container()
        st.divider()
        asked = st.query_params.get("run")
        own = [each for each in offered.values() if not each.is_sample]
        key = choose("run", "Run", list(offered), lambda key: offered[key].label, named=len(own) != 1)
        switch_run(key, drop_params=asked not in (None, key))
        world = 1
        try:
            world = select_run(offered[key].path).world.size
        finally:  # also of a run that cannot be read
            with pages:
                page_links(key, world)
        live_part(_facts)
        if with_verdict:
            live_part(_verdict)
        run_pulse()


def _verdict(run: RunSnapshot) -> None:
    """The verdict in a few words, on every page."""
    try:
        diagnosis = diagnosis_of(run)
    except AmpscopeError:
        return  # the page says so
    primary = diagnosis.primary
    kind = primary.severity.value if primary else "good" if diagnosis.verdict is Verdict.HEALTHY else "warning"
    words = cause_in_words(primary.cause) if primary else ""
    when_judged = f'<div class="amp-place">judged after step {diagnosis.run.steps:,}</div>' if run.is_open else ""
    st.html(f'<span class="amp-chip {kind}">{verdict_in_words(diagnosis.verdict)}</span> {as_html(words)}{when_judged}')


def _facts(run: RunSnapshot) -> None:
    words = {
        "open": "Being written now",
        "closed": "Finished",
        "interrupted": "Its process died; what it wrote until then is here",
    }
    started = f"Started {since(run.created, time.time())}" if run.created else ""
    lines = [words.get(run.status, run.status), started]
    st.html("".join(f'<div class="amp-place">{as_html(line)}</div>' for line in lines if line))
