"""What failures cost: a bad step's replays, in step times, and a run in which every third step fails.

    python benchmarks/incidents.py                   # all sizes, some minutes on two cores
    python benchmarks/incidents.py --sizes small --run-steps 1500
    python benchmarks/incidents.py --device cuda

A watched training and an unwatched one take turns in one process, on the same batches. The cost of an incident is what
its step takes longer than the unwatched one, in median unwatched steps. One step in three of a run fails; its ratio is
of all the time that all the watched steps took to that of all the unwatched ones. What a run spends on replays in its
first seconds whatever its length, is told apart: `later_ratio` leaves out the first tenth.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from failures import Failing
from stages import machine, peak_memory
from workload import SIZES, Place, usual_dtype

import ampscope
from ampscope.trace.schema import Table

RESULTS = Path(__file__).parent / "results"
#: Steps of a run, a third of which fail, unless ``--run-steps`` says otherwise.
RUN_STEPS = {"tiny": 3000, "small": 1500, "large": 150}
#: Steps of the runs whose memory is compared.
MEMORY_STEPS = {"tiny": 300, "small": 300, "large": 60}
#: Incidents of which the median is taken, after one that is not counted.
INCIDENTS = {"tiny": 15, "small": 15, "large": 5}
#: Past the steps at a run's start in which AMPscope looks closely by default.
WARM_UP = 12
#: Half of the default: the clock runs for both trainings.
OVERHEAD = 0.01


class Watched:
    """A failing training under ``ampscope.watch``."""

    def __init__(self, size: str, place: Place, gates: int, **options: Any) -> None:
        self.training = Failing(SIZES[size], place, gates)
        self.folder = tempfile.TemporaryDirectory()
        run = Path(self.folder.name) / "run"
        self.scope = ampscope.watch(self.training.model, self.training.scaler, dir=run, quiet=True, **options)

    def close(self) -> dict[str, Any]:
        """Ends the watch; returns how its incidents were replayed, and the size of what was written."""
        self.scope.close()
        run = ampscope.open_run(self.scope.folder)
        facts = {
            "replays": dict(Counter(row.replay for row in run.rows(Table.INCIDENTS))),
            "trials": len(list(run.rows(Table.REPLAYS))),
            "trace_bytes": sum(file.stat().st_size for file in self.scope.folder.rglob("*") if file.is_file()),
        }
        self.folder.cleanup()
        return facts


@contextmanager
def _watched(facts: dict[str, Any], *args: Any, **options: Any) -> Iterator[Failing]:
    watched = Watched(*args, **options)
    try:
        yield watched.training
    finally:
        facts.update(watched.close())


def _timed(training: Failing, frames: torch.Tensor | None = None, gate: int | None = None) -> float:
    start = time.perf_counter()
    training.step(frames, gate)
    training.place.wait()
    return time.perf_counter() - start


def measure_incident(size: str, place: Place, *, poisoned: bool, replay_budget: int) -> dict[str, Any]:
    """What one incident costs, in unwatched steps.

    Args:
        size: Of the model.
        place: Where it runs.
        poisoned: A batch that makes nearly every value non-finite, instead of one gradient; no change cures that.
        replay_budget: Counterfactual replays, at most; each incident has a new cause, so that none of them is spared.
    """
    incidents = INCIDENTS[size]
    facts: dict[str, Any] = {}
    plain = Failing(SIZES[size], place, incidents + 1)
    with _watched(facts, size, place, incidents + 1, overhead=1.0, replay_budget=replay_budget) as watched:
        healthy, more = [], []
        for _ in range(WARM_UP):
            plain.step()
            watched.step()
        for number in range(incidents + 1):
            bad = {"frames": plain.poisoned()} if poisoned else {"gate": number}
            for _ in range(3):
                healthy.append(_timed(plain))
                _timed(watched)
            unwatched = _timed(plain, **bad)
            more.append(_timed(watched, **bad) - unwatched)
    step = statistics.median(healthy)
    costs = [seconds / step for seconds in more[1:]]
    return {"steps": statistics.quantiles(costs, n=4, method="inclusive"), "step_s": step, **facts}


def measure_run(size: str, place: Place, steps: int) -> dict[str, Any]:
    """Two runs of ``steps`` steps, every third of which fails: all the time of the watched one over the other's."""
    facts: dict[str, Any] = {}
    plain = Failing(SIZES[size], place, gates=1)
    with _watched(facts, size, place, 1, overhead=OVERHEAD) as watched:
        plain.step()  # a process's very first step loads kernels
        seconds: dict[Failing, list[float]] = {plain: [], watched: []}
        order = [plain, watched]
        for start in range(0, steps, 3):
            for training in order:
                seconds[training] += [_timed(training, gate=n if n % 3 == 2 else None) for n in range(start, start + 3)]
            order.reverse()
    first = steps // 10
    return {
        "run_steps": steps,
        "wall_ratio": sum(seconds[watched]) / sum(seconds[plain]),
        "later_ratio": sum(seconds[watched][first:]) / sum(seconds[plain][first:]),
        "unwatched_s": sum(seconds[plain]),
        **facts,
    }


def measure_memory(size: str, place: Place, steps: int) -> dict[str, int]:
    """Peak memory of a run with failures beyond that of the same run unwatched, each in a new process; bytes."""
    spawn = multiprocessing.get_context("spawn")
    peaks = {}
    for watch in (False, True):
        with ProcessPoolExecutor(1, mp_context=spawn) as alone:
            peaks[watch] = alone.submit(_peaks, size, place, steps, watch=watch).result()
    return {key: value - peaks[False][key] for key, value in peaks[True].items()}


def _peaks(size: str, place: Place, steps: int, *, watch: bool) -> dict[str, int]:
    torch.set_num_threads(place.threads)
    watched = Watched(size, place, gates=1) if watch else None
    training = watched.training if watched else Failing(SIZES[size], place, gates=1)
    peaks: dict[str, int] = {}
    for number in range(steps):
        training.step(gate=number if number % 3 == 2 else None)
        if number == steps // 5:
            peaks |= {f"{key}_at_a_fifth": value for key, value in peak_memory(place).items()}
    peaks |= peak_memory(place)
    if watched:
        watched.close()
    return peaks


def show(title: str, report: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, cost in report["incident"].items():
        low, middle, high = cost["steps"]
        print(f"  an incident, {name:38} {middle:5.2f} steps ({low:.2f} to {high:.2f}), {cost['trials']} trials in all")
    run = report["run"]
    print(f"  {run['run_steps']} steps, a third of them bad: {run['wall_ratio']:.3f} times the unwatched", end="")
    print(f" {run['unwatched_s']:.0f} s, {run['later_ratio']:.3f} times after the first tenth", end="")
    print(f"; replays {run['replays']}, {run['trials']} trials")
    memory = ", ".join(f"{key} {value / 2**20:+.1f} MB" for key, value in report["memory_more"].items())
    print(f"  memory beyond the unwatched run's: {memory}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--run-steps", type=int, help="steps of the failing run (tiny 3000, small 1500, large 150)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="threads torch may use in an op")
    parser.add_argument("--output", type=Path, help="JSON file; default benchmarks/results/DEVICE-incidents.json")
    return parser.parse_args()


def measure(size: str, place: Place, steps: int) -> dict[str, Any]:
    """All of the above for one size."""
    incident = {
        "one bad value, faithful replay": measure_incident(size, place, poisoned=False, replay_budget=0),
        "all values bad, faithful replay": measure_incident(size, place, poisoned=True, replay_budget=0),
        "one bad value, with counterfactuals": measure_incident(size, place, poisoned=False, replay_budget=3),
    }
    return {
        "shape": asdict(SIZES[size]),
        "incident": incident,
        "run": measure_run(size, place, steps),
        "memory_more": measure_memory(size, place, MEMORY_STEPS[size]),
    }


def main() -> int:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    place = Place(args.device, usual_dtype(args.device), torch.get_num_threads())
    facts = machine(place)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    report: dict[str, Any] = {"machine": facts, "sizes": {}}
    for size in args.sizes:
        measured = measure(size, place, args.run_steps or RUN_STEPS[size])
        show(f"{size}: {asdict(SIZES[size])}", measured)
        report["sizes"][size] = measured
    output = args.output or RESULTS / f"{args.device}-incidents.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
