"""A comparison for the terminal: how the two compare, where their numbers part, and what differs, by what matters."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ampscope.analysis.replay.compare.results import Comparison, Difference, Divergence, Likeness
from ampscope.report import numbers
from ampscope.report.safe_text import visible
from ampscope.report.terminal.layout import code, heading, indented, line, prose
from ampscope.report.wording.comparison_words import MATTERS, apart_words, places_words, side_words, where_words

_STYLES = {
    Likeness.IDENTICAL: "bold green",
    Likeness.WITHIN_TOLERANCE: "bold green",
    Likeness.DIFFERENT: "bold red",
}
#: Differences that are told; the JSON has all.
_TOLD = 20


def as_text(comparison: Comparison) -> RenderableType:
    """The comparison, to be printed by a `rich.console.Console` of any width, with ``crop=False``."""
    return Group(*_blocks(comparison))


def _blocks(comparison: Comparison) -> Iterator[RenderableType]:
    word = comparison.likeness.value.replace("_", " ").upper()
    yield Text(word, style=_STYLES[comparison.likeness])
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        yield line(f"{letter}  {side_words(side)}", style="dim")
    yield Text()
    yield prose(comparison.summary)
    if comparison.first_divergence is not None and comparison.first_divergence.op:
        yield from _divergence(comparison.first_divergence)
    told = comparison.differences[:_TOLD]
    yield from _listing("What differs", [each for each in told if each.score >= MATTERS])
    yield from _listing("Also", [each for each in told if each.score < MATTERS])
    if len(comparison.differences) > _TOLD:
        more = numbers.count(len(comparison.differences) - _TOLD, "more difference")
        yield prose(f"And {more}; --json has all of them.")


def _divergence(found: Divergence) -> Iterator[RenderableType]:
    yield heading("Where they part")
    yield line(where_words(found))
    if found.source is not None:
        yield line(f"{found.source.file}:{found.source.line}", style="cyan")
        yield code(found.source.code)
    if apart := apart_words(found):
        yield line(apart)


def _listing(title: str, differences: list[Difference]) -> Iterator[RenderableType]:
    if differences:
        yield heading(title)
    for number, difference in enumerate(differences, 1):
        where = places_words(difference)
        text = Text(f"{number}. {visible(difference.text)}", overflow="fold")
        if where:
            text.append(f" {where}", style="cyan")
        yield indented(text)
