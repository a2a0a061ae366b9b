"""Overflows that the code takes for numbers: told with what hid them where they matter, and else left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.step.ending.looks.again import Again
from ampscope.trace.vocabulary import Cause, Verdict

ROWS, WIDTH, CLASSES = 8, 32, 4
LOUD = 3e4
Guard = Callable[[Tensor], Tensor]


class Loud(nn.Module):
    """A layer whose products leave float16 under some gain, and what guards them."""

    def __init__(self, guard: Guard, gain: float = LOUD) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.fc.weight.data *= 20.0
        self.guard = guard
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return self.guard(self.fc(x * self.gain))


class Net(nn.Module):
    def __init__(self, loud: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.loud = loud
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.loud(F.relu(self.first(x))))
        return out


def trained(guard: Guard, folder: Path | None, *, steps: int = 3, gain: float = LOUD) -> list[Tensor]:
    """Weights after a short training in float16, watched where a folder is given."""
    torch.manual_seed(0)
    model = Net(Loud(guard, gain))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scope = ampscope.watch(model, scaler, dir=folder, quiet=True) if folder is not None else None
    for _ in range(steps):
        x, labels = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if scope is not None:
        scope.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def diagnosed(guard: Guard, folder: Path) -> Diagnosis:
    trained(guard, folder)
    return ampscope.diagnose(folder)


def by_hand(x: Tensor) -> Tensor:
    x = x.clone()
    x[torch.isinf(x)] = 0.0
    return x / LOUD


def where_needed(x: Tensor) -> Tensor:
    return x.clamp(-6e4, 6e4) / LOUD if torch.isinf(x).any() else x / LOUD


HIDING: dict[str, tuple[Guard, str]] = {
    "the largest number": (lambda x: torch.nan_to_num(x) / LOUD, "nan_to_num"),
    "zero": (lambda x: torch.where(torch.isfinite(x), x, torch.zeros_like(x)) / LOUD, "where"),
    "a filled mask": (lambda x: x.masked_fill(~torch.isfinite(x), 0.0) / LOUD, "masked_fill"),
    "the bounds of the dtype": (
        lambda x: x.clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max) / LOUD,
        "clamp",
    ),
    "an assignment": (by_hand, "index_put"),
    "a guard that float32 does without": (where_needed, "clamp"),
    "a NaN made of it": (lambda x: torch.nan_to_num(x - x.mean(-1, keepdim=True), 0.0, 0.0, 0.0) / LOUD, "nan_to_num"),
}


@pytest.mark.parametrize("name", HIDING)
def test_it_is_told_where_it_overflowed_and_where_it_was_hidden(name: str, run_folder: Path) -> None:
    guard, op = HIDING[name]
    primary = diagnosed(guard, run_folder).primary
    assert isinstance(primary, Incident)
    assert (primary.cause, primary.step) == (Cause.FP16_OVERFLOW, 0)
    assert (primary.module, primary.op, primary.replay) == ("loud.fc", "aten.addmm.default", "exact")
    assert f" {op} at test_hidden_overflow.py:" in primary.explanation
    assert "The same step in float32 has gradients that differ by" in primary.explanation
    assert primary.path[0].op == "aten.addmm.default"


def test_float32_where_it_was_hidden_is_a_cure_that_was_tried(run_folder: Path) -> None:
    primary = diagnosed(lambda x: torch.nan_to_num(x) / LOUD, run_folder).primary
    assert isinstance(primary, Incident)
    assert (("loud", "loud.fc"), "finite") in [(each.modules, each.outcome) for each in primary.tried]


HARMLESS: dict[str, Guard] = {
    "a bound": lambda x: x.clamp(-10.0, 10.0),
    "a function that saturates": F.hardtanh,
    "a metric": lambda x: (torch.tanh(x), torch.nan_to_num(x.detach()).amax())[0],
    "what is masked anyway": lambda x: torch.where(torch.arange(WIDTH) < 0, x, torch.ones_like(x)),
    "a mask of -inf": lambda x: torch.tanh(x).masked_fill(torch.arange(WIDTH) % 2 == 0, -torch.inf).softmax(-1),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_its_harmless_twin_is_not_told(name: str, run_folder: Path) -> None:
    diagnosis = diagnosed(HARMLESS[name], run_folder)
    assert diagnosis.verdict is Verdict.HEALTHY, diagnosis.summary


@pytest.mark.parametrize(("gain", "often"), [(1.0, 0), (LOUD, 2)], ids=["no overflow", "a harmless one"])
def test_a_step_is_run_again_for_an_overflow_alone_and_once(
    gain: float, often: int, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[ReplayChange] = []
    real = Again.traced

    def counted(again: Again, step: TapedStep, change: ReplayChange, *more: Any) -> Any:
        runs.append(change)
        return real(again, step, change, *more)

    monkeypatch.setattr(Again, "traced", counted)
    trained(HARMLESS["a mask of -inf"], run_folder, gain=gain)
    assert len(runs) == often


@pytest.mark.parametrize("guard", [HIDING["zero"][0], HARMLESS["a bound"]], ids=["told", "harmless"])
def test_training_keeps_its_bits(guard: Guard, run_folder: Path) -> None:
    pairs = zip(trained(guard, None), trained(guard, run_folder), strict=True)
    assert all(torch.equal(alone, watched) for alone, watched in pairs)
