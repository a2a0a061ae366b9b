"""What watching takes of a machine's memory: peaks of GPT-2 (124M parameters) beside the same training unwatched.

    python benchmarks/memory.py                      # each variant in a new process; two minutes on two cores, 5 GB
    python benchmarks/memory.py --variants unwatched default

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
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ampscope

BATCH, LENGTH, STEPS, BAD = 2, 256, 5, 2
VARIANTS: dict[str, dict[str, Any] | None] = {
    "unwatched": None,
    "every=0": {"every": 0},
    "default": {},
    "every=1": {"every": 1},
    "incident": {},
}


def train(variant: str) -> int:
    """Trains a few steps; gives the process's peak in bytes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder:
        scope = ampscope.watch(model, dir=folder, quiet=True, **options) if options is not None else None
        for step in range(STEPS):
            ids = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            if variant == "incident" and step == BAD:
                loss = loss * float("inf")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if scope is not None:
            scope.close()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3, help="processes a variant gets; the median is told")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "memory.json")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(train(args.one))
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
