"""Tables whose cells wrap and whose text is text: of anything, of what differs between runs, of ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import NamedTuple

from ampscope.analysis.overview.bad_steps import BadAttempt
from ampscope.analysis.overview.rank_lives import RankLife, Ranks, RankState, ranks_story
from ampscope.analysis.replay.compare.compare_results import Comparison, Difference, Likeness
from ampscope.analysis.words import ranks_in_words
from ampscope.report.diagnosis_words import (
    KINDS,
    TITLES,
    apart_words,
    extent_words,
    places_words,
    side_words,
    where_words,
)
from ampscope.report.figures.step_figures import rank_grid
from ampscope.report.html.bars_svg import rank_grid_html
from ampscope.report.html.cards import card
from ampscope.report.html.markup import as_html, paragraph, section, source_html
from ampscope.report.numbers import count, seconds, value
from ampscope.report.safe_text import short

#: Characters up to which a cell does not wrap.
_ONE_LINE = 26
#: Characters of a cell that are shown; the middle of a longer text is left out.
_LONGEST = 120
#: Before the next part of a name.
_DOT = re.compile(r"\.(?=[^\d\s])")
#: Columns beyond which a row becomes a list, each value beside its column's name, where the window is narrow.
_MANY = 6


class TableRows(NamedTuple):
    """The content of a table, however it is drawn."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    numeric: Collection[str] = ()  #: columns that are set to the right


def table_html(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Collection[str] = (),
) -> str:
    """``rows`` under ``columns``.

    Args:
        columns: Their names.
        rows: Of each row the cells.
        numeric: Columns that are set to the right.
    """
    aligned = ["num" if name in numeric else "" for name in columns]
    head = _cells("th", columns, aligned, [""] * len(columns))
    many = len(columns) > _MANY
    kind = " many" if many else ""
    names = [f' data-column="{as_html(name)}"' if many else "" for name in columns]
    body = "".join(f"<tr>{_cells('td', row, aligned, names)}</tr>" for row in rows)
    return (
        f'<div class="amp-scroll"><table class="amp-table{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(tag: str, row: Sequence[str], aligned: Sequence[str], names: Sequence[str]) -> str:
    return "".join(_cell(tag, *cell) for cell in zip(row, aligned, names, strict=True))


def _cell(tag: str, text: str, side: str, name: str) -> str:
    """Short cells stay on one line; long names may break after a dot, numbers never."""
    if len(text) <= _ONE_LINE:
        return f'<{tag} class="{side} one-line"{name}>{as_html(text)}</{tag}>'
    return f'<{tag} class="{side} long"{name}>{_DOT.sub(".<wbr>", as_html(text, _LONGEST))}</{tag}>'


#: Characters of a sentence.
_LONGEST_NAME = 600


def comparison_html(found: Comparison) -> str:
    """Whether the two are the same, with which op their numbers part, and how much was compared."""
    diverged = found.first_divergence
    facts = [("What", as_html(found.summary, _LONGEST_NAME))]
    if diverged is not None and diverged.op:
        line = source_html(diverged.source, hit=True)
        facts += [("Where", f"<div>{as_html(where_words(diverged))}</div>{line}")]
        facts += [("How far", as_html(apart_words(diverged)))]
    facts += [("A", as_html(side_words(found.a))), ("B", as_html(side_words(found.b)))]
    facts += [("Compared", as_html(extent_words(found)))]
    kind = "warning" if found.likeness is Likeness.DIFFERENT else "good"
    return card(kind, TITLES[found.likeness], facts)


def difference_rows(differences: Sequence[Difference], *, first: int = 1) -> TableRows:
    """Differences with their rank, kind, sentence and line; what matters most first."""
    rows = [_row(number, each) for number, each in enumerate(differences, first)]
    return TableRows(("No.", "Kind", "Difference", "Where"), rows, numeric=("No.",))


def _row(number: int, each: Difference) -> tuple[str, ...]:
    step = f"step {each.step:,}" if each.step is not None else ""
    more = f"in {count(each.count, 'place')}" if each.count > 1 else ""
    where = ", ".join(filter(None, (step, places_words(each), more)))
    return count(number), KINDS[each.kind], short(each.text, _LONGEST_NAME), where


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
    RankLife.WRITING: "being written",
    RankLife.CLOSED: "finished",
    RankLife.DIED: "ended without being closed",
    RankLife.MISSING: "not in this trace",
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


def bad_rows(bad: Sequence[BadAttempt]) -> list[tuple[str, ...]]:
    """Returns where each bad step began, and who received it; steps that follow from one step's weights share a row."""
    return [_bad_row(list(alike)) for _, alike in groupby(bad, key=_began_with)]


def _began_with(bad: BadAttempt) -> tuple[int, int, bool]:
    return bad.optimizer, bad.step if bad.since is None else bad.since, bad.since is None


def _bad_row(alike: Sequence[BadAttempt]) -> tuple[str, ...]:
    first, last = alike[0], alike[-1]
    if first.since is None:
        received = _ranks([one.rank for one in first.received])
        return count(first.step), _ranks([one.rank for one in first.origins]), received
    steps = count(first.step) if first is last else f"{count(first.step)} to {count(last.step)}"
    return steps, f"bad weights since step {count(first.since)}", ""


def _ranks(ranks: Sequence[int]) -> str:
    return ranks_in_words(ranks) if ranks else ""


def _most_telling(state: RankState) -> tuple[int, int, int, int]:
    return state.life is RankLife.CLOSED, -(state.behind or 0), -state.origins, state.rank
