"""Writes a fleet of runs, and measures what its questions cost: ``python benchmarks/large_traces/big_fleet.py``.

    python benchmarks/large_traces/big_fleet.py /tmp/fleet --runs 300 --steps 200  # writes one
    python benchmarks/large_traces/big_fleet.py /tmp/fleet --measure  # with DuckDB and with Spark, where that is there
    python benchmarks/large_traces/big_fleet.py /tmp/fleet --sweep benchmarks/results/fleet.json  # of many sizes

Two weeks of trainings on sixteen hosts. Some lose steps, some end with a collapsed loss scale, some misuse the scaler;
of one host all do in the second week. The same arguments write the same rows. Everything but the steps goes through
the trace's writer; these are made with numpy and go through its journals, sealed as it seals them. `--sweep` also
measures how close values come to overflow (`ampscope ranges`) in runs of more and more op rows, which `big_trace.py`
writes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from big_trace import BigRun, Bulk

from ampscope.analysis.diagnosis.fleet import Diagnosed, fleet
from ampscope.analysis.precision.ranges.ranges import ranges
from ampscope.trace.manifest import Manifest
from ampscope.trace.read.find import runs_below
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import FindingRow, IncidentRow, ReplayStatus, Table, Trigger
from ampscope.trace.vocabulary import Cause
from ampscope.trace.write.writer import TraceWriter

START, DAY, STEP_S = 1_760_000_000.0, 86_400.0, 0.6
HOSTS, DAYS, BAD_HOST = 16, 14, 3
ENGINES = ("duckdb", "spark")
#: Rows that are made at a time.
_BATCH = 1 << 16


@dataclass(frozen=True, slots=True)
class Shape:
    """So many runs of so many ranks, each of which makes so many steps."""

    runs: int
    ranks: int
    steps: int

    @property
    def rows(self) -> int:
        """Rows of steps."""
        return self.runs * self.ranks * self.steps


#: More and more runs, large jobs, and more and more rows in as many runs.
SWEEP = (
    *(Shape(runs, 1, 200) for runs in (100, 300, 1_000, 3_000, 10_000)),
    *(Shape(1, ranks, 1_000) for ranks in (256, 1_024)),
    *(Shape(100, 1, steps) for steps in (10_000, 100_000, 1_000_000)),
)
#: Op rows of one run.
OP_ROWS = (100_000, 1_000_000, 10_000_000, 50_000_000, 500_000_000)


def write(folder: Path, shape: Shape) -> None:
    """A fleet; runs that are there already are left as they are."""
    for number in range(shape.runs):
        run = folder / f"day-{number * DAYS // shape.runs:02d}" / f"run-{number:05d}"
        if not run.exists():
            _write_run(run, number, shape)


def _write_run(run: Path, number: int, shape: Shape) -> None:
    random = np.random.default_rng(number)
    day, host = number * DAYS / shape.runs, int(random.integers(HOSTS))
    is_bad = host == BAD_HOST and day >= DAYS / 2
    lost = int(random.integers(1, 20)) if is_bad or random.random() < 0.05 else 0
    collapses, misuses = bool(random.random() < 0.02), is_bad or bool(random.random() < 0.05)
    manifest = Manifest(
        ampscope="0.1.0",
        versions={"python": "3.12.4", "torch": "2.13.0" if day > 9 else "2.12.0"},
        device="NVIDIA H200",
        world_size=shape.ranks,
        created=START + day * DAY,
        name=run.name,
        model="GPT",
        host=f"node-{host:02d}",
    )
    bad = np.sort(random.choice(np.arange(20, shape.steps), min(lost, shape.steps - 20), replace=False))
    for rank in range(shape.ranks):
        with TraceWriter(run, rank=rank, manifest=manifest) as writer:
            writer.put(Table.INCIDENTS, [_incident(int(step), manifest.created) for step in bad])
            if misuses:
                line = ("train.py", 61, "main", "clip_grad_norm_(...)")
                cause = Cause.MISUSE_CLIP_BEFORE_UNSCALE
                writer.put(Table.FINDINGS, [FindingRow(1, 0, manifest.created, cause, "", *line, "{}")])
        _write_steps(run, rank, shape.steps, bad, collapses=collapses)


def _incident(step: int, begun: float) -> IncidentRow:
    status, now = ReplayStatus.UNAVAILABLE, begun + step * STEP_S
    return IncidentRow(step, 0, 0, now, Trigger.NONFINITE_GRADIENT, 3.0, 65536.0, status, "", 0.0, (), False, "{}")


def _write_steps(run: Path, rank: int, steps: int, bad: np.ndarray[Any, Any], *, collapses: bool) -> None:
    bulk, random = Bulk(run, Table.STEPS, rank), np.random.default_rng(rank)
    for first in range(0, steps, _BATCH):
        number = np.arange(first, min(first + _BATCH, steps))
        skipped = np.isin(number, bad) | (number < 2)
        rows = len(number)
        columns = {
            "step": number, "optimizer": 0, "segment": 0, "time": START + number * STEP_S,
            "loss": 3.2 * np.exp(-number / steps * 2) + random.normal(0, 0.05, rows),
            "scale": 65536.0 / 2.0 ** (np.maximum(0, number - steps + 20) if collapses else np.minimum(number, 2)),
            "growth_tracker": 0, "found_inf": skipped, "skipped": skipped,
            "grad_norm": np.where(skipped, np.inf, np.abs(random.normal(1.0, 0.2, rows))), "lr": 3e-4,
            "micro_batches": 1, "duration_s": np.abs(random.normal(STEP_S, 0.01, rows)), "observing_s": 0.004,
            "traced": "",
        }  # fmt: skip
        bulk.append(columns, rows)
    bulk.seal()


def measured(folder: Path, question: str) -> dict[str, object]:
    """What a question costs with each engine, each in a process of its own."""
    found: dict[str, object] = {}
    for engine in ENGINES:
        done = subprocess.run(
            [sys.executable, __file__, str(folder), "--one", question, "--engine", engine],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found[engine] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-400:]
    return found


def measure_one(folder: Path, question: str, engine: str) -> dict[str, float]:
    """Seconds on the wall, and of the processor in this process and its children: to start, at first and again."""
    told: dict[str, float] = {"load": round(os.getloadavg()[0], 1)}
    with _Clock(told, "start"):
        session: Any = _started() if engine == "spark" else engine
    for name in ("first", "again"):
        with _Clock(told, name):
            if question == "fleet":
                fleet(runs_below([folder]), diagnosed=Diagnosed.NONE, engine=session)
            else:
                with open_run(folder, engine=session) as run:
                    ranges(run)
    told["peak_gb"] = round(_peak_kb() / 1e6, 2)
    if engine == "spark":
        session.stop()
    return told


def _started() -> Any:
    from ampscope.trace.read.spark import session_for

    session = session_for("spark").spark
    session.range(1).collect()
    return session


class _Clock:
    """Writes down what passes within."""

    def __init__(self, told: dict[str, float], name: str) -> None:
        self._told, self._name = told, name

    def __enter__(self) -> None:
        self._wall, self._processor = time.perf_counter(), _processor_s()

    def __exit__(self, *_: object) -> None:
        self._told[self._name] = round(time.perf_counter() - self._wall, 2)
        self._told[f"{self._name}_processor"] = round(_processor_s() - self._processor, 2)


def _processor_s() -> float:
    """Of this process and all that it has started and that runs: Spark is another."""
    ticks = 0
    for process in _family():
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _peak_kb() -> int:
    lines = [line for each in _family() for line in (each / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _family() -> list[Path]:
    """The folders below ``/proc`` of this process and those below it."""
    found = [Path("/proc/self")]
    for process in found:  # which grows meanwhile
        for task in (process / "task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
                found += [Path("/proc") / child for child in (task / "children").read_text().split()]
    return found


def sweep(folder: Path, file: Path) -> None:
    """Write and measure all sizes; what the file has already is not measured again."""
    for shape in SWEEP:
        place = folder / f"{shape.runs}-{shape.ranks}-{shape.steps}"
        size = {"runs": shape.runs, "ranks": shape.ranks, "steps": shape.steps, "rows": shape.rows}
        _add(file, "fleet", size, place, partial(write, place, shape))
    for rows in OP_ROWS:
        place = folder / f"ops-{rows}"
        _add(file, "ranges", {"rows": rows}, place, partial(_write_ops, place, rows))


def _write_ops(run: Path, rows: int) -> None:
    if not run.exists():
        BigRun(run, steps=rows // 1000, rows=1000).write()


def _add(file: Path, question: str, size: dict[str, int], place: Path, written: Callable[[], None]) -> None:
    """Measure one size, unless the file has it."""
    empty: dict[str, Any] = {"cores": os.cpu_count(), "fleet": [], "ranges": []}
    found = json.loads(file.read_text()) if file.exists() else empty
    if any(size.items() <= row.items() for row in found[question]):
        return
    written()
    row = {**size, **measured(place, question)}
    print(json.dumps(row), flush=True)
    found[question].append(row)
    file.write_text(json.dumps(found, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the fleet goes, or lies")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200, help="of each rank, at least 40")
    parser.add_argument("--measure", action="store_true", help="measure the fleet that lies there")
    parser.add_argument("--sweep", type=Path, metavar="JSON", help="write and measure fleets of many sizes")
    parser.add_argument("--one", choices=("fleet", "ranges"), help=argparse.SUPPRESS)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure_one(asked.folder, asked.one, asked.engine)))
    elif asked.measure:
        print(json.dumps(measured(asked.folder, "fleet"), indent=2))
    elif asked.sweep:
        sweep(asked.folder, asked.sweep)
    else:
        write(asked.folder, Shape(asked.runs, asked.ranks, asked.steps))


if __name__ == "__main__":
    main()
