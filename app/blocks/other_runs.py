"""Every page tells that another run has begun or gone wrong, and how to make one before there is any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import streamlit as st

from ampscope.analysis.overview.run_list import RunSummary
from ampscope.report.html.markup import as_html
from ampscope.report.terminal.runs_text import verdict_in_words
from ampscope.trace.vocabulary import Verdict
from blocks.page_links import to_run
from blocks.text import alarm, heading, paragraph
from data.run_folders import ASK_AGAIN_S, OfferedRun, RunFolder
from data.run_list import run_list
from data.run_snapshot import current_run

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


#: Seconds between two looks for new runs.
LOOK_FOR_RUNS_EVERY = 10


def await_runs(offered: Mapping[str, object], look: Callable[[], Mapping[str, object]]) -> None:
    """Draw the whole page again once ``look`` finds other runs than those ``offered``: the next training has begun."""

    def look_again() -> None:
        if look().keys() != offered.keys():
            st.rerun()

    st.fragment(look_again, run_every=LOOK_FOR_RUNS_EVERY)()


_LINE = """\
import ampscope

ampscope.watch(model, scaler)  # once, before the training loop
"""


def unreachable(folders: Mapping[RunFolder, str]) -> None:
    """Say in which folders no run could be looked for, and why."""
    for folder, why in folders.items():
        again = f"The app asks again every {ASK_AGAIN_S} seconds."
        alarm(f"Runs in {folder.path} cannot be listed", f"{why}\n{again}")


def samples_only(folders: Sequence[RunFolder]) -> None:
    """Say, above a sample, that there is no run of the reader's own yet, and which line makes one."""
    own = ", ".join(str(folder.path) for folder in folders if not folder.is_sample)
    if not own:
        paragraph("What follows is a sample.")
        return
    paragraph(f"A sample: there is no run of yours in {own} yet. One line, before the training loop, makes one:")
    st.code("ampscope.watch(model, scaler)", language="python")


def welcome(folders: Sequence[RunFolder]) -> None:
    """Say that there is no run, where runs were looked for, and which line makes one."""
    st.title("No run yet", anchor=False)
    paragraph("Add one line to your training script and start it; this page finds the run.")
    st.code(_LINE, language="python")
    heading("Where runs were looked for")
    for folder in folders:
        if not folder.is_sample:
            st.code(str(folder.path), language=None, wrap_lines=True)
    paragraph("Look somewhere else with:")
    st.code("ampscope view FOLDER", language="bash")
    st.button("Look again")
