"""Ranks: on which rank did it begin, who received it, who lags, and does one compute something else?"""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.overview.bad_steps import BadAttempt
from ampscope.analysis.overview.rank_lives import Ranks, ranks_story
from ampscope.report.figures.step_figures import rank_grid
from ampscope.report.html.bars_svg import rank_grid_html
from ampscope.report.html.tables_html import BAD_COLUMNS, RANK_COLUMNS, bad_rows, rank_row
from ampscope.report.numbers import count
from blocks.figure import figure
from blocks.live_part import live_part
from blocks.page_links import link_row, to_incident, to_overview, to_replay
from blocks.table import table
from blocks.text import heading, paragraph, title
from data.run_results import diagnosis_of, incident_at, ranks_of
from data.run_snapshot import RunSnapshot, current_run


def ranks_page() -> None:
    run = current_run()
    title("Ranks")
    if not run.world.is_shared:
        paragraph("This run has one rank: there is nothing to compare.")
        to_overview()
        return
    live_part(whole)
    live_part(one_by_one)


def whole(run: RunSnapshot) -> None:
    """All ranks in words, and in a picture with all their steps."""
    seen = ranks_of(run)
    paragraph(" ".join(ranks_story(seen)))
    if not seen.grid.is_empty:
        heading("Rank by step")
        grid = rank_grid(seen.grid)
        with figure("ranks", "Rank by step", grid.label):
            st.html(rank_grid_html(grid))
    if seen.bad:
        first_bad(run, seen.bad)


def first_bad(run: RunSnapshot, bad: tuple[BadAttempt, ...]) -> None:
    """Shows where each bad step began, with links to the first that spread."""
    heading("Where each bad step began")
    table("Where each bad step began", BAD_COLUMNS, bad_rows(bad), numeric=BAD_COLUMNS[:1])
    spread = next((each for each in bad if each.origins and each.received), None)
    if spread is None:
        return
    rank = spread.origins[0].rank
    with link_row():
        if (incident := incident_at(diagnosis_of(run), spread.step, rank)) is not None:
            to_incident(incident[0], f"The incident on rank {count(rank)}", rank=rank)
        to_replay(spread.step, label=f"Replay step {count(spread.step)} of rank {count(rank)}", rank=rank)


def one_by_one(run: RunSnapshot) -> None:
    """Every rank, a row each."""
    seen: Ranks = ranks_of(run)
    heading("Rank by rank")
    table("Rank by rank", RANK_COLUMNS, [rank_row(state) for state in seen.states], numeric=RANK_COLUMNS[:-1])


ranks_page()
