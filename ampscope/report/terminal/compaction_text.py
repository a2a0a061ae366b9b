"""A compaction for the terminal: files and bytes before and after, run by run, and what was left alone."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from ampscope.report import numbers
from ampscope.report.safe_text import visible
from ampscope.report.terminal.layout import prose
from ampscope.trace.compact.results import CompactedRun, Compaction


def as_text(compaction: Compaction) -> RenderableType:
    """Renders what a compaction did, to be printed by a `rich.console.Console`, with ``crop=False``."""
    return Group(*_blocks(compaction))


def _blocks(compaction: Compaction) -> Iterator[RenderableType]:
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
