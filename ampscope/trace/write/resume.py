"""Finds out where a further segment of a run goes on: step counters and the ids that are taken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ampscope.errors import RunDamaged, RunNotFound
from ampscope.trace.files.arrow_arrays import numbers_in
from ampscope.trace.files.journal import read_journal
from ampscope.trace.files.layout import list_table, table_folder
from ampscope.trace.files.whole_files import open_regular
from ampscope.trace.manifest import read_manifest
from ampscope.trace.schema import EventKind, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The first free number of everything that a run counts."""

    segment: int = 0
    next_step: dict[int, int] = field(default_factory=dict)  #: by optimizer; one that is missing starts at 0
    next_site: int = 0
    params: dict[str, int] = field(default_factory=dict)  #: id of each parameter and buffer by qualified name
    next_param: int = 0
    next_scaler: int = 0
    cures: tuple[tuple[int, str], ...] = ()  #: step and text of each ``cure`` that was not lifted


def resume_point(folder: Path, rank: int = 0) -> ResumePoint:
    """Read where the run in ``folder`` stands; all zero when there is none. Call it before opening the writer.

    The segment comes from the manifest on rank 0 and from the rank's own rows elsewhere, where the manifest may
    already speak of the new segment.

    Raises:
        RunDamaged: a file of the run cannot be read.
        RunTooNew: it was written with a newer schema.
    """
    try:
        manifest = read_manifest(folder)
    except RunNotFound:
        return ResumePoint()
    params = dict(_pairs(folder, rank, Table.PARAMS, "name", "param"))
    return ResumePoint(
        segment=len(manifest.segments) if rank == 0 else _next(folder, rank, Table.EVENTS, "segment"),
        next_step=_next_steps(folder, rank),
        next_site=_next(folder, rank, Table.SITES, "site"),
        params=params,
        next_param=max(params.values(), default=-1) + 1,
        next_scaler=_next(folder, rank, Table.SCALER_EVENTS, "scaler"),
        cures=tuple(_cures(folder, rank)),
    )


def _next_steps(folder: Path, rank: int) -> dict[int, int]:
    following: dict[int, int] = {}
    for rows in _tables(folder, rank, Table.STEPS, "optimizer", "step"):
        optimizers, steps = numbers_in(rows["optimizer"]), numbers_in(rows["step"])
        for optimizer in np.unique(optimizers).tolist():  # of ten million rows, no Python objects
            following[optimizer] = max(int(steps[optimizers == optimizer].max()) + 1, following.get(optimizer, 0))
    return dict(sorted(following.items()))


def _cures(folder: Path, rank: int) -> Iterator[tuple[int, str]]:
    """Yields the changes that healing has made, and not taken back, with their steps."""
    told: list[tuple[str, int, str]] = []
    kinds = (EventKind.CURE, EventKind.CURE_LIFTED)
    for rows in _tables(folder, rank, Table.EVENTS, "kind", "step", "text"):
        events = zip(*(rows[name].to_pylist() for name in ("kind", "step", "text")), strict=True)
        told += [event for event in events if event[0] in kinds]  # a filter of pyarrow's would import pandas
    lifted = {
        (detail.get("cure"), detail.get("kind"))
        for kind, _, text in told
        if kind == EventKind.CURE_LIFTED
        for detail in [_said(text)]
    }
    for kind, step, text in told:
        if kind == EventKind.CURE and (step, _said(text).get("kind")) not in lifted:
            yield step, text


def _said(text: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _next(folder: Path, rank: int, table: Table, column: str) -> int:
    highest = (pc.max(rows[column]).as_py() for rows in _tables(folder, rank, table, column))
    return max((value for value in highest if value is not None), default=-1) + 1


def _pairs(folder: Path, rank: int, table: Table, key: str, value: str) -> Iterator[tuple[Any, int]]:
    for rows in _tables(folder, rank, table, key, value):
        yield from zip(rows[key].to_pylist(), rows[value].to_pylist(), strict=True)


def _tables(folder: Path, rank: int, table: Table, *columns: str) -> Iterator[pa.Table]:
    listing = list_table(table_folder(folder, rank, table))
    for part in listing.parts.values():
        yield _read_part(part, list(columns))
    for journal in listing.open_journals:
        rows = read_journal(journal)
        if rows.num_rows:
            yield rows.select(columns)


def _read_part(part: Path, columns: list[str]) -> pa.Table:
    try:
        with open_regular(part) as opened, pq.ParquetFile(opened) as file:
            return file.read(columns)
    except (pa.ArrowException, OSError) as error:
        raise RunDamaged(
            f"{part} cannot be read ({error}). Move it away to go on with the rest of the run, or start a new folder."
        ) from error
