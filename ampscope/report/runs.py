"""A list of runs for the terminal: one line each, with its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.analysis.run_list import RunSummary
from ampscope.analysis.wording import cause_in_words
from ampscope.report import figures
from ampscope.report.plain import visible
from ampscope.trace.vocabulary import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run that was found, and its diagnosis; none where it was not asked for or the run cannot be read."""

    summary: RunSummary
    diagnosis: Diagnosis | None = None


_HEADINGS = ("run", "started", "steps", "skipped", "verdict", "what")


def as_list(runs: Sequence[ListedRun]) -> RenderableType:
    """One row a run, in the order given."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in _HEADINGS:
        numeric = heading in ("steps", "skipped")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for run in runs:
        table.add_row(*_row(run))
    return table


def _row(run: ListedRun) -> tuple[Text, ...]:
    seen = run.summary
    path = Text(visible(str(seen.path)))
    if seen.problem:
        return path, Text(), Text(), Text(), Text("unreadable", style="yellow"), Text(visible(seen.problem))
    told = (figures.moment(seen.created), f"{seen.steps:,}", f"{seen.skipped:,}")
    if run.diagnosis is None:
        return path, *map(Text, told), Text("not examined", style="dim"), Text(evidence(seen))
    verdict = run.diagnosis.verdict
    style = "green" if verdict is Verdict.HEALTHY else "red"
    return path, *map(Text, told), Text(verdict.value, style=style), Text(visible(_what(run.diagnosis.primary)))


def evidence(seen: RunSummary) -> str:
    """What was recorded against a run, before any diagnosis."""
    counted = ((seen.incidents, "incident"), (seen.findings, "finding"))
    told = " and ".join(figures.count(number, noun) for number, noun in counted if number)
    return f"{told} recorded" if told else "nothing recorded against it"


def _what(primary: Incident | Finding | None) -> str:
    if primary is None:
        return ""
    where = f" at {primary.source.file.rpartition('/')[2]}:{primary.source.line}" if primary.source else ""
    return f"step {primary.step:,}: {cause_in_words(primary.cause)}{where}"
