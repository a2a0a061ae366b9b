"""Tells, on every page, that another run went wrong while this one was looked at: a quiet line that leads to it."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from ampscope.analysis.overview.run_list import RunSummary
from ampscope.report.html.markup import as_html
from ampscope.report.terminal.run_list import verdict_in_words
from ampscope.trace.vocabulary import Verdict
from blocks.basics.page_links import to_run
from data.current_run import current_run
from data.run_folders import OfferedRun
from data.run_list import run_list

#: Seconds between two looks, and how many of them may go into diagnosing runs.
LOOK_EVERY, _DIAGNOSE_S = 6, 0.5
#: Of each run, how much had gone wrong when the page was opened, or the run was last on screen.
_KNOWN = "_ampscope_known_troubles"


def other_runs(offered: Mapping[str, OfferedRun]) -> None:
    """A line for the newest run that has gone wrong since it was last on screen; looks again every few seconds."""

    def look() -> None:
        if (found := gone_wrong(offered)) is not None:
            key, what = found
            with st.container(horizontal=True, vertical_alignment="center", gap="small"):
                chip = f'<span class="amp-chip error">{verdict_in_words(Verdict.PROBLEM)}</span>'
                st.html(f"{chip} Run {as_html(offered[key].label, 90)}: {as_html(what, 200)}", width="content")
                to_run(key, "Look at it")

    st.fragment(look, run_every=LOOK_EVERY)()


def gone_wrong(offered: Mapping[str, OfferedRun]) -> tuple[str, str] | None:
    """The key of that run, and what is wrong with it in a few words; None where there is none."""
    if _KNOWN not in st.session_state:  # a first page does not wait until all runs are read
        st.session_state[_KNOWN] = None
        return None
    known, runs = run_list(), {key: run for key, run in offered.items() if not run.is_sample}
    seen = known.summaries([run.path for run in runs.values()])
    is_first = st.session_state[_KNOWN] is None
    before: dict[str, int] = {} if is_first else st.session_state[_KNOWN]
    st.session_state[_KNOWN] = before
    fresh = {}
    for key, run in runs.items():
        if is_first or str(run.path) == current_run().path:
            before[key] = _troubles(seen[run.path])
        elif _troubles(seen[run.path]) > before.get(key, 0):
            fresh[key] = seen[run.path]
    known.diagnose(fresh.values(), _DIAGNOSE_S)
    for key, one in fresh.items():
        found = known.verdict(one)
        if found is not None and found.verdict == verdict_in_words(Verdict.PROBLEM):
            return key, found.what
    return None


def _troubles(run: RunSummary) -> int:
    return run.incidents + run.findings
