"""Writes a trace of very many ranks, for measuring what reads it: ``python benchmarks/large_traces/many_ranks.py``.

    python benchmarks/large_traces/many_ranks.py /tmp/ranks  # 1,024 ranks, 10,000 steps each
    python benchmarks/large_traces/many_ranks.py /tmp/ranks --ranks 8 --steps 500  # a quick one
    python benchmarks/large_traces/many_ranks.py --measure /tmp/ranks  # diagnosis, first page, Ranks page

Data-parallel training of a deep transformer in fp16, as the default mode records it: every rank has a row for each
step, its gradients at one step in fifty, and the replays of its incidents; rank 0 traces a step now and then. Something
is wrong with a few ranks, as in a large job: one gets a batch that overflows, later two at once do, one computes
another gradient norm from some step on, one died early, and one never wrote anything. Parts are written with the
trace's own schema, in the shape that the writer seals them; what is the same on all ranks is made once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from big_step import HALF, Step, transformer_step
from numpy.typing import NDArray

from ampscope.trace.files.journal import to_batch
from ampscope.trace.files.layout import journal_path, part_path, table_folder
from ampscope.trace.manifest import Manifest, Segment, write_manifest
from ampscope.trace.schema import (
    EventKind,
    EventRow,
    IncidentRow,
    Phase,
    ReplayStatus,
    Row,
    ScalerAction,
    ScalerEventRow,
    Source,
    Table,
    Trigger,
    arrow_schema,
)

START = 1_760_000_000.0
STEP_S = 0.6
#: Rows of one traced step, and one step in how many has its gradients recorded.
OPS, GRADS_EVERY = 900, 50
#: Steps that a scaler at 65536 loses while it finds its place.
CALIBRATING = 2
Columns = Mapping[str, NDArray[np.generic] | object]


@dataclass(frozen=True, slots=True)
class Job:
    """A job, and what is wrong with which of its ranks."""

    folder: Path
    ranks: int
    steps: int

    @property
    def bad_steps(self) -> dict[int, tuple[int, ...]]:
        """Steps at which the batch of some ranks overflowed."""
        one, two = self.ranks // 60, self.ranks // 5
        return {int(0.31 * self.steps): (one,), int(0.55 * self.steps): (two, two + 1), int(0.82 * self.steps): (one,)}

    @property
    def apart(self) -> tuple[int, int]:
        """A rank that computes something else, and since which step."""
        return int(0.4 * self.ranks), int(0.62 * self.steps)

    @property
    def died(self) -> tuple[int, int]:
        """A rank that died, and how many steps it had made."""
        return int(0.7 * self.ranks), int(0.79 * self.steps)

    @property
    def missing(self) -> int:
        """A rank that never wrote anything."""
        return self.ranks - 2

    @property
    def skipped(self) -> list[int]:
        """Steps that all ranks skipped."""
        return [*range(CALIBRATING), *self.bad_steps]


class Ranks:
    """Writes the ranks of a job, one after the other."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._step = transformer_step(OPS)
        self._shared = {
            Table.PARAMS: _sealed(to_batch(Table.PARAMS, self._step.params)),
            Table.SITES: _sealed(to_batch(Table.SITES, self._step.sites)),
            Table.SCALER_EVENTS: _sealed(to_batch(Table.SCALER_EVENTS, _scaler_events(job))),
            Table.GRADS: _sealed(_gradients(job, len(self._step.params))),
            Table.EDGES: _sealed(_edges(self._step, job.skipped)),
        }
        self._ops = {bad: _sealed(_ops(self._step, job.skipped, bad)) for bad in ((), *job.bad_steps.values())}
        self._norms = np.abs(np.random.default_rng(0).normal(1.0, 0.2, job.steps)).astype(np.float32).astype(float)

    def write(self) -> None:
        """Write all ranks and the manifest."""
        job = self._job
        job.folder.mkdir(parents=True)
        for rank in range(job.ranks):
            if rank != job.missing:
                self._write(rank)
        segments = (Segment(started=START, pid=1),)
        parameters = sum(param.numel for param in self._step.params)
        manifest = Manifest(
            ampscope="0.1.0",
            versions={"python": "3.12.4", "torch": "2.13.0", "platform": "Linux"},
            device="NVIDIA H200",
            world_size=job.ranks,
            created=START,
            name=job.folder.name,
            model="GPT",
            parameters=parameters,
            segments=segments,
            closed=START + STEP_S * job.steps,
            tags=("benchmark",),
        )
        write_manifest(job.folder, manifest)

    def _write(self, rank: int) -> None:
        job = self._job
        steps = job.died[1] if rank == job.died[0] else job.steps
        bad = tuple(ranks for ranks in job.bad_steps.values() if rank in ranks)
        tables = {
            **self._shared,
            Table.STEPS: _sealed(self._steps(rank, steps)),
            Table.INCIDENTS: _sealed(to_batch(Table.INCIDENTS, self._incidents(rank, steps))),
            Table.EVENTS: _sealed(to_batch(Table.EVENTS, _events(job, rank, steps))),
            Table.OPS: self._ops[bad[0] if bad else ()],
        }
        for table, content in tables.items():
            folder = table_folder(job.folder, rank, table)
            folder.mkdir(parents=True)
            part_path(journal_path(folder, 0)).write_bytes(content)

    def _steps(self, rank: int, steps: int) -> pa.RecordBatch:
        job, random = self._job, np.random.default_rng(rank)
        number = np.arange(steps)
        skipped = np.isin(number, job.skipped)
        losses = 3.2 * np.exp(-number / job.steps * 2) + random.normal(0, 0.05, steps)
        for step, ranks in job.bad_steps.items():
            losses[step : step + 1] = np.nan if rank in ranks else losses[step : step + 1]
        norms = np.where(skipped, np.inf, self._norms[:steps])
        if rank == job.apart[0]:
            norms[job.apart[1] :] *= 1.03
        traced = np.where(skipped, str(Source.REPLAY), "")
        columns = {
            "step": number,
            "optimizer": 0,
            "segment": 0,
            "time": START + number * STEP_S + random.normal(0, 2) + random.normal(0, 0.01, steps),
            "loss": losses,
            "scale": 65536.0 / 2.0 ** np.searchsorted(np.array(job.skipped), number, side="left"),
            "growth_tracker": 0,
            "found_inf": skipped,
            "skipped": skipped,
            "grad_norm": norms,
            "lr": 3e-4 * np.minimum(1.0, (number + 1) / 500),
            "micro_batches": 1,
            "duration_s": np.abs(random.normal(STEP_S, 0.01, steps)),
            "observing_s": 0.004,
            "traced": traced,
        }
        return _batch(Table.STEPS, columns, steps)

    def _incidents(self, rank: int, steps: int) -> list[Row]:
        """Its incidents: those of its own, and those of others that reached it through the reduction."""
        job, names = self._job, tuple(param.name for param in self._step.params)
        found: list[Row] = []
        for step in [each for each in job.skipped if each < steps]:
            own = rank in job.bad_steps.get(step, range(job.ranks))
            loss = float("nan") if own and step in job.bad_steps else 3.0
            trigger = Trigger.NONFINITE_LOSS if own and step in job.bad_steps else Trigger.NONFINITE_GRADIENT
            status = ReplayStatus.EXACT if own else ReplayStatus.NOT_REPRODUCED
            now = START + step * STEP_S
            found.append(IncidentRow(step, 0, 0, now, trigger, loss, 65536.0, status, "", 1.5, names, False, "{}"))
        return found


def _sealed(rows: pa.RecordBatch) -> bytes:
    """A part as the writer seals it."""
    content = BytesIO()
    pq.write_table(pa.Table.from_batches([rows]), content, compression="zstd")
    return content.getvalue()


def _batch(table: Table, columns: Columns, rows: int) -> pa.RecordBatch:
    """Arrays, or one value for all rows; a column that is not named is null."""
    schema = arrow_schema(table)
    return pa.record_batch([_array(columns.get(field.name), field.type, rows) for field in schema], schema=schema)


def _array(values: object, kind: pa.DataType, rows: int) -> pa.Array:
    if values is None:
        return pa.nulls(rows, kind)
    if isinstance(values, np.ndarray):
        return pa.array(values, from_pandas=False).cast(kind)
    return pa.repeat(pa.scalar(values, type=kind), rows)


def _events(job: Job, rank: int, steps: int) -> list[Row]:
    started = EventRow(0, 0, START, EventKind.START, "2.13.0")
    closed = EventRow(steps, 0, START + steps * STEP_S, EventKind.CLOSE, "")
    return [started, closed] if rank != job.died[0] else [started]


def _scaler_events(job: Job) -> list[Row]:
    line = ("train.py", 61, "main", "scaler.update()")
    found: list[Row] = [ScalerEventRow(0, 0, START, 0, None, ScalerAction.INIT, None, 65536.0, 0, "", *line)]
    for halved, step in enumerate(job.skipped):
        before, now = 65536.0 / 2.0**halved, START + step * STEP_S
        found.append(ScalerEventRow(step, 0, now, 0, None, ScalerAction.BACKOFF, before, before / 2, 0, "", *line))
    return found


def _gradients(job: Job, params: int) -> pa.RecordBatch:
    steps = np.repeat(np.arange(0, job.steps, GRADS_EVERY), params)
    random = np.random.default_rng(1)
    columns = {
        "step": steps,
        "optimizer": 0,
        "param": np.tile(np.arange(params), len(steps) // params),
        "max_abs": 2.0 ** random.normal(-8, 1, len(steps)),
        "nonfinite": False,
        "underflow": random.uniform(0, 0.02, len(steps)),
    }
    return _batch(Table.GRADS, columns, len(steps))


def _ops(step: Step, steps: Sequence[int], bad: tuple[int, ...]) -> pa.RecordBatch:
    """The ops of the replayed steps: on all ranks the scaled gradient overflows until the scale has found its place, on
    a ``bad`` rank the scores of a block do later, elsewhere all is finite then."""
    rows, culprit = len(step.sites), step.culprits[len(step.culprits) // 2]
    high = 2.0 ** np.array(step.exponents)
    spoilt = high.copy()
    spoilt[culprit], spoilt[culprit + 1 :] = np.inf, np.nan
    entries = [n for n, site in enumerate(step.sites) if site.op == "parameter" and n > culprit]
    spoilt[entries] = high[entries]
    scaled = next(n for n, site in enumerate(step.sites) if site.phase == Phase.BACKWARD and site.out_dtypes == (HALF,))
    calibrating = high.copy()
    calibrating[scaled], calibrating[scaled + 1 :] = np.inf, np.nan
    largest = np.concatenate([calibrating if n < CALIBRATING else spoilt if bad else high for n in steps])
    columns = {
        "step": np.repeat(np.array(steps), rows),
        "source": str(Source.REPLAY),
        "seq": np.tile(np.arange(rows), len(steps)),
        "out": 0,
        "site": np.tile(np.arange(rows), len(steps)),
        "micro_batch": 0,
        "numel": np.tile(step.numel, len(steps)),
        "min": np.where(np.isinf(largest), -1.0, -largest),
        "max": largest,
    }
    return _batch(Table.OPS, columns, rows * len(steps))


def _edges(step: Step, steps: Sequence[int]) -> pa.RecordBatch:
    reader, place, writer = (np.tile(each, len(steps)) for each in np.array(step.edges, dtype=np.int64).T)
    flow = {"seq": reader, "arg": place, "from_seq": writer, "from_out": 0, "in_place": False, "partial": False}
    number = np.repeat(np.array(steps), len(step.edges))
    return _batch(Table.EDGES, {"step": number, "source": str(Source.REPLAY), **flow}, len(reader))


def _diagnosis(folder: Path) -> str:
    from ampscope.analysis.diagnosis.diagnosis import diagnose

    return diagnose(folder).summary


def _page(name: str) -> Callable[[Path], str]:
    """A page of the app, drawn by a server without a browser."""

    def drawn(folder: Path) -> str:
        from streamlit.testing.v1 import AppTest

        root = Path(__file__).resolve().parents[2]
        sys.path.insert(0, str(root / "app"))
        sys.argv = ["streamlit_app.py", str(folder)]
        page = AppTest.from_file(str(root / "app" / "workbench.py"), default_timeout=600).run()
        if name != "overview":
            page.switch_page(f"app_pages/{name}.py").run()
        assert not page.exception, page.exception
        return page.title[0].value

    return drawn


_MEASURED: dict[str, Callable[[Path], str]] = {
    "diagnosis": _diagnosis,
    "overview": _page("overview"),
    "ranks": _page("ranks"),
}


def measure(folder: Path) -> None:
    """Seconds on the wall and of the processor, and the most memory of each, in a process of its own."""
    for name in _MEASURED:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, str(folder)], capture_output=True, text=True, check=False
        )
        sys.stdout.write(done.stdout if done.returncode == 0 else done.stderr)


def _measure_one(name: str, folder: Path) -> None:
    begun = time.perf_counter()
    said = _MEASURED[name](folder)
    seconds = time.perf_counter() - begun
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "wall": round(seconds, 1),
        "processor": round(used.ru_utime + used.ru_stime, 1),
        "peak_gb": round(used.ru_maxrss / 1e6, 2),  # kilobytes on Linux
        "load": round(os.getloadavg()[0], 1),
        "said": said[:60],
    }
    sys.stdout.write(json.dumps({name: found}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the trace goes, or lies; it must not exist to be written")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--measure", action="store_true", help="measure what reads the trace in FOLDER")
    parser.add_argument("--one", choices=_MEASURED, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        _measure_one(asked.one, asked.folder)
    elif asked.measure:
        measure(asked.folder)
    else:
        begun = time.perf_counter()
        Ranks(Job(asked.folder, asked.ranks, asked.steps)).write()
        parts = list(asked.folder.rglob("*.parquet"))
        size = sum(path.stat().st_size for path in parts)
        spent = time.perf_counter() - begun
        sys.stdout.write(f"{len(parts):,} parts, {size / 1e6:,.0f} MB, in {spent:,.0f} s\n")


if __name__ == "__main__":
    main()
