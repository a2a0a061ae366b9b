"""A gate for the terminal: a line for each check, and what was not kept."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampscope.analysis.diagnosis.gate import Gate, Outcome
from ampscope.report.ci import NAMES, OUTCOMES, failures, quantity
from ampscope.report.safe_text import visible
from ampscope.report.terminal.layout import heading, line, prose

_STYLES = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.NOT_KNOWN: "yellow"}


def as_text(gate: Gate) -> RenderableType:
    """The checks of a run, to be printed by a `rich.console.Console`, with ``crop=False``."""
    return Group(*_blocks(gate))


def _blocks(gate: Gate) -> Iterator[RenderableType]:
    outcome = Text(OUTCOMES[gate.outcome].upper(), style=_STYLES[gate.outcome])
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
            Text(OUTCOMES[check.outcome], style=_STYLES[check.outcome]),
            *(quantity(check.limit, amount) for amount in amounts),
        )
    return table
