"""The side bar offers the pages and says how the run goes, as the browser's tab does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from ampscope.analysis.results import Diagnosis, Incident
from ampscope.errors import AmpscopeError
from ampscope.report.html.markup import as_html
from ampscope.report.numbers import since
from ampscope.report.palette import ALARM, DTYPES, GOOD, SEVERITIES
from ampscope.report.safe_text import short
from ampscope.report.terminal.runs_text import verdict_in_words
from ampscope.trace.read.find import told_name
from ampscope.trace.schema import Trigger
from ampscope.trace.vocabulary import Severity, Verdict
from blocks.components.habits import draw_again, fold_side_bar
from blocks.live_part import live_part, run_pulse
from blocks.page_links import kept_query
from data.run_results import diagnosis_of
from data.run_snapshot import RunSnapshot, current_run
from state import Page, get_param


def page_of(page: Page) -> StreamlitPage:
    """A page for Streamlit, which knows its address by it."""
    return st.Page(page.file, title=page.title, icon=page.icon, default=page.is_default)


def page_links(run: str, world: int) -> None:
    """The pages that there are for a run of ``world`` ranks: links that name the run by its key, and what is kept."""
    with st.container(gap="xsmall", key="amp-pages"):
        for page in Page:
            if page.is_offered(world):
                st.page_link(page.file, label=page.title, icon=page.icon, query_params={**kept_query(), "run": run})
    fold_side_bar()
    draw_again()


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


_NONFINITE = frozenset(one.value for one in Trigger if one.value.startswith("nonfinite"))
_LAST = "_ampscope_tab"
#: Characters of a run's name.
_LONGEST = 40
_WAVE = "M4 17h6l3-9 6 16 3-7h6"
_EXCLAMATION = "M16 7v11m0 6v1"
#: A ground and a mark, so that it is told by its shape, too.
_CALM, _WARNING, _PROBLEM = (
    (DTYPES["float32"], _WAVE),
    (SEVERITIES[Severity.WARNING], _EXCLAMATION),
    (ALARM, _EXCLAMATION),
)
_MARKS = {Verdict.PROBLEM: _PROBLEM, Verdict.AT_RISK: _WARNING, Verdict.PARTLY_OBSERVED: _WARNING}


class Tab(NamedTuple):
    """A tab's title, and its icon as an address that holds it: a file elsewhere would be fetched from outside."""

    title: str
    icon: str


def tab_of(run: RunSnapshot, *, with_verdict: bool) -> Tab:
    """``NaN @87 my-run``; of a run in which nothing broke its name alone.

    Args:
        run: The run on screen.
        with_verdict: Whether to say how it is, which on a first look takes a while.
    """
    try:
        diagnosis = diagnosis_of(run) if with_verdict else None
    except AmpscopeError:
        diagnosis = None  # the page says so
    state = _state(diagnosis) if diagnosis else ""
    icon = tab_icon(diagnosis.verdict if diagnosis else None, is_live=run.is_open)
    return Tab(f"{state}{short(told_name(Path(run.path)), _LONGEST)} - AMPscope", icon)


def label_tab(tab: Tab) -> None:
    """Have the browser's tab say it, and say it still while the page is drawn again."""
    st.set_page_config(page_title=tab.title, page_icon=tab.icon)
    st.session_state[_LAST] = tab


def last_tab() -> Tab:
    """Returns the tab's latest label: a page that is drawn anew takes a moment to know its own."""
    last = st.session_state.get(_LAST)
    return last if isinstance(last, Tab) else Tab("AMPscope", tab_icon())


def tab_icon(verdict: Verdict | None = None, *, is_live: bool = False) -> str:
    """An exclamation mark where something is wrong, else a wave; a dot while the run is being written."""
    ground, mark = _MARKS.get(verdict or Verdict.HEALTHY, _CALM)
    dot = f'<circle cx="25" cy="7" r="5" fill="{GOOD}" stroke="#fff" stroke-width="2"/>' if is_live else ""
    line = 'fill="none" stroke="#fff" stroke-width="3" stroke-linecap="round" stroke-linejoin="round"'
    shapes = f'<rect width="32" height="32" rx="7" fill="{ground}"/><path d="{mark}" {line}/>{dot}'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">{shapes}</svg>'
    return f"data:image/svg+xml,{quote(svg)}"


def _state(diagnosis: Diagnosis) -> str:
    primary = diagnosis.primary
    if diagnosis.verdict is Verdict.HEALTHY or primary is None:
        return ""
    is_nan = isinstance(primary, Incident) and primary.trigger in _NONFINITE
    return f"{'NaN' if is_nan else verdict_in_words(diagnosis.verdict)} @{primary.step} "
