"""The ranks of a run: what there is to say of them, the picture of all their steps, and a table of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ampscope.analysis.overview.ranks.bad_steps import BadStep
from ampscope.analysis.overview.ranks.ranks import Life, Ranks, RankState, ranks_story
from ampscope.analysis.words import ranks_in_words
from ampscope.report.figures.rank_grid import rank_grid
from ampscope.report.html.document import paragraph, section
from ampscope.report.html.figures.bars import rank_grid_html
from ampscope.report.html.parts.table import table_html
from ampscope.report.numbers import count, seconds, value

#: Rows of a table in the report.
_MOST = 32

RANK_COLUMNS = (
    "Rank",
    "Last step",
    "Steps behind",
    "Skipped",
    "Mean loss",
    "Newest loss",
    "Step takes",
    "Went wrong here",
    "Received",
    "Is",
)
BAD_COLUMNS = ("Step", "Began on", "Received by")
_LIVES = {
    Life.WRITING: "being written",
    Life.CLOSED: "finished",
    Life.DIED: "ended without being closed",
    Life.MISSING: "not in this trace",
}


def ranks_html(seen: Ranks) -> str:
    """The section of the report; empty where there is one rank."""
    if not seen.world.is_shared:
        return ""
    words = paragraph(" ".join(ranks_story(seen)))
    states = sorted(seen.states, key=_most_telling)[:_MOST]
    rows = [rank_row(state) for state in sorted(states, key=lambda state: state.rank)]
    left = len(seen.states) - len(rows)
    more = paragraph(f"and {left:,} more ranks, of which there is less to tell") if left else ""
    body = words + rank_grid_html(rank_grid(seen.grid)) + table_html(RANK_COLUMNS, rows, numeric=RANK_COLUMNS[:-1])
    return section("The ranks", body + more, on_paper=False)


def rank_row(state: RankState) -> tuple[str, ...]:
    """One rank for the table."""
    if not state.steps:
        return (count(state.rank), *[""] * (len(RANK_COLUMNS) - 2), _LIVES[state.life])
    return (
        count(state.rank),
        count(state.last_step or 0),
        count(state.behind or 0),
        count(state.skipped),
        "" if state.mean_loss is None else value(state.mean_loss),
        "" if state.loss is None else value(state.loss),
        seconds(state.step_seconds),
        count(state.origins),
        count(state.received),
        _LIVES[state.life],
    )


def bad_rows(bad: Sequence[BadStep]) -> list[tuple[str, ...]]:
    """Where each bad step began, and who received it; those that follow from the weights of one step in one row."""
    return [_bad_row(list(alike)) for _, alike in groupby(bad, key=_began_with)]


def _began_with(bad: BadStep) -> tuple[int, int, bool]:
    return bad.optimizer, bad.step if bad.since is None else bad.since, bad.since is None


def _bad_row(alike: Sequence[BadStep]) -> tuple[str, ...]:
    first, last = alike[0], alike[-1]
    if first.since is None:
        received = _ranks([one.rank for one in first.received])
        return count(first.step), _ranks([one.rank for one in first.origins]), received
    steps = count(first.step) if first is last else f"{count(first.step)} to {count(last.step)}"
    return steps, f"bad weights since step {count(first.since)}", ""


def _ranks(ranks: Sequence[int]) -> str:
    return ranks_in_words(ranks) if ranks else ""


def _most_telling(state: RankState) -> tuple[int, int, int, int]:
    return state.life is Life.CLOSED, -(state.behind or 0), -state.origins, state.rank
