"""A comparison for the terminal: how the two compare, where their numbers part, and what differs, by what matters."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ampscope.analysis.replay.compare.results import Comparison, Difference, Divergence, Likeness, Side
from ampscope.report import numbers
from ampscope.report.safe_text import visible
from ampscope.report.source_place import place
from ampscope.report.terminal.layout import code, heading, indented, line, prose

_STYLES = {
    Likeness.IDENTICAL: "bold green",
    Likeness.WITHIN_TOLERANCE: "bold green",
    Likeness.DIFFERENT: "bold red",
}
#: Differences that are told; the JSON has all.
_TOLD = 20
#: From this score on a difference is told for itself, and not as an effect or a circumstance.
_MATTERS = 80.0


def as_text(comparison: Comparison) -> RenderableType:
    """The comparison, to be printed by a `rich.console.Console` of any width, with ``crop=False``."""
    return Group(*_blocks(comparison))


def _blocks(comparison: Comparison) -> Iterator[RenderableType]:
    word = comparison.likeness.value.replace("_", " ").upper()
    yield Text(word, style=_STYLES[comparison.likeness])
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        yield line(f"{letter}  {_side(side)}", style="dim")
    yield Text()
    yield prose(comparison.summary)
    if comparison.first_divergence is not None and comparison.first_divergence.op:
        yield from _divergence(comparison.first_divergence)
    told = comparison.differences[:_TOLD]
    yield from _listing("What differs", [each for each in told if each.score >= _MATTERS])
    yield from _listing("Also", [each for each in told if each.score < _MATTERS])
    if len(comparison.differences) > _TOLD:
        more = numbers.count(len(comparison.differences) - _TOLD, "more difference")
        yield prose(f"And {more}; --json has all of them.")


def _side(side: Side) -> str:
    step = f", step {side.step:,}" if side.step is not None else f", {numbers.count(side.steps, 'step')}"
    rank = f", rank {side.rank}" if side.rank else ""
    verdict = f"; {side.verdict.replace('_', ' ')}" if side.verdict else ""
    model = f" ({side.model} on {side.device or 'an unknown device'})" if side.model else ""
    return f"{side.path}{model}{step}{rank}{verdict}"


def _divergence(found: Divergence) -> Iterator[RenderableType]:
    yield heading("Where they part")
    where = f"{found.op} in {found.module}" if found.module else f"{found.op}, outside the modules"
    step = f"step {found.step:,}" + (f" of A and {found.other_step:,} of B" if found.other_step != found.step else "")
    yield line(f"{where}, {step}")
    if found.source is not None:
        yield line(f"{found.source.file}:{found.source.line}", style="cyan")
        yield code(found.source.code)
    if found.error is not None:
        apart = f"{numbers.value(found.error)} of the largest magnitude apart"
        yield line(f"{apart}; rounding allows for {numbers.value(found.tolerance)}")


def _listing(title: str, differences: list[Difference]) -> Iterator[RenderableType]:
    if differences:
        yield heading(title)
    for number, difference in enumerate(differences, 1):
        where = " / ".join(filter(None, (place(difference.source), place(difference.other_source))))
        text = Text(f"{number}. {visible(difference.text)}", overflow="fold")
        if where:
            text.append(f" {where}", style="cyan")
        yield indented(text)
