"""A cure of a step that left a buffer broken is one that leaves it whole, whatever else comes out finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Incident
from ampscope.trace.schema import Trial
from ampscope.trace.vocabulary import Cause

WIDTH, STEPS, BAD = 6, 6, 3


class Peak(nn.Module):
    """Keeps the largest square that it has seen, and a mask of infinities."""

    peak: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("peak", torch.zeros(()))
        self.register_buffer("mask", torch.full((WIDTH, WIDTH), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x)
        with torch.no_grad():
            self.peak.copy_(torch.maximum(self.peak, (h * h).max().float()))
        mixed = (torch.zeros(WIDTH, WIDTH) + self.mask).softmax(-1)
        out: Tensor = torch.tanh(h) @ mixed.to(h.dtype)
        return out


def trained(folder: Path, model: nn.Module, after: Callable[[int], object], gain: Callable[[int], float]) -> Incident:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with ampscope.watch(model, scaler, dir=folder, quiet=True):
        for step in range(STEPS):
            x = torch.randn(16, WIDTH)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x * gain(step)).float(), x.argmax(-1))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            after(step)
    primary = ampscope.diagnose(folder).primary
    assert isinstance(primary, Incident)
    return primary


def test_what_the_loop_has_cast_between_steps_is_cured_by_no_precision(run_folder: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    assert isinstance(model[1].running_var, Tensor)
    model[1].running_var.fill_(2e5)
    found = trained(run_folder, model, lambda step: step == BAD - 1 and model.half().float(), lambda _: 1.0)
    assert (found.cause, found.step, found.module) == (Cause.BAD_BUFFER, BAD, "1")
    assert found.tried
    assert {each.outcome for each in found.tried} == {Trial.NONFINITE}
    assert not any(remedy.verified for remedy in found.remedies)
    assert f"The forward of step {BAD - 1} left it finite. After that this line casts" in found.explanation
    assert found.source is not None
    assert "model.half().float()" in found.source.code


def test_what_overflows_on_its_way_into_a_buffer_is_cured_by_float32(run_folder: Path) -> None:
    found = trained(run_folder, Peak(), lambda _: None, lambda step: 1e3 if step == BAD else 1.0)
    assert (found.cause, found.step) == (Cause.FP16_OVERFLOW, BAD)
    assert Trial.FINITE in {each.outcome for each in found.tried}  # a mask of infinities is not what was broken
    assert any(remedy.verified for remedy in found.remedies)
    assert "left it finite" not in found.explanation
