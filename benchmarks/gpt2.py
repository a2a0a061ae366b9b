"""What watching takes of a machine with GPT-2 (124M parameters): time, and peaks of memory, beside the same unwatched.

    python benchmarks/gpt2.py                        # each variant in a new process; two minutes on two cores, 5 GB
    python benchmarks/gpt2.py --variants unwatched default
    python benchmarks/gpt2.py --time                 # steps of an unwatched and a watched model in turns; 8 GB

bfloat16 autocast, ``clip_grad_norm_``, AdamW and no scaler, on random tokens. In ``incident`` the loss of one step is
infinite, and of all that follow, for nothing skips it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ampscope

BATCH, LENGTH, STEPS, BAD = 2, 256, 5, 2
#: Steps that are not timed: the first eight are traced.
WARM_UP = 12
VARIANTS: dict[str, dict[str, Any] | None] = {
    "unwatched": None,
    "every=0": {"every": 0},
    "default": {},
    "every=1": {"every": 1},
    "incident": {},
}


class Gpt2:
    """A model with its optimizer, watched or not."""

    def __init__(self, variant: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(GPT2Config())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        options = VARIANTS[variant]
        self.scope = ampscope.watch(self.model, dir=folder, quiet=True, **options) if options is not None else None

    def step(self, factor: float = 1.0) -> None:
        """One step; its loss is multiplied by ``factor``."""
        ids = torch.randint(0, self.model.config.vocab_size, (BATCH, LENGTH))
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(input_ids=ids, labels=ids).loss
        if factor != 1.0:
            loss = loss * factor
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def close(self) -> None:
        if self.scope is not None:
            self.scope.close()


def train(variant: str) -> int:
    """Trains a few steps; gives the process's peak in bytes."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        training = Gpt2(variant, Path(folder) / "run")
        for step in range(STEPS):
            training.step(float("inf") if variant == "incident" and step == BAD else 1.0)
        training.close()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ratios(steps: int) -> list[float]:
    """Quartiles of a watched step's time over that of the unwatched one beside it, past the first steps."""
    with tempfile.TemporaryDirectory() as folder:
        both = [Gpt2(variant, Path(folder) / variant) for variant in ("unwatched", "default")]
        found = []
        for step in range(WARM_UP + steps):
            took = {}
            for training in both if step % 2 else reversed(both):
                start = time.perf_counter()
                training.step()
                took[training] = time.perf_counter() - start
            if step >= WARM_UP:
                found.append(took[both[1]] / took[both[0]])
        for training in both:
            training.close()
    return statistics.quantiles(found, n=4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3, help="processes a variant gets; the median is told")
    parser.add_argument("--time", type=int, nargs="?", const=10, metavar="STEPS", help="time so many steps; 10")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "memory.json")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(train(args.one))
        return 0
    if args.time:
        low, middle, high = ratios(args.time)
        print(f"  a watched step takes {middle:.3f} ({low:.3f} to {high:.3f}) times as long")
        return 0
    peaks: dict[str, list[int]] = {name: [] for name in args.variants}
    for _round in range(args.rounds):
        for name, seen in peaks.items():
            done = subprocess.run([sys.executable, __file__, "--one", name], stdout=subprocess.PIPE, check=True)
            seen.append(int(done.stdout.split()[-1]))
    beside = statistics.median(peaks.get("unwatched", [0]))
    for name, seen in peaks.items():
        peak = statistics.median(seen)
        more = f"{peak / beside - 1:+7.1%}" if beside else ""
        print(f"  {name:12} {peak / 2**20:8.0f} MB  {more}   {', '.join(f'{each / 2**20:.0f}' for each in seen)}")
    args.output.write_text(json.dumps({"batch": BATCH, "length": LENGTH, "peak_bytes": peaks}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
