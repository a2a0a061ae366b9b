"""Lines of a program that a cure may have to change besides the one that failed."""

from __future__ import annotations

from typing import Any, NamedTuple

from ampscope.analysis.cures.rewriting.source_file import path_below, source_file
from ampscope.analysis.origin.step_graph import source_of_line
from ampscope.analysis.results import SourceLine
from ampscope.trace.evidence import Evidence, ProgramLine, read
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table


class Program(NamedTuple):
    """Holds the lines of a program around its model, as far as they are known."""

    watched_at: SourceLine | None = None  #: the line that calls ``watch``; None where it was not recorded
    called_from: tuple[SourceLine, ...] = ()  #: the lines that call the models
    under_autocast: tuple[SourceLine, ...] = ()  #: those among them around which an autocast region was
    tensors: int = 0  #: how many tensors their one call returned, one or a tuple; 0: something else, or not known


def program_of(run: Run) -> Program:
    """The lines of a run's program, as its trace has them."""
    rows = [row for rank in run.ranks for row in run.rows(Table.INCIDENTS, rank=rank)]
    told = [each for row in rows for each in Evidence.of(row).called_from]
    lines = {line: bool(each.autocast) for each in told if (line := source_of_line(each)) is not None}
    tensors = {each.tensors for each in told} if len(lines) == 1 else set()
    return Program(
        watched_at=_line(run.manifest.configuration.get("watched_at")),
        called_from=tuple(lines),
        under_autocast=tuple(line for line, inside in lines.items() if inside),
        tensors=tensors.pop() if len(tensors) == 1 else 0,
    )


def changed_since(run: Run, file: str) -> SourceLine | None:
    """A recorded line of a file that reads otherwise now; None where all read as they did, or it is not at hand."""
    if path_below(file) is None:
        return None
    sites = (row for rank in run.ranks for row in run.rows(Table.SITES, rank=rank) if row.file == file)
    lines = {SourceLine(file=file, line=row.line, function=row.function, code=row.code) for row in sites if row.code}
    return next((each for each in sorted(lines, key=lambda each: each.line) if source_file(each) is None), None)


def _line(told: Any) -> SourceLine | None:
    return source_of_line(read(ProgramLine, told))
