"""``ampscope verify``: a training run again with a remedy in it, and what became of the failure."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.trace.schema import CureKind
from tests.support.command import Command

PROGRAM = """\
import sys

import torch
from torch import nn

import ampscope


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        h = self.linear(x)
        return h / h.norm(dim=-1, keepdim=True)


torch.manual_seed(0)
net = nn.Sequential(Unit(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
ampscope.watch(net, scaler, dir="run")
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(torch.randn(4, 8) * (1e-9 if step == 2 else 1.0))
        loss = nn.functional.cross_entropy(logits, torch.zeros(4).long())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_training_is_run_again_with_the_remedy(
    ampscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    assert ampscope("verify", "run", "--", sys.executable, "train.py").code == 2  # there is no run
    _train()
    answer = ampscope("verify", "run", "--", sys.executable, "train.py")
    assert answer.code == 0
    assert "Cured: before, " in answer.out
    assert Path("train.py").read_text() == PROGRAM
    assert (ampscope("diagnose", "run").code, ampscope("diagnose", "run-verified-1").code) == (1, 0)
    other, missing = (ampscope("verify", "run", "--", *each) for each in ((sys.executable, "-c", "pass"), ("no-such",)))
    assert (other.code, "has not loaded" in other.err) == (2, True)
    assert (missing.code, "cannot run no-such" in missing.err) == (2, True)
    kill = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    verify = [sys.executable, "-m", "ampscope", "verify", "run", "--", sys.executable, "-c", kill]
    assert subprocess.run(verify, check=False, capture_output=True).returncode == -signal.SIGKILL
    assert Path("train.py").read_text() == PROGRAM


def test_a_healed_run_is_verified_without_healing(
    ampscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM.replace('dir="run")', 'dir="run", heal=True)'))
    _train()
    healed, *_ = (cure["kind"] for cure in json.loads(ampscope("diagnose", "run", "--json").out)["cures"])
    answer = ampscope("verify", "run", "--", sys.executable, "train.py")
    assert (answer.code, healed in tuple(CureKind)) == (0, True)
    after = json.loads(ampscope("diagnose", "run-verified-1", "--json").out)
    assert (after["verdict"], after["cures"]) == ("healthy", [])


def _train() -> None:
    subprocess.run([sys.executable, "train.py"], check=True, capture_output=True)
