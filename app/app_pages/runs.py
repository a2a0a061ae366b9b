"""Runs: which of my trainings went well, which did not, and where is the one I look for?"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st
from blocks.notes import paragraph
from directory import Page
from listing import Told, listing, offered
from runs import Offer, places

from ampscope.analysis.run_list import RunSummary
from ampscope.report import figures
from ampscope.report.html.markup import short
from ampscope.report.html.palette import ALARM, GOOD, SEVERITIES
from ampscope.report.html.phrases import count
from ampscope.report.runs import evidence
from ampscope.trace.vocabulary import Severity, Verdict

#: Seconds between two drawings of the table, and how many of them go into diagnosing runs.
_LOOK_EVERY, _STINT_S = 2, 0.7
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
        "Lasted": figures.lasted(one.duration),
        "State": _STATES.get(one.status, one.status),
        "Model": short(one.model, 40),
        "Device": short(one.device, 40),
        "Tags": [short(tag, 30) for tag in one.tags],
    }


def draw(chosen: Sequence[Offer]) -> None:
    """The table, drawn again until all that should be is diagnosed, and while a run in it is being written."""
    known = listing()
    summaries = known.look([offer.path for offer in chosen])
    wanted = [one for one in summaries.values() if not one.problem]
    done = known.diagnose(wanted, _STINT_S if "_listing_rests" in st.session_state else 0.0)  # first of all, the list
    rows = [row(offer, summaries[offer.path], known.verdict(summaries[offer.path])) for offer in chosen]
    picked = st.dataframe(
        rows,
        hide_index=True,
        height=min(38 + 35 * max(len(rows), 1), 720),
        column_config=_COLUMNS,
        selection_mode="single-row",
        on_select="rerun",
        key="run_list",
    )
    if lines := picked.selection.rows:
        st.switch_page(Page.OVERVIEW.file, query_params={"run": chosen[lines[0]].key})
    if not done:
        known_yet = sum(known.verdict(one) is not None for one in wanted)
        st.caption(f"{known_yet:,} of {figures.count(len(wanted), 'run')} examined so far; the others follow.")
    live = any(one.status == "open" for one in summaries.values())
    before, rests = st.session_state.get("_listing_rests", False), done and not live
    st.session_state["_listing_rests"] = rests
    if before != rests:
        st.rerun()


found = offered(places())
st.title("Runs", anchor=False)
search = st.text_input(
    "Search", placeholder="name, model, device, tag or state", value=st.query_params.get("search", ""), max_chars=200
)
if search:
    st.query_params["search"] = search
elif "search" in st.query_params:
    del st.query_params["search"]
every = listing().look([offer.path for offer in found.values()])
chosen = [offer for offer in found.values() if every[offer.path].matches(search)]
if not chosen:
    paragraph(f"None of the {count(len(found))} runs has all of these words in its name, model, device, tags or state.")
    st.stop()
paragraph(f"{figures.count(len(chosen), 'run')}, the newest first. Choose one on its left edge to open it.")
rests = st.session_state.get("_listing_rests", False)
st.fragment(draw, run_every=None if rests else _LOOK_EVERY)(chosen)
