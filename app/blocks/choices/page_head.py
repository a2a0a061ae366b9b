"""The head of a page: its title, the run, and where there are several ranks, which of them is looked at."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.results import Diagnosis
from blocks.basics.text import title
from blocks.choices.select_box import choose
from data.current_run import select_rank
from data.run_snapshot import RunSnapshot


def page_head(words: str, run: RunSnapshot, diagnosis: Diagnosis) -> RunSnapshot:
    """The page's title, and the run as seen from the rank that is chosen; at first, that of what to read first.

    Args:
        words: The title.
        run: The run on screen.
        diagnosis: Its verdict.
    """
    name = diagnosis.run.name
    if not run.world.is_shared:
        title(words, name)
        return run
    left, right = st.columns([4, 1], vertical_alignment="bottom")
    with left:
        title(words, name)
    with right:
        offered = [str(rank) for rank in run.world.present]
        first = str(_told_first(run, diagnosis))
        label = f"Rank, of {run.world.size:,}"
        chosen = choose("rank", label, offered, lambda rank: f"Rank {int(rank):,}", default=first, named=run.is_open)
    return select_rank(int(chosen))


def _told_first(run: RunSnapshot, diagnosis: Diagnosis) -> int:
    """The rank to begin with: where the run's primary incident is, else one whose healthy steps were traced."""
    primary = diagnosis.primary
    return primary.rank if primary is not None and primary.rank in run.world.present else run.rank
