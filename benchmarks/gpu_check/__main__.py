"""Checks, on the device at hand, what AMPscope promises of it, and measures what it costs there.

    make gpu-check                                    # all of it: five minutes, one page, a verdict
    python -m gpu_check --claim named-checkpoint      # one claim, in this process (PYTHONPATH=.:benchmarks)
    python -m gpu_check --device cpu --tiny           # what can be asked without a GPU

Needs torch and pyarrow, nothing else. Each claim is asked in a process of its own. Claims that need a second device are
skipped where there is one only. Everything is also written as JSON. Ends with 0 if every claim that could be asked
holds, else with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from stages import machine
from workload import Place

from gpu_check import costs, page
from gpu_check.alone import asked, asked_alone, run_alone, tell
from gpu_check.claim import Answer, Outcome
from gpu_check.claims import ALL

RESULTS = Path(__file__).parents[1] / "results"
#: Each of the measured trainings may take so long; seconds.
COSTS_LIMIT = 120.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for what can be asked without a GPU")
    parser.add_argument("--claim", choices=[claim.name for claim in ALL], help="ask this one alone, in this process")
    parser.add_argument("--only", nargs="+", choices=[claim.name for claim in ALL], help="ask these")
    parser.add_argument("--costs", help=argparse.SUPPRESS)
    parser.add_argument("--no-costs", action="store_true", help="leave out what watching costs")
    parser.add_argument("--tiny", action="store_true", help="measure costs with tiny models, to see that it works")
    parser.add_argument("--output", type=Path, help="JSON file; default benchmarks/results/gpu-check-DEVICE.json")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device here; --device cpu asks what can be asked without one.")
        return 1
    device = torch.device(args.device)
    if args.claim:
        answer = asked(next(claim for claim in ALL if claim.name == args.claim), device)
        tell(answer)
        return int(answer.outcome is Outcome.WRONG)
    if args.costs:
        looks = args.costs == costs.LOOKS
        tell(costs.looks(device) if looks else costs.measure(costs.settings(tiny=args.tiny)[args.costs], device))
        return 0
    return whole(args)


def whole(args: argparse.Namespace) -> int:
    """All claims and costs, the page, and the file."""
    start = time.perf_counter()
    facts = machine(Place(args.device, torch.float16, torch.get_num_threads()))
    print(", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    asked_for = [claim for claim in ALL if not args.only or claim.name in args.only]
    answers: list[Answer] = []
    with ThreadPoolExecutor(_at_once()) as threads:
        for answer in threads.map(lambda claim: asked_alone(claim, args.device), asked_for):
            answers.append(answer)
            print(page.claims([answer]), flush=True)
    measured: dict[str, Any] = {}
    for title in () if args.no_costs else (*costs.settings(tiny=args.tiny), costs.LOOKS):
        tiny = ["--tiny"] if args.tiny else []
        rows = run_alone(["--costs", title, "--device", args.device, *tiny], COSTS_LIMIT)
        measured[title] = rows if isinstance(rows, dict) else {"": {"skipped": rows}}
        print("\n" + page.costs({title: measured[title]}), flush=True)
    verdict = page.verdict(answers)
    print(f"\n{verdict} {time.perf_counter() - start:.0f} s in all.")
    output = args.output or RESULTS / f"gpu-check-{args.device}.json"
    report = {"machine": facts, "verdict": verdict, "claims": [asdict(a) for a in answers], "costs": measured}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"Written to {output}.")
    return int(any(answer.outcome is Outcome.WRONG for answer in answers))


def _at_once() -> int:
    """How many claims are asked at a time: a process takes seconds to start, and none of them is timed."""
    return max(1, min(4, (os.cpu_count() or 1) // 4))


if __name__ == "__main__":
    sys.exit(main())
