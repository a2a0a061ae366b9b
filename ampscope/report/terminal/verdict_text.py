"""A gate and a comparison are laid out for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampscope.analysis.diagnosis.gate import Gate, Outcome
from ampscope.analysis.replay.compare.compare_results import Comparison, Difference, Divergence, Likeness
from ampscope.report import numbers
from ampscope.report.ci import NAMES, OUTCOMES, failures, quantity
from ampscope.report.diagnosis_words import MATTERS, apart_words, places_words, side_words, where_words
from ampscope.report.safe_text import visible
from ampscope.report.terminal.text_blocks import code, heading, indented, line, prose

_OUTCOME_STYLES = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.NOT_KNOWN: "yellow"}


def gate_text(gate: Gate) -> RenderableType:
    """The checks of a run, to be printed by a `rich.console.Console`, with ``crop=False``."""
    return Group(*_gate_blocks(gate))


def _gate_blocks(gate: Gate) -> Iterator[RenderableType]:
    outcome = Text(OUTCOMES[gate.outcome].upper(), style=_OUTCOME_STYLES[gate.outcome])
    yield Text.assemble(outcome, "  ", (visible(gate.diagnosis.run.name), "bold"), overflow="fold")
    yield _table(gate)
    for check in failures(gate):
        yield heading(NAMES[check.limit].capitalize())
        yield prose(check.text)
    if failures(gate):
        yield line(f"Look: ampscope diagnose {gate.diagnosis.run.path}", style="dim")


def _table(gate: Gate) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("check", "outcome"):
        table.add_column(name)
    for name in ("measured", "allowed", *(["baseline"] if gate.baseline else [])):
        table.add_column(name, justify="right")
    for check in gate.checks:
        amounts = [check.measured, check.allowed, *([check.baseline] if gate.baseline else [])]
        table.add_row(
            NAMES[check.limit],
            Text(OUTCOMES[check.outcome], style=_OUTCOME_STYLES[check.outcome]),
            *(quantity(check.limit, amount) for amount in amounts),
        )
    return table


_LIKENESS_STYLES = {
    Likeness.IDENTICAL: "bold green",
    Likeness.WITHIN_TOLERANCE: "bold green",
    Likeness.DIFFERENT: "bold red",
}
#: Differences that are told; the JSON has all.
_TOLD = 20


def comparison_text(comparison: Comparison) -> RenderableType:
    """The comparison, to be printed by a `rich.console.Console` of any width, with ``crop=False``."""
    return Group(*_comparison_blocks(comparison))


def _comparison_blocks(comparison: Comparison) -> Iterator[RenderableType]:
    word = comparison.likeness.value.replace("_", " ").upper()
    yield Text(word, style=_LIKENESS_STYLES[comparison.likeness])
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
