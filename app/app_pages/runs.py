"""Runs: which of my trainings went well, which did not, and where is the one I look for?"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st

from ampscope.analysis.overview.run_list import RunSummary
from ampscope.report.numbers import count, seconds
from ampscope.report.palette import ALARM, GOOD, SEVERITIES
from ampscope.report.safe_text import short
from ampscope.report.terminal.run_list import evidence, verdict_in_words
from ampscope.trace.vocabulary import Severity, Verdict
from blocks.basics.page_links import to_compare
from blocks.basics.text import paragraph
from data.run_folders import OfferedRun, offered_runs, run_folders
from data.run_list import RunList, ShortVerdict, run_list
from state.pages import Page

#: Seconds between two drawings of the table, and how many of them go into diagnosing runs.
_REDRAW_EVERY, _DIAGNOSE_S = 2, 0.5
#: Whether all there is to know of the runs is known, so that the table need not be drawn again.
_COMPLETE = "_run_list_complete"
_NOT_EXAMINED = "not examined"
#: What a verdict looks like; being written is no verdict, but as important.
_COLOURS = {
    Verdict.HEALTHY.value: GOOD,
    verdict_in_words(Verdict.AT_RISK): SEVERITIES[Severity.WARNING],
    Verdict.PROBLEM.value: ALARM,
    verdict_in_words(Verdict.NOT_OBSERVED): SEVERITIES[Severity.WARNING],
    "unreadable": SEVERITIES[Severity.WARNING],
    _NOT_EXAMINED: SEVERITIES[Severity.INFO],
}
_STATES = {"open": "being written", "closed": "finished", "interrupted": "died"}
_COLUMNS = {
    "Verdict": st.column_config.MultiselectColumn(
        options=list(_COLOURS), color=list(_COLOURS.values()), width=112, help="What the diagnosis found"
    ),
    "What": st.column_config.TextColumn(width="medium"),
    "Steps": st.column_config.NumberColumn(format="localized", width=70, help="Optimizer steps tried"),
    "Skipped": st.column_config.ProgressColumn(
        format="percent", min_value=0, max_value=1, width=110, help="Share of steps that the scaler skipped"
    ),
    "Started": st.column_config.DatetimeColumn(format="distance", width=112),
    "Lasted": st.column_config.TextColumn(width="small", help="From the start to the newest step"),
    "State": st.column_config.TextColumn(width="small"),
    "Tags": st.column_config.ListColumn(width="small"),
}


def runs_page() -> None:
    st.title("Runs", anchor=False)
    search = st.text_input(
        "Search",
        placeholder="words of its name, model, device, tags, state or verdict",
        max_chars=200,
        key="search",
        bind="query-params",
    )
    is_complete = st.session_state.get(_COMPLETE, False)
    st.fragment(found_runs, run_every=None if is_complete else _REDRAW_EVERY)(search)


def found_runs(search: str) -> None:
    """The table, drawn again while a run in it is being written or examined."""
    known, offered = run_list(), offered_runs(run_folders())
    summaries = known.summaries([run.path for run in offered.values()])
    rows = {key: row(run, summaries[run.path], known.verdict(summaries[run.path])) for key, run in offered.items()}
    matches = [key for key, run in offered.items() if summaries[run.path].matches(search, *searched_words(rows[key]))]
    if matches:
        paragraph(f"{count(len(matches), 'run')}, the newest first. Tick one to open it; the head of a column sorts.")
        to_compare()
        table([rows[key] for key in matches], matches)
    else:
        paragraph(
            f"None of the {count(len(offered))} runs has all of these words in its name, model, device or verdict."
        )
    unknown = examined_so_far([one for one in summaries.values() if not one.problem], known)
    # Last of all, so that the list is on screen while it goes on, and not at the first drawing.
    done = known.diagnose(unknown, _DIAGNOSE_S if _COMPLETE in st.session_state else 0.0)
    is_complete = done and all(one.status != "open" for one in summaries.values())
    before, st.session_state[_COMPLETE] = st.session_state.get(_COMPLETE, False), is_complete
    if before != is_complete:
        st.rerun()


def examined_so_far(readable: Sequence[RunSummary], known: RunList) -> list[RunSummary]:
    """Say how many of the runs are examined; those that are not."""
    unknown = [one for one in readable if known.verdict(one) is None]
    if unknown:
        examined = count(len(readable) - len(unknown))
        st.caption(f"{examined} of {count(len(readable), 'run')} examined so far; the others follow.")
    return unknown


def row(run: OfferedRun, one: RunSummary, verdict: ShortVerdict | None) -> dict[str, object]:
    """A run in the table."""
    if verdict is None:
        verdict = ShortVerdict("unreadable", one.problem) if one.problem else ShortVerdict(_NOT_EXAMINED, evidence(one))
    return {
        "Run": run.label,
        "Verdict": [verdict.verdict],
        "What": short(verdict.what, 160),
        "Steps": one.steps,
        "Skipped": one.skipped_share,
        "Started": datetime.fromtimestamp(one.created, tz=UTC) if one.created else None,
        "Lasted": seconds(one.duration),
        "State": _STATES.get(one.status, one.status),
        "Model": short(one.model, 40),
        "Device": short(one.device, 40),
        "Tags": [short(tag, 30) for tag in one.tags],
    }


def searched_words(cells: dict[str, object]) -> tuple[str, ...]:
    """What a search finds of a row beside the run's own facts: what the reader sees of its verdict."""
    return str(cells["Verdict"]), str(cells["What"]), str(cells["State"])


def table(rows: Sequence[dict[str, object]], keys: Sequence[str]) -> None:
    """The rows; the one that is ticked opens the run of that place in ``keys``.

    Not the cell that is clicked: a click on a head, which sorts, selects a cell as well.
    """
    picked = st.dataframe(
        rows,
        hide_index=True,
        height=min(38 + 35 * len(rows), 720),
        column_config=_COLUMNS,
        selection_mode="single-row",
        on_select="rerun",
        key="run_list",
    )
    if ticked := picked.selection.rows:
        st.switch_page(Page.OVERVIEW.file, query_params={"run": keys[ticked[0]]})


runs_page()
