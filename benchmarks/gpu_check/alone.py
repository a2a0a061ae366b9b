"""One question in a process of its own: a fault of the device is final for the process that meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, replace
from typing import Any

import torch

from gpu_check.claim import Answer, Claim, Outcome, Skipped, Wrong

#: Stands before the one line of a process's output that is its result.
MARK = "gpu-check result: "


def asked(claim: Claim, device: torch.device) -> Answer:
    """Asks a claim here; whatever it raises is an answer."""
    start = time.perf_counter()
    try:
        outcome, seen = Outcome.HOLDS, claim.check(device)
    except Skipped as reason:
        outcome, seen = Outcome.SKIPPED, str(reason)
    except Wrong as wrong:
        outcome, seen = Outcome.WRONG, str(wrong)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is told, and the other claims are asked
        traceback.print_exc()
        outcome, seen = Outcome.WRONG, f"{type(error).__name__}: {error}"
    return Answer(claim.name, claim.says, outcome, seen, time.perf_counter() - start)


def asked_alone(claim: Claim, device: str) -> Answer:
    """Asks a claim in a new process, within its time."""
    start = time.perf_counter()
    result = run_alone(["--claim", claim.name, "--device", device], claim.limit_s)
    took = time.perf_counter() - start
    if isinstance(result, str):
        return Answer(claim.name, claim.says, Outcome.WRONG, result, took)
    return replace(Answer(**result), outcome=Outcome(result["outcome"]), seconds=took)


def tell(result: Any) -> None:
    """Prints a result for the process that asked."""
    print(MARK + json.dumps(asdict(result) if isinstance(result, Answer) else result), flush=True)


def run_alone(arguments: list[str], limit_s: float) -> Any:
    """What a new process told, or in words why it told nothing. Its files go when it has ended."""
    command = [sys.executable, "-m", "gpu_check", *arguments]
    with tempfile.TemporaryDirectory(prefix="ampscope-gpu-check-") as folder:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s, env=_environment(folder), check=False
            )
        except subprocess.TimeoutExpired:
            return f"it had not ended after {limit_s:.0f} s"
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
    return f"the process ended with {done.returncode}: {last[0]}"


def _environment(folder: str) -> dict[str, str]:
    return {**os.environ, "TMPDIR": folder, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
