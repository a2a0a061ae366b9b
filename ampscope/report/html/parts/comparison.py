"""A comparison's card, and what differs, row by row."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.replay.compare.results import Comparison, Difference, Likeness
from ampscope.report.html.markup import as_html, source_html
from ampscope.report.html.parts.card import card
from ampscope.report.html.parts.table import TableRows
from ampscope.report.numbers import count
from ampscope.report.safe_text import short
from ampscope.report.wording.comparison_words import (
    KINDS,
    TITLES,
    apart_words,
    extent_words,
    places_words,
    side_words,
    where_words,
)

#: Characters of a sentence.
_LONGEST = 600


def comparison_html(found: Comparison) -> str:
    """Whether the two are the same, with which op their numbers part, and how much was compared."""
    diverged = found.first_divergence
    facts = [("What", as_html(found.summary, _LONGEST))]
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
    return count(number), KINDS[each.kind], short(each.text, _LONGEST), where
