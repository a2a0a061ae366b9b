"""Writes a trace as large as they get, for measuring what reads it: ``python benchmarks/large_traces/big_trace.py``.

    python benchmarks/large_traces/big_trace.py /tmp/big  # 20 000 steps, all traced: 50 million op rows
    python benchmarks/large_traces/big_trace.py /tmp/big --steps 500 --rows 1e6   # a quick one
    python benchmarks/large_traces/big_trace.py /tmp/many --runs 500  # 500 short runs, for the list of runs

A deep transformer in fp16 whose attention scores overflow three times. Steps, sites, parameters, scaler events and
incidents go through the trace's writer row by row; the bulk tables (ops, edges, gradients) are made with numpy and go
through the writer's own journals, which are sealed at the writer's own size.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
from big_step import transformer_step
from numpy.typing import NDArray

from ampscope.trace.files.journal import Journal
from ampscope.trace.files.layout import journal_path, list_table, table_folder
from ampscope.trace.manifest import Manifest
from ampscope.trace.schema import (
    EventKind,
    EventRow,
    IncidentRow,
    ReplayStatus,
    Row,
    ScalerAction,
    ScalerEventRow,
    Source,
    StepRow,
    Table,
    Trigger,
    arrow_schema,
)
from ampscope.trace.write.sealing import seal
from ampscope.trace.write.writer import TraceWriter
from ampscope.trace.write.writing_threads import SealAt

START = 1_760_000_000.0
STEP_S = 0.6
INTERVAL = 2000  #: good steps after which the scale doubles
VERSIONS = {"python": "3.12.4", "torch": "2.13.0", "platform": "Linux"}
Columns = Mapping[str, NDArray[np.generic] | object]


class Bulk:
    """A bulk table, written batch by batch through the writer's journals."""

    def __init__(self, run: Path, table: Table, rank: int = 0) -> None:
        self._folder = table_folder(run, rank, table)
        self._schema = arrow_schema(table)
        self._journal: Journal | None = None
        self.rows = 0

    def append(self, columns: Columns, rows: int) -> None:
        """A batch of so many ``rows``: arrays, or one value for all rows; a column that is not named is null."""
        batch = pa.record_batch([_array(columns.get(f.name), f.type, rows) for f in self._schema], schema=self._schema)
        if self._journal is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._journal = Journal(journal_path(self._folder, list_table(self._folder).next_number), self._schema)
        self._journal.append(batch)
        self.rows += rows
        if SealAt().reached_by(self._journal):
            self.seal()

    def seal(self) -> None:
        """Turn what is journaled into a part."""
        if self._journal is not None:
            self._journal.close()
            seal(self._journal.path)
            self._journal = None


def _array(values: object, kind: pa.DataType, rows: int) -> pa.Array:
    if values is None:
        return pa.nulls(rows, kind)
    if isinstance(values, np.ndarray):
        return pa.array(values, from_pandas=False).cast(kind)
    return pa.repeat(pa.scalar(values, type=kind), rows)


class BigRun:
    """A run of ``steps`` steps, of which every ``every``-th is traced, with three incidents."""

    def __init__(self, folder: Path, *, steps: int, rows: int, seed: int = 0) -> None:
        self.folder = folder
        self.steps = steps
        self.step = transformer_step(rows)
        self.random = np.random.default_rng(seed)
        self.incidents = {int(steps * part) for part in (0.31, 0.55, 0.82)}
        self.numel = self.step.numel
        self.base = np.array(self.step.exponents)
        self.edges = np.array(self.step.edges, dtype=np.int64)

    def write(self) -> int:
        """Write everything; returns the number of op rows."""
        manifest = Manifest(
            ampscope="0.1.0",
            versions=VERSIONS,
            device="NVIDIA H200",
            created=START,
            name=self.folder.name,
            model="GPT",
            parameters=sum(param.numel for param in self.step.params),
            tags=("benchmark",),
        )
        tables = {table: Bulk(self.folder, table) for table in (Table.OPS, Table.EDGES, Table.GRADS)}
        with TraceWriter(self.folder, manifest=manifest, disk_budget=1 << 40) as writer:
            writer.put(Table.SITES, self.step.sites)
            writer.put(Table.PARAMS, self.step.params)
            for number, rows in enumerate(self._history()):
                for table, row in rows:
                    writer.put(table, [row])
                self._traced(tables, number, Source.LIVE)
                if number in self.incidents:
                    self._traced(tables, number, Source.REPLAY)
            for bulk in tables.values():
                bulk.seal()
        return tables[Table.OPS].rows

    def _history(self) -> Iterator[list[tuple[Table, Row]]]:
        """Of each step its row, and what the scaler and AMPscope had to say."""
        scale, good = 65536.0, 0
        line = ("train.py", 61, "main", "scaler.update()")
        for step in range(self.steps):
            now = START + step * STEP_S
            bad = step in self.incidents
            skipped = bad or step < 2
            found: list[tuple[Table, Row]] = []
            loss = float("nan") if bad else float(3.2 * np.exp(-step / self.steps * 2) + self.random.normal(0, 0.05))
            norm = float("inf") if skipped else float(abs(self.random.normal(1.0, 0.2)))
            rate = 3e-4 * min(1.0, (step + 1) / 500)
            found.append(
                (
                    Table.STEPS,
                    StepRow(
                        step, 0, 0, now, loss, scale, good, skipped, skipped, norm, rate, 1, STEP_S, 0.01, Source.LIVE
                    ),
                )
            )
            if bad:
                row = IncidentRow(
                    step,
                    0,
                    0,
                    now,
                    Trigger.NONFINITE_LOSS,
                    loss,
                    scale,
                    ReplayStatus.EXACT,
                    "",
                    1.5,
                    ("blocks.0.attn.qkv.weight",),
                    False,
                    "{}",
                )
                found.append((Table.INCIDENTS, row))
            good = 0 if skipped else good + 1
            after = scale / 2 if skipped else scale * 2 if good == INTERVAL else scale
            if after != scale:
                action = ScalerAction.BACKOFF if skipped else ScalerAction.GROWTH
                event = ScalerEventRow(step, 0, now, 0, None, action, scale, after, 0, "", *line)
                found.append((Table.SCALER_EVENTS, event))
                good, scale = 0, after
            if step and step % 5000 == 0:
                found.append((Table.EVENTS, EventRow(step, 0, now, EventKind.NOTE, f"epoch {step // 5000}")))
            yield found

    def _traced(self, tables: Mapping[Table, Bulk], number: int, source: Source) -> None:
        """The ops and edges of one step, and once its gradients."""
        rows = len(self.base)
        high = 2.0 ** (self.base + self.random.normal(0, 0.5, rows))
        low = -high * self.random.uniform(0.5, 1.0, rows)
        if number in self.incidents:
            self._spoil(low, high)
        where = {"step": number, "source": str(source)}
        sequence = np.arange(rows)
        counts = self._counts(high, rows) if source == Source.REPLAY else {}
        tables[Table.OPS].append(
            {
                **where,
                "seq": sequence,
                "out": 0,
                "site": sequence,
                "micro_batch": 0,
                "numel": self.numel,
                "min": low,
                "max": high,
                **counts,
            },
            rows,
        )
        reader, place, writer = self.edges.T
        flow = {"seq": reader, "arg": place, "from_seq": writer, "from_out": 0, "in_place": False, "partial": False}
        tables[Table.EDGES].append({**where, **flow}, len(reader))
        if source == Source.LIVE:
            self._gradients(tables[Table.GRADS], number)

    def _spoil(self, low: NDArray[np.float64], high: NDArray[np.float64]) -> None:
        """The scores of a block in the middle overflow, and all that follows them is NaN."""
        culprit = self.step.culprits[len(self.step.culprits) // 2]
        high[culprit] = np.inf
        low[culprit + 1 :] = high[culprit + 1 :] = np.nan
        entries = [number for number, site in enumerate(self.step.sites) if site.op == "parameter" and number > culprit]
        low[entries], high[entries] = -0.2, 0.2

    def _counts(self, high: NDArray[np.float64], rows: int) -> Columns:
        """What a replay counts besides; histograms of 24 powers of two."""
        share = np.array([1, 1, 2, 2, 4, 4, 8, 8, 16, 32, 64, 64, 64, 64, 32, 32, 16, 8, 8, 4, 4, 2, 2, 1], float)
        counts = np.outer(self.numel, share / share.sum()).astype(np.int64)
        finite = np.isfinite(high)
        return {
            "nan": np.where(np.isnan(high), self.numel, 0),
            "posinf": np.where(np.isposinf(high), 12, 0),
            "neginf": 0,
            "zeros": 0,
            "subnormals": 0,
            "max_finite": np.where(finite, high, 65504.0),
            "min_positive": np.where(finite, high * 2.0**-24, 1e-6),
            "exp_low": np.where(finite, np.floor(np.log2(np.where(finite, high, 1.0))) - 23, -8).astype(np.int16),
            "exp_counts": pa.array(list(counts)).to_numpy(zero_copy_only=False),
        }

    def _gradients(self, bulk: Bulk, number: int) -> None:
        rows = len(self.step.params)
        bad = number in self.incidents
        sizes = None if bad else 2.0 ** self.random.normal(-8, 1, rows)
        columns = {"max_abs": sizes, "nonfinite": bad, "underflow": self.random.uniform(0, 0.02, rows)}
        bulk.append({"step": number, "optimizer": 0, "param": np.arange(rows), **columns}, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the trace goes; new or empty")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--rows", type=float, default=50e6, help="op rows over all steps, about")
    parser.add_argument("--runs", type=int, default=0, help="write so many short runs into the folder instead")
    asked = parser.parse_args()
    begun = time.perf_counter()
    if asked.runs:
        written = sum(
            BigRun(asked.folder / f"run-{number:04d}", steps=40, rows=200, seed=number).write()
            for number in range(asked.runs)
        )
    else:
        written = BigRun(asked.folder, steps=asked.steps, rows=round(asked.rows / asked.steps)).write()
    size = sum(path.stat().st_size for path in asked.folder.rglob("*.parquet"))
    sys.stdout.write(f"{written:,} op rows, {size / 1e6:,.0f} MB, in {time.perf_counter() - begun:,.0f} s\n")


if __name__ == "__main__":
    main()
