"""A list of runs for the terminal: one line each, with its verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.overview.run_list import RunSummary
from ampscope.analysis.results import Diagnosis, Finding
from ampscope.analysis.words import steps_in_words, where_ranked
from ampscope.report import numbers
from ampscope.report.safe_text import visible
from ampscope.report.terminal.layout import indented
from ampscope.trace.vocabulary import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run that was found, and its diagnosis; none where it was not asked for or the run cannot be read."""

    summary: RunSummary
    diagnosis: Diagnosis | None = None


_HEADINGS = ("run", "started", "steps", "skipped", "verdict", "what")
_STYLES = {
    Verdict.HEALTHY: "green",
    Verdict.AT_RISK: "yellow",
    Verdict.PROBLEM: "red",
    Verdict.PARTLY_OBSERVED: "yellow",
    Verdict.NOT_OBSERVED: "yellow",
}
_NUMERIC = ("steps", "skipped")
#: What a narrow terminal does without, in this order: the time first, which most names hold as well.
_EXPENDABLE = ("started", "skipped", "steps")
#: The least width in which the last column can be read.
_LEAST_WHAT = 24
#: Columns between two cells.
_GAP = 3
#: A width that no table has.
_UNBOUNDED = 10_000


def as_list(runs: Sequence[ListedRun]) -> RenderableType:
    """One row a run, in the order given; its name is always whole, so that it can be copied."""
    return _List(tuple(dict(zip(_HEADINGS, _row(run), strict=True)) for run in runs))


@dataclass(frozen=True, slots=True)
class _List:
    """A table where it fits, two lines a run where it does not; whatever reads a pipe gets every column unwrapped."""

    rows: tuple[dict[str, Text], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            yield from console.render(self._table(_HEADINGS), options.update(max_width=_UNBOUNDED))
            return
        kept = self._fitting(options.max_width)
        yield self._table(kept) if kept else Group(*self._stacked())

    def _fitting(self, width: int) -> tuple[str, ...]:
        """The headings of the columns that fit into ``width``; none where not even the needed ones do."""
        for dropped in range(len(_EXPENDABLE) + 1):
            kept = tuple(heading for heading in _HEADINGS if heading not in _EXPENDABLE[:dropped])
            if sum(map(self._least, kept)) + _GAP * (len(kept) - 1) <= width:
                return kept
        return ()

    def _least(self, heading: str) -> int:
        widest = max(len(heading), *(row[heading].cell_len for row in self.rows), 0)
        return min(widest, _LEAST_WHAT) if heading == "what" else widest

    def _table(self, headings: Sequence[str]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for heading in headings:
            wraps = heading == "what"
            table.add_column(
                heading,
                justify="right" if heading in _NUMERIC else "left",
                overflow="fold" if wraps else "crop",
                no_wrap=not wraps,
                min_width=self._least(heading),
            )
        for row in self.rows:
            table.add_row(*(row[heading] for heading in headings))
        return table

    def _stacked(self) -> Iterator[RenderableType]:
        for row in self.rows:
            name = row["run"].copy()
            name.no_wrap, name.overflow = True, "ignore"
            yield name
            yield indented(Text.assemble(row["verdict"], "  ", row["what"], overflow="fold"))


def _row(run: ListedRun) -> tuple[Text, ...]:
    seen = run.summary
    path = Text(visible(str(seen.path)))
    if seen.problem:
        return path, Text(), Text(), Text(), Text("unreadable", style="yellow"), Text(visible(seen.problem))
    facts = (numbers.moment(seen.created), f"{seen.steps:,}", f"{seen.skipped:,}")
    if run.diagnosis is None:
        return path, *map(Text, facts), Text("not examined", style="dim"), Text(evidence(seen))
    verdict = run.diagnosis.verdict
    what = _what(run.diagnosis)
    return path, *map(Text, facts), Text(verdict_in_words(verdict), style=_STYLES[verdict]), Text(visible(what))


def verdict_in_words(verdict: Verdict) -> str:
    """``not observed`` for `Verdict.NOT_OBSERVED`."""
    return verdict.value.replace("_", " ")


def evidence(seen: RunSummary) -> str:
    """Says what was recorded against a run, before any diagnosis."""
    counted = ((seen.incidents, "incident"), (seen.findings, "finding"))
    recorded = " and ".join(numbers.count(number, noun) for number, noun in counted if number)
    return f"{recorded} recorded" if recorded else "nothing recorded against it"


def _what(diagnosis: Diagnosis) -> str:
    primary = diagnosis.primary
    if primary is None:
        return "" if diagnosis.verdict is Verdict.HEALTHY else diagnosis.summary
    where = f" at {primary.source.file.rpartition('/')[2]}:{primary.source.line}" if primary.source else ""
    when = steps_in_words(primary) if isinstance(primary, Finding) else f"step {primary.step:,}"
    when = " ".join(filter(None, (when, where_ranked(primary))))
    return f"{when}: {item_in_words(primary)}{where}"
