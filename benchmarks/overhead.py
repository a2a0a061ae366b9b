"""What watching costs: AMPscope beside the tools people use today, each as a ratio to the same training unwatched.

    python benchmarks/overhead.py                    # all sizes, a few minutes on two cores
    python benchmarks/overhead.py --sizes small --steps 60
    python benchmarks/overhead.py --device cuda
    python benchmarks/overhead.py --isolate          # each variant in a process of its own
    python benchmarks/overhead.py --against ../old   # and AMPscope as it is in another checkout, in turns

The variants take turns in short blocks, in an order that rotates, so that a machine that grows slower or busier slows
all of them. A ratio is taken within a round, between neighbours in time; the table shows the rounds' median and the
quartiles. With ``--isolate`` they take the same turns in separate processes: if the ratios agree, an open scope does
not slow the models that it does not watch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from stages import Block, Elsewhere, Here, Stage, machine
from variants import UNWATCHED, VARIANTS, Unavailable
from workload import SIZES, Place, usual_dtype

RESULTS = Path(__file__).parent / "results"
#: Timed steps a variant takes unless ``--steps`` says otherwise.
STEPS = {"tiny": 120, "small": 60, "large": 16}
#: After the name of a variant: with the AMPscope of the other checkout.
OTHER = ", other tree"
#: Past the steps at a run's start in which AMPscope looks closely by default.
WARM_UP = 12


@dataclass(slots=True)
class Measured:
    """What became of one variant."""

    warm_up_s: float = 0.0  #: all of its warm-up steps together
    blocks: list[Block] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""  #: why it was not measured


@dataclass(frozen=True, slots=True)
class Plan:
    """How many steps, in which blocks."""

    steps: int
    block: int
    warm_up: int
    isolate: bool
    other_tree: Path | None = None


@contextmanager
def _stages(
    names: list[str], size: str, place: Place, plan: Plan, into: dict[str, Measured]
) -> Iterator[dict[str, Stage]]:
    stages: dict[str, Stage] = {}
    for name in names:
        try:
            stages[name] = _elsewhere(name, size, place, plan) if plan.isolate else Here(name, size, place)
        except Unavailable as reason:
            into[name].skipped = str(reason)
    try:
        yield stages
    finally:
        with ExitStack() as closing:
            for name, stage in stages.items():
                closing.callback(_close, stage, into[name])


def _elsewhere(name: str, size: str, place: Place, plan: Plan) -> Stage:
    tree = plan.other_tree if name.endswith(OTHER) else None
    return Elsewhere(name.removesuffix(OTHER), size, place, tree)


def _close(stage: Stage, measured: Measured) -> None:
    measured.facts.update(stage.close())


def measure(names: list[str], size: str, place: Place, plan: Plan) -> dict[str, Measured]:
    """Let the variants take turns until each has taken its steps."""
    measured = {name: Measured() for name in names}
    Here(UNWATCHED, size, place).run(2)  # a process's very first steps load kernels; let no variant pay for that
    with _stages(names, size, place, plan, measured) as stages:
        for name, stage in stages.items():
            measured[name].warm_up_s = stage.run(plan.warm_up).wall * plan.warm_up
        order = list(stages)
        for _round in range(max(1, plan.steps // plan.block)):
            for name in order:
                measured[name].blocks.append(stages[name].run(plan.block))
            order.append(order.pop(0))
    return measured


def measure_memory(names: list[str], size: str, place: Place, plan: Plan) -> dict[str, int]:
    """Peak memory of a run's first steps, each variant alone in a new process; bytes."""
    peaks: dict[str, int] = {}
    for name in names:
        try:
            stage = _elsewhere(name, size, place, plan)
        except Unavailable:
            continue
        stage.run(WARM_UP)
        for key, value in stage.close().items():
            if key.startswith("peak_"):
                peaks[name] = value
    return peaks


def ratios(variant: Measured, unwatched: Measured, clock: str) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of a variant's rounds, each over the unwatched block of its round."""
    pairs = zip(variant.blocks, unwatched.blocks, strict=True)
    values = [getattr(mine, clock) / getattr(theirs, clock) for mine, theirs in pairs]
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def summarize(measured: dict[str, Measured], peaks: dict[str, int]) -> dict[str, Any]:
    """One JSON-ready row a variant."""
    unwatched = measured[UNWATCHED]
    rows: dict[str, Any] = {}
    for name, one in measured.items():
        if one.skipped:
            rows[name] = {"skipped": one.skipped}
            continue
        rows[name] = {
            "step_s": statistics.median(block.wall for block in one.blocks),
            "wall_ratio": ratios(one, unwatched, "wall"),
            "cpu_ratio": ratios(one, unwatched, "cpu"),
            "warm_up_s": one.warm_up_s,
            **one.facts,
        }
        if name in peaks:
            rows[name] |= {"peak_bytes": peaks[name], "peak_bytes_more": peaks[name] - peaks[UNWATCHED]}
    return rows


def show(title: str, rows: dict[str, Any]) -> None:
    print(f"\n{title}")
    print(f"  {'':24} {'ms/step':>9} {'wall ratio (25-75%)':>24} {'cpu':>7} {'warm-up':>9} {'memory':>9} {'disk':>9}")
    for name, row in rows.items():
        if "skipped" in row:
            print(f"  {name:24} skipped: {row['skipped']}")
            continue
        low, middle, high = row["wall_ratio"]
        print(
            f"  {name:24} {row['step_s'] * 1e3:9.1f} {f'{middle:.3f} ({low:.3f}-{high:.3f})':>24}"
            f" {row['cpu_ratio'][1]:7.3f} {row['warm_up_s']:8.2f}s {_megabytes(row, 'peak_bytes_more')}"
            f" {_megabytes(row, 'trace_bytes')}"
        )


def _megabytes(row: dict[str, Any], key: str) -> str:
    return f"{row[key] / 2**20:+6.2f} MB" if key in row else f"{'-':>9}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, help="timed steps a variant takes (small 60, large 16)")
    parser.add_argument("--block", type=int, default=2, help="steps a variant takes in a turn")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps taken before, reported apart")
    parser.add_argument("--isolate", action="store_true", help="each variant in a process of its own")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another checkout, whose AMPscope takes turns too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), help="fp16, or bf16 on a CPU without fp16 units")
    parser.add_argument("--threads", type=int, help="threads torch may use in an op")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory, measured in new processes")
    parser.add_argument("--output", type=Path, help="JSON file; default benchmarks/results/DEVICE.json")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype) if args.dtype else usual_dtype(args.device)
    place = Place(args.device, dtype, torch.get_num_threads())
    names = [UNWATCHED, *(name for name in args.variants if name != UNWATCHED)]
    if args.against:
        names += [name + OTHER for name in names if name.startswith("ampscope")]
    facts = machine(place)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    report: dict[str, Any] = {"machine": facts, "isolated": args.isolate or bool(args.against), "sizes": {}}
    for size in args.sizes:
        plan = Plan(
            args.steps or STEPS[size], args.block, args.warm_up, args.isolate or bool(args.against), args.against
        )
        measured = measure(names, size, place, plan)
        peaks = {} if args.no_memory else measure_memory(names, size, place, plan)
        rows = summarize(measured, peaks)
        show(f"{size}: {asdict(SIZES[size])}", rows)
        report["sizes"][size] = {
            "shape": asdict(SIZES[size]),
            "plan": asdict(replace(plan, other_tree=None)),
            "rows": rows,
        }
    output = args.output or RESULTS / f"{args.device}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
