"""Runs: which of my trainings went well, which did not, and where is the one I look for?"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st
from blocks.basics.notes import paragraph
from data.run_listing import Told, listing, offered
from data.run_places import Offer, places
from state.pages import Page

from ampscope.analysis.overview.run_list import RunSummary
from ampscope.report.numbers import count, seconds
from ampscope.report.palette import ALARM, GOOD, SEVERITIES
from ampscope.report.safe_text import short
from ampscope.report.terminal.run_list import evidence
from ampscope.trace.vocabulary import Severity, Verdict

#: Seconds between two drawings of the table, and how many of them go into diagnosing runs.
_LOOK_EVERY, _STINT_S = 2, 0.5
_RESTS = "_listing_rests"
_UNTOLD = "not examined"
#: What a verdict looks like; being written is no verdict, but as important.
_COLOURS = {
    Verdict.HEALTHY.value: GOOD,
    Verdict.PROBLEM.value: ALARM,
    "unreadable": SEVERITIES[Severity.WARNING],
    _UNTOLD: SEVERITIES[Severity.INFO],
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


def row(offer: Offer, one: RunSummary, told: Told | None) -> dict[str, object]:
    """A run in the table."""
    told = told or (Told("unreadable", one.problem) if one.problem else Told(_UNTOLD, evidence(one)))
    return {
        "Run": f"{short(offer.key, 70)} (sample)" if offer.is_sample else short(offer.key, 80),
        "Verdict": [told.verdict],
        "What": short(told.what, 160),
        "Steps": one.steps,
        "Skipped": one.skipped_share,
        "Started": datetime.fromtimestamp(one.created, tz=UTC) if one.created else None,
        "Lasted": seconds(one.duration),
        "State": _STATES.get(one.status, one.status),
        "Model": short(one.model, 40),
        "Device": short(one.device, 40),
        "Tags": [short(tag, 30) for tag in one.tags],
    }


def draw(search: str) -> None:
    """The table, drawn again while a run in it is being written or examined."""
    known, found = listing(), offered(places())
    summaries = known.look([offer.path for offer in found.values()])
    rows = {
        key: row(offer, summaries[offer.path], known.verdict(summaries[offer.path])) for key, offer in found.items()
    }
    chosen = [key for key, offer in found.items() if summaries[offer.path].matches(search, *_words(rows[key]))]
    if chosen:
        paragraph(f"{count(len(chosen), 'run')}, the newest first. Click on one to open it.")
        table([rows[key] for key in chosen], chosen)
    else:
        paragraph(f"None of the {count(len(found))} runs has all of these words in its name, model, device or verdict.")
    wanted = [one for one in summaries.values() if not one.problem]
    if unknown := [one for one in wanted if known.verdict(one) is None]:
        told = count(len(wanted) - len(unknown))
        st.caption(f"{told} of {count(len(wanted), 'run')} examined so far; the others follow.")
    # Last of all, so that the list is on screen while it goes on, and not at the first drawing.
    done = known.diagnose(unknown, _STINT_S if _RESTS in st.session_state else 0.0)
    rests = done and all(one.status != "open" for one in summaries.values())
    before, st.session_state[_RESTS] = st.session_state.get(_RESTS, False), rests
    if before != rests:
        st.rerun()


def table(rows: Sequence[dict[str, object]], keys: Sequence[str]) -> None:
    """The rows, a click on which opens the run of that place in ``keys``."""
    picked = st.dataframe(
        rows,
        hide_index=True,
        height=min(38 + 35 * len(rows), 720),
        column_config=_COLUMNS,
        selection_mode="single-cell",
        on_select="rerun",
        key="run_list",
    )
    if cells := picked.selection.cells:
        st.switch_page(Page.OVERVIEW.file, query_params={"run": keys[cells[0][0]]})


def _words(cells: dict[str, object]) -> tuple[str, ...]:
    """What a search finds of a row beside the run's own facts: what the reader sees of its verdict."""
    return str(cells["Verdict"]), str(cells["What"]), str(cells["State"])


st.title("Runs", anchor=False)
search = st.text_input(
    "Search",
    placeholder="words of its name, model, device, tags, state or verdict",
    max_chars=200,
    key="search",
    bind="query-params",
)
rests = st.session_state.get(_RESTS, False)
st.fragment(draw, run_every=None if rests else _LOOK_EVERY)(search)
