"""A fleet for the terminal: one block a question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampscope.analysis.diagnosis.fleet_results import Fleet, GroupCount, Window
from ampscope.report import numbers
from ampscope.report.safe_text import visible
from ampscope.report.terminal.layout import heading, indented, prose

#: Rows of a table that are shown; JSON has all.
_SHOWN = 8
#: Standard deviations from which on a change is told: of a hundred that mean nothing, one in four hundred reaches it.
NOTABLE = 3.0


def as_text(fleet: Fleet) -> RenderableType:
    """Renders what is told of a fleet of runs."""
    return Group(*_blocks(fleet))


def _blocks(fleet: Fleet) -> Iterator[RenderableType]:
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
