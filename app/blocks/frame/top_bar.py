"""The bar on top of every page: which run and rank is on screen, how it is, and the search."""

from __future__ import annotations

import time

import streamlit as st

from ampscope.analysis.causes.catalogue import cause_in_words
from ampscope.errors import AmpscopeError
from ampscope.report.html.markup import as_html
from ampscope.report.numbers import ago, count
from ampscope.report.terminal.run_list import verdict_in_words
from ampscope.trace.vocabulary import Verdict
from blocks.choices.select_box import choose
from blocks.frame.live_part import live_part
from blocks.frame.search import search_box
from data.current_run import current_run, select_rank, select_run
from data.run_folders import OfferedRun
from data.run_results import diagnosis_of, pulse_of
from data.run_snapshot import RunSnapshot
from state.pages import Page
from state.query_params import switch_run

#: Ranks that stand side by side; more are in a box.
_CHIPS = 8
_BAR = "amp-bar"


def top_bar(offered: dict[str, OfferedRun], page: Page) -> None:
    """Let the reader choose among ``offered`` and open the choice; say how it is.

    Args:
        offered: The runs by key.
        page: The page that is drawn below.

    Raises:
        RunError: the chosen run cannot be read; the others still can be chosen.
    """
    with st.container(key=_BAR, horizontal=True, vertical_alignment="center", gap="small"):
        choose_run(offered)
        live_part(_live)
        if page is not Page.RUNS:  # whose list is there at once; a verdict on a first look takes a while
            live_part(_verdict)
        if page.is_of_one_rank:
            choose_rank(current_run())
        with st.container(key="amp-search", width="content"):
            search_box()


def choose_run(offered: dict[str, OfferedRun]) -> None:
    """The box for the run."""
    asked = st.query_params.get("run")
    own = [each for each in offered.values() if not each.is_sample]
    key = choose("run", "Run", list(offered), lambda key: offered[key].label, named=len(own) != 1, width=230, bare=True)
    switch_run(key, drop_params=asked not in (None, key))
    select_run(offered[key].path)


def choose_rank(run: RunSnapshot) -> None:
    """Chips or a box for the rank that is looked at, where there are several; at first, that of what to read first."""
    if not run.world.is_shared:
        return
    ranks = [str(rank) for rank in run.world.present]
    chosen = choose(
        "rank",
        f"Rank, of {run.world.size:,}",
        ranks,
        lambda rank: f"Rank {int(rank):,}",
        default=str(_told_first(run)),
        named=run.is_open,
        width=130,
        bare=True,
        chips=len(ranks) <= _CHIPS,
    )
    select_rank(int(chosen))


def _told_first(run: RunSnapshot) -> int:
    """The rank to begin with: where the run's primary incident is, else one whose healthy steps were traced."""
    try:
        primary = diagnosis_of(run).primary
    except AmpscopeError:
        return run.rank  # the page says what is wrong with it
    return primary.rank if primary is not None and primary.rank in run.world.present else run.rank


def _verdict(run: RunSnapshot) -> None:
    """The verdict in a few words."""
    try:
        diagnosis = diagnosis_of(run)
    except AmpscopeError:
        return  # the page says so
    primary = diagnosis.primary
    kind = primary.severity.value if primary else "good" if diagnosis.verdict is Verdict.HEALTHY else "warning"
    words = cause_in_words(primary.cause) if primary else " ".join(diagnosis.unobserved)
    st.html(
        f'<span class="amp-chip {kind}">{verdict_in_words(diagnosis.verdict)}</span> '
        f'<span class="amp-bar-words">{as_html(words, 80)}</span>',
        width="content",
    )


def _live(run: RunSnapshot) -> None:
    """A dot beside a run that is being written."""
    if run.is_open:
        st.html(live_html(run, time.time()), width="content")


def live_html(run: RunSnapshot, now: float) -> str:
    """The dot, and how far the run is."""
    pulse = pulse_of(run)
    silent = pulse.silence(now)
    kind = "silent" if pulse.is_overdue(now) else "live"
    far = "no step yet" if silent is None else f"step {count(pulse.last_step or 0)}, {ago(silent)}"
    return f'<span class="amp-live {kind}"><i></i>{kind}<span class="amp-bar-words">{as_html(far)}</span></span>'
