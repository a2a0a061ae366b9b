"""A run in many small files, with all that makes merging them hard; and what a reader reads of a run."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.trace.files.journal import Journal, to_batch
from ampscope.trace.files.layout import journal_path, list_table, table_folder
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import EventRow, Row, Source, Table, arrow_schema
from tests.support.trace_builder import START, TraceBuilder

#: Values that a careless copy changes.
NUMBERS = (0.0, -0.0, math.inf, -math.inf, math.nan, None, 1e-45, 65504.0, -1.5)
TEXTS = ("", "a", "\u00e4\u4e16\U0001f600", "'\"; DROP TABLE", "x" * 300)


def many_parts(folder: Path, *, seed: int = 0, ranks: int = 2, segments: int = 3, died: bool = True) -> Path:
    """A run of several ranks and segments whose tables have a part for each segment, and journals of dead writers."""
    chance = random.Random(seed)
    for rank in range(ranks):
        for segment in range(segments + rank):
            _segment(TraceBuilder(folder, rank=rank, world_size=ranks), chance, segment)
        if died:
            left_by_a_dead_writer(folder, rank, Table.EVENTS, [_event(900 + rank), _event(901)])
    return folder


def left_by_a_dead_writer(folder: Path, rank: int, table: Table, rows: list[Row]) -> Path:
    """A journal that nobody writes any more, with a torn end."""
    of = table_folder(folder, rank, table)
    of.mkdir(parents=True, exist_ok=True)
    journal = Journal(journal_path(of, list_table(of).next_number), arrow_schema(table))
    for row in rows:
        journal.append(to_batch(table, [row]))
    journal.append_message(to_batch(table, rows).serialize().to_pybytes()[:-40], 0)
    journal.close()
    return journal.path


def in_older_columns(folder: Path, table: Table, *names: str, rank: int = 0, part: int = 0) -> None:
    """Let a part lack columns, as if an AMPscope had written it that did not have them yet."""
    path = list_table(table_folder(folder, rank, table)).parts[part]
    rows = pq.read_table(path)
    pq.write_table(rows.drop_columns(list(names)), path)


def age(folder: Path, seconds: float = 3600.0) -> None:
    """Let all files of a run be older."""
    for path in folder.rglob("*"):
        state = path.stat()
        os.utime(path, (state.st_atime - seconds, state.st_mtime - seconds))


def what_is_read(folder: Path) -> dict[str, Any]:
    """All that a reader reads: rows in their order with every bit, and the rows of all files, in theirs."""
    with open_run(folder) as run:
        rows = {table.value: repr(run.rows(table)) for table in Table}
        traced = {rank: sorted(run.traced(rank)) for rank in run.ranks}
        counts = {table.value: run.table(table).collect().shape for table in Table}
        state = run.status
    return {"rows": rows, "traced": traced, "counts": counts, "status": state}


def raw_rows(folder: Path, rank: int, table: Table) -> list[pa.Table]:
    """The rows of a table's parts as they lie on the disk."""
    return [pq.read_table(part) for part in list_table(table_folder(folder, rank, table)).parts.values()]


def files_of(folder: Path) -> list[str]:
    """The names of all files of a run's tables."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob("rank=*/*/*"))


def _segment(trace: TraceBuilder, chance: random.Random, segment: int) -> None:
    def any_number() -> float | None:
        return chance.choice(NUMBERS)

    for _ in range(chance.randint(1, 4)):
        step = trace.step(loss=any_number(), grad_norm=any_number(), lr=any_number()).step
        trace.grad(step=step, max_abs=any_number() or 0.0)
        source = chance.choice([Source.LIVE, Source.REPLAY])
        for _ in range(chance.randint(1, 3)):
            counts = tuple(chance.choices(range(5), k=chance.randint(0, 3)))
            trace.op(step=step, source=source, min=any_number(), max=any_number(), exp_counts=counts or None)
        trace.edge(step=step, min=any_number(), max=any_number())
        trace.scaler_event(step=step, scale_before=any_number())
    trace.param(f"layer{segment}.weight")
    trace.site(scalars='{"eps": 1e-8}', code=chance.choice(TEXTS))
    trace.incident(step=step, bad_params=tuple(chance.choices(TEXTS, k=2)), loss=any_number())
    trace.replay("fp32", "finite", step=step, loss=any_number())
    trace.finding(step=step)
    trace.event(text=chance.choice(TEXTS), step=step)
    trace.close()


def _event(step: int) -> EventRow:
    return EventRow(step, 0, START + step, "note", "of a dead writer")
