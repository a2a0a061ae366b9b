"""Buffers in half precision that never leave their start are told; those that have arrived, or are constant, not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.capture.checks.still_buffers import StillBuffers
from ampscope.trace.vocabulary import Cause, Verdict

WIDTH, ROWS, SPREAD = 6, 128, 1.6


class Net(nn.Module):
    """A part that keeps something, before a layer that learns."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.part(x))
        return out


class Follows(nn.Module):
    """Keeps an average of what it is given, from ``start`` on, by ``write``."""

    average: Tensor
    positions: Tensor

    def __init__(self, start: float, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("average", torch.full((WIDTH,), start))
        self.register_buffer("positions", torch.linspace(0, 1, WIDTH))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.average, x.detach().square().mean(0))
        return x + self.positions


def slowly(average: Tensor, value: Tensor) -> None:
    average.mul_(0.9995).add_(value, alpha=0.0005)


def steadily(average: Tensor, value: Tensor) -> None:
    average.lerp_(value, 0.1)


def normed(momentum: float | None, *, variance: float = 1.0, trains: bool = True) -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
    assert norm.running_var is not None
    norm.running_var.fill_(variance)
    norm.requires_grad_(trains)
    if not trains:
        norm.train = lambda mode=True: norm  # type: ignore[method-assign]  # frozen, as people do it
        norm.training = False
    return norm


def diagnosed(
    part: nn.Module, folder: Path, dtype: torch.dtype = torch.bfloat16, steps: int = 5, **options: Any
) -> Diagnosis:
    torch.manual_seed(0)
    model = Net(part).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with ampscope.watch(model, dir=folder, quiet=True, **options):
        for _ in range(steps):
            x = SPREAD * torch.randn(ROWS, WIDTH)
            optimizer.zero_grad()
            out = model(x.to(dtype)).float().squeeze(1)
            nn.functional.mse_loss(out, x[:, 0]).backward()
            optimizer.step()
    return ampscope.diagnose(folder)


LOST: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "running variance": (lambda: normed(0.001), "running_var", "aten.native_batch_norm.default"),
    "multiplied and added": (lambda: Follows(1.0, slowly), "average", "aten.add_.Tensor"),
    "interpolated": (lambda: Follows(1.0, lambda a, v: a.lerp_(v, 0.0005)), "average", "aten.lerp_.Scalar"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_statistic_that_is_rounded_away_is_told_with_the_op_that_writes_it(name: str, run_folder: Path) -> None:
    part, buffer, op = LOST[name]
    primary = diagnosed(part(), run_folder).primary
    assert isinstance(primary, Incident)
    assert (primary.cause, primary.phase, primary.step) == (Cause.BF16_PRECISION, "forward", 0)
    assert (primary.module, primary.op) == ("part", op)
    assert f"the buffer part.{buffer} did not move in the steps from 0 to 2" in primary.explanation
    assert f"Keep part.{buffer} in float32" in primary.remedies[0].text


def test_in_float16_the_half_parameters_are_to_blame(run_folder: Path) -> None:
    part = Follows(1.0, lambda average, value: average.lerp_(value, 0.0001))
    diagnosis = diagnosed(part, run_folder, torch.float16)
    assert Cause.HALF_PARAMS in {each.cause for each in diagnosis.incidents}


TWINS: dict[str, Callable[[], nn.Module]] = {
    "statistics that move": lambda: normed(0.1),
    "statistics that have arrived": lambda: normed(0.001, variance=SPREAD**2),
    "statistics that have nearly arrived": lambda: normed(0.1, variance=SPREAD**2 * 1.01),
    "a cumulative average": lambda: normed(None),
    "a frozen norm": lambda: normed(0.001, trains=False),
    "an average that moves": lambda: Follows(1.0, steadily),
    "an average that has arrived": lambda: Follows(SPREAD**2, slowly),
    "an average of what it is": lambda: Follows(1.0, lambda average, _: average.lerp_(average.clone(), 0.001)),
    "one that nobody writes": lambda: Follows(1.0, lambda *_: None),
}


@pytest.mark.parametrize("name", TWINS)
def test_its_harmless_twin_is_not_told(name: str, run_folder: Path) -> None:
    diagnosis = diagnosed(TWINS[name](), run_folder)
    assert diagnosis.verdict is Verdict.HEALTHY, diagnosis.summary


def test_statistics_in_float32_cost_no_replay(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StillBuffers, "ask", pytest.fail)
    assert diagnosed(normed(0.001), run_folder, torch.float32).verdict is Verdict.HEALTHY


def test_who_wants_no_trial_gets_none(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StillBuffers, "ask", pytest.fail)
    diagnosed(normed(0.001), run_folder, replay_budget=0)
