"""The whole command, on the CPU as far as it goes, and on a GPU where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def gpu_check(*arguments: object) -> subprocess.CompletedProcess[str]:
    """``make gpu-check`` with arguments."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    command = [sys.executable, "-m", "gpu_check", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, check=False, timeout=280
    )


@pytest.mark.slow
def test_on_a_cpu_it_asks_what_can_be_asked(tmp_path: Path) -> None:
    output = tmp_path / "out.json"

    done = gpu_check("--device", "cpu", "--no-costs", "--only", "rates", "waits", "ddp", "--output", output)

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert {claim["name"]: claim["outcome"] for claim in report["claims"]} == {
        "waits": "skipped",
        "rates": "holds",
        "ddp": "holds",
    }
    assert "AMPscope is right here: 2 of 2 claims hold, 1 could not be asked here." in done.stdout


@pytest.mark.gpu
def test_every_claim_holds_on_this_gpu(tmp_path: Path) -> None:
    done = gpu_check("--no-costs", "--output", tmp_path / "out.json")

    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpu_check"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        timeout=120,
    )

    assert done.returncode == 1
    assert "finds no CUDA device here; --device cpu asks what can be asked without one" in done.stdout
