"""A list of runs, a fleet and a compaction are laid out for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.diagnosis.fleet_results import Fleet, GroupCount, Window
from ampscope.analysis.overview.run_list import RunSummary
from ampscope.analysis.results import Diagnosis, Finding
from ampscope.analysis.words import steps_in_words, where_ranked
from ampscope.report import numbers
from ampscope.report.safe_text import visible
from ampscope.report.terminal.text_blocks import heading, indented, prose
from ampscope.trace.compaction import CompactedRun, Compaction
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
        for title in headings:
            wraps = title == "what"
            table.add_column(
                title,
                justify="right" if title in _NUMERIC else "left",
                overflow="fold" if wraps else "crop",
                no_wrap=not wraps,
                min_width=self._least(title),
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


#: Rows of a table that are shown; JSON has all.
_SHOWN = 8
#: Standard deviations from which on a change is told: of a hundred that mean nothing, one in four hundred reaches it.
NOTABLE = 3.0


def fleet_text(fleet: Fleet) -> RenderableType:
    """Renders what is told of a fleet of runs."""
    return Group(*_fleet_blocks(fleet))


def _fleet_blocks(fleet: Fleet) -> Iterator[RenderableType]:
    verdicts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in fleet.verdicts.items())
    yield prose(
        f"{numbers.count(fleet.runs, 'run')} on {numbers.count(fleet.ranks, 'rank')}; "
        f"{fleet.recorded:,} recorded an incident or a finding. Diagnosed: {verdicts}."
    )
    yield from _table("Causes", ("runs", "told first", "times", "cause"), [
        (f"{each.runs:,}", f"{each.first:,}", f"{each.count:,}", each.cause.value) for each in fleet.causes
    ])  # fmt: skip
    yield from _table("Where", ("runs", "times", "cause", "op", "module", "line"), [
        (f"{each.runs:,}", f"{each.count:,}", each.cause.value, each.op, each.module, each.line)
        for each in fleet.places
    ])  # fmt: skip
    yield from _table("On what", ("", "name", "runs", "problems", "share", "steps lost"), [
        _group(each) for each in _most_of_each_kind(fleet.groups)
    ])  # fmt: skip
    yield from _lost(fleet)
    if fleet.window is not None:
        yield from _changes(fleet.window)
    yield from _table("Left out", ("run", "why"), [(each.path, each.why) for each in fleet.unreadable])


def _most_of_each_kind(groups: Sequence[GroupCount]) -> list[GroupCount]:
    kinds = dict.fromkeys(each.kind for each in groups)
    return [each for kind in kinds for each in [one for one in groups if one.kind == kind][:5]]


def _group(each: GroupCount) -> tuple[str, ...]:
    share = numbers.share(each.problems / each.runs, narrow=True)
    name = each.name or "not recorded"
    return each.kind, name, f"{each.runs:,}", f"{each.problems:,}", share, f"{each.lost_steps:,}"


def _lost(fleet: Fleet) -> Iterator[RenderableType]:
    lost = fleet.lost
    yield Text()
    yield heading("What it costs")
    yield prose(
        f"{lost.lost:,} of {numbers.count(lost.steps, 'step')} of all ranks were skipped after the first 20 of a run, "
        f"in which a loss scale finds its place ({lost.calibrating:,} more there). Their durations add up to "
        f"{lost.device_hours:,.2f} hours of devices, {lost.gpu_hours:,.2f} of them of GPUs."
    )
    yield prose(f"The loss scale ended below 1 in {numbers.count(fleet.collapsed_runs, 'run')}.")
    yield from _table("Collapsed scales", ("run", "rank", "step", "scale", "highest"), [
        (each.run, str(each.rank), f"{each.step:,}", numbers.value(each.scale), numbers.value(each.highest))
        for each in fleet.collapses
    ])  # fmt: skip


def _changes(window: Window) -> Iterator[RenderableType]:
    yield Text()
    yield heading("What changed")
    if not window.runs_before:
        yield prose(f"All runs are of the newest {window.days:g} days: there is nothing before to compare them with.")
        return
    told = [each for each in window.changes if abs(each.deviations) >= NOTABLE]
    compared = (
        f"{numbers.count(window.runs, 'run')} of the newest {window.days:g} days "
        f"with {window.runs_before:,} of the {window.days:g} days before"
    )
    if not told:
        yield prose(f"Compared {compared}: nothing beyond what chance makes ({NOTABLE:g} standard deviations).")
        return
    yield prose(f"Compared {compared}; shares of runs with the cause, or with a problem.")
    yield from _table("", ("", "name", "before", "now", "deviations"), [
        (
            each.kind,
            each.name or "not recorded",
            numbers.share(each.share_before, narrow=True),
            numbers.share(each.share, narrow=True),
            f"{each.deviations:+.1f}",
        )
        for each in told
    ])  # fmt: skip


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[RenderableType]:
    if not rows:
        return
    if title:
        yield Text()
        yield heading(title)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows[:_SHOWN] if title != "On what" else rows:
        table.add_row(*(Text(visible(each)) for each in row))
    yield indented(table)
    if title != "On what" and len(rows) > _SHOWN:
        yield indented(Text(f"and {len(rows) - _SHOWN:,} more; --json has all"))


def compaction_text(compaction: Compaction) -> RenderableType:
    """Renders what a compaction did, to be printed by a `rich.console.Console`, with ``crop=False``."""
    return Group(*_compaction_blocks(compaction))


def _compaction_blocks(compaction: Compaction) -> Iterator[RenderableType]:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    planned = " then" if compaction.dry_run else " after"
    for name in ("files", f"files{planned}", "bytes", *([] if compaction.dry_run else ["bytes after"])):
        table.add_column(name, justify="right")
    for run in compaction.runs:
        table.add_row(*_cells(run, dry_run=compaction.dry_run))
    yield table
    for run in compaction.runs:
        for left in run.left_alone:
            yield prose(f"{visible(left.path)}: {visible(left.why)}")
    if compaction.dry_run:
        yield prose("Nothing was changed.")
    waiting = sum(run.waiting for run in compaction.runs)
    if waiting:
        yield prose(f"{numbers.count(waiting, 'merged file')} could not be removed yet; ask again later.")


def _cells(run: CompactedRun, *, dry_run: bool) -> list[str]:
    before, after = run.before, run.after
    cells = [visible(run.run), numbers.count(before.files), numbers.count(after.files), numbers.size(before.bytes or 0)]
    return cells if dry_run else [*cells, numbers.size(after.bytes or 0)]
