"""Runs: which of my trainings went well, which did not, and where is the one I look for?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import streamlit as st

from ampscope.analysis.arrays import Curve
from ampscope.analysis.overview.run_list import RunSummary
from ampscope.analysis.words import power_of_two
from ampscope.report.figures.stack import sparkline
from ampscope.report.numbers import count, seconds, share, since, value
from ampscope.report.safe_text import short
from ampscope.report.terminal.runs_text import evidence, verdict_in_words
from ampscope.trace.vocabulary import Verdict
from blocks.components.data_table import Cell
from blocks.page_links import Way, to_compare
from blocks.table import table
from blocks.text import paragraph, title
from data.run_folders import OfferedRun, offered_runs, run_folders
from data.run_list import RunList, ShortVerdict, run_list
from state import Page

#: Seconds between two drawings of the table, and how many of them go into diagnosing runs.
_REDRAW_EVERY, _DIAGNOSE_S = 2, 0.5
#: Whether all there is to know of the runs is known, so that the table need not be drawn again.
_COMPLETE = "_run_list_complete"
_NOT_EXAMINED = "not examined"
#: What a verdict looks like.
_KINDS = {
    verdict_in_words(Verdict.HEALTHY): "good",
    verdict_in_words(Verdict.AT_RISK): "warning",
    verdict_in_words(Verdict.PROBLEM): "error",
    _NOT_EXAMINED: "info",
}
_STATES = {"open": "being written", "closed": "finished", "interrupted": "died"}
_COLUMNS = (
    "Run",
    "Verdict",
    "What",
    "Steps",
    "Loss",
    "Loss scale",
    "Skipped",
    "Started",
    "Lasted",
    "State",
    "Model",
    "Device",
    "Tags",
)


def runs_page() -> None:
    title("Runs")
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
        paragraph(f"{count(len(matches), 'run')}; loss and loss scale are those of the newest step.")
        to_compare()
        ways = [Way(Page.OVERVIEW, {"run": key}) for key in matches]
        width = len(_COLUMNS) - (not any(one.tags for one in summaries.values()))  # no room for what nobody uses
        shown = [rows[key][:width] for key in matches]
        table("Runs", _COLUMNS[:width], shown, numeric=("Steps", "Skipped"), ways=ways, filters=False)
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
        examined = len(readable) - len(unknown)
        told = f"{count(examined)} of {count(len(readable), 'run')} examined so far; the others follow."
        st.caption(told if examined else "The runs are examined one after the other.")
    return unknown


def row(run: OfferedRun, one: RunSummary, verdict: ShortVerdict | None) -> tuple[Cell, ...]:
    """A run in the table."""
    if verdict is None:
        verdict = ShortVerdict("unreadable", one.problem) if one.problem else ShortVerdict(_NOT_EXAMINED, evidence(one))
    skipped = one.skipped_share
    return (
        Cell(run.label),
        Cell(verdict.verdict, kind=_KINDS.get(verdict.verdict, "warning")),
        Cell(verdict.what),
        Cell(count(one.steps), one.steps),
        curve_cell(one.loss, value),
        curve_cell(one.scale, lambda power: power_of_two(round(power))),
        Cell("") if skipped is None else Cell(share(skipped), skipped, part=skipped),
        Cell(since(one.created, time.time()) if one.created else "", -one.created),
        Cell(seconds(one.duration), one.duration),
        Cell(_STATES.get(one.status, one.status)),
        Cell(short(one.model, 40)),
        Cell(short(one.device, 40)),
        Cell(", ".join(short(tag, 30) for tag in one.tags)),
    )


def curve_cell(curve: Curve, words: Callable[[float], str]) -> Cell:
    """A curve with its newest value in words."""
    if curve.is_empty:
        return Cell("")
    if not curve.steps or max(curve.nonfinite, default=-1) > curve.steps[-1]:
        return Cell("not finite", curve=sparkline(curve))
    return Cell(words(curve.values[-1]), curve.values[-1], curve=sparkline(curve))


def searched_words(cells: tuple[Cell, ...]) -> tuple[str, ...]:
    """Returns the words of a row that a search looks at besides the run's own facts: those of its verdict."""
    return tuple(cells[_COLUMNS.index(name)].text for name in ("Verdict", "What", "State"))


runs_page()
