"""Trainings in which one thing is changed at one step: of what moved since the last good step it is told first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Incident, LastGood, Move, MoveKind
from ampscope.trace.vocabulary import Verdict

STEPS, AT, ROWS = 36, 30, 16


@dataclass
class Loop:
    """A training, whose parts a plant may change before a step."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    pixels: Tensor


Plant = Callable[[Loop, int], object]


def train(folder: Path, plant: Plant, *, steps: int = STEPS, first: int = 0, loop: Loop | None = None) -> Loop:
    """Trains a small network under fp16 autocast; ``plant`` is called before each step's forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    loop = loop or Loop(model, optimizer, scaler, torch.empty(0))
    with ampscope.watch(loop.model, loop.scaler, dir=folder, every=2, quiet=True):
        for step in range(first, steps):
            loop.pixels = torch.rand(ROWS, 8)
            wanted = torch.sin(3 * loop.pixels).sum(1) / 4
            plant(loop, step)
            loop.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                guess = loop.model(loop.pixels).squeeze(-1)
                loss = F.mse_loss(guess.float(), wanted)
            loop.scaler.scale(loss).backward()
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
    return loop


def nothing(loop: Loop, step: int) -> None:
    """A healthy training."""


def fast(loop: Loop, step: int) -> None:
    if step == AT - 3:
        loop.optimizer.param_groups[0]["lr"] *= 1e4


def bright(loop: Loop, step: int) -> None:
    if step == AT:
        loop.pixels = loop.pixels * 1e6


def scaled(loop: Loop, step: int) -> None:
    if step >= AT:
        loop.scaler.update(2.0**40)


class Halved(nn.Linear):
    """A layer that can compute in half precision by its own will; what it gives overflows there."""

    half_now = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            wide = x.float() if not self.half_now else x.half()
            weight, bias = self.weight.to(wide.dtype), self.bias.to(wide.dtype)
            return F.linear(wide * 3e5, weight, bias) / 3e5


def with_own_dtype(folder: Path) -> None:
    torch.manual_seed(0)
    layer = Halved(32, 1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loop = Loop(model, optimizer, torch.amp.GradScaler("cpu", init_scale=256.0), torch.empty(0))

    def switch(_: Loop, step: int) -> None:
        layer.half_now = step >= AT

    train(folder, switch, loop=loop)


def before(folder: Path) -> tuple[Incident, LastGood, Move]:
    """What a run is told first for, and the most unusual move before it."""
    primary = ampscope.diagnose(folder).primary
    assert isinstance(primary, Incident)
    told = primary.last_good
    assert told is not None
    assert told.moves, told.summary
    return primary, told, told.moves[0]


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        pytest.param(fast, MoveKind.LEARNING_RATE, id="learning rate"),
        pytest.param(bright, MoveKind.BATCH, id="batch"),
        pytest.param(scaled, MoveKind.SCALE, id="scale"),
    ],
)
def test_what_was_changed_is_told_first(plant: Plant, kind: MoveKind, run_folder: Path) -> None:
    train(run_folder, plant)
    primary, told, first = before(run_folder)
    assert first.kind is kind, told.summary
    assert told.step is not None
    assert AT - 4 <= told.step < primary.step
    assert told.sampled_step is not None
    assert told.sampled_step % 2 == 0
    assert told.summary.startswith(f"Last good step: {told.step}")


def test_a_scale_set_by_hand_is_told_with_its_line_and_leaves_gradients_where_they_were(run_folder: Path) -> None:
    train(run_folder, scaled)
    _, told, first = before(run_folder)
    assert (first.before, first.after, first.step, first.score) == (256.0, 2.0**40, AT, 1000.0)
    assert first.source is not None
    assert "loop.scaler.update(2.0**40)" in first.source.code
    assert "set by the loop" in first.text
    assert not [move for move in told.moves[1:] if move.score is not None and move.score >= 4], told.moves


def test_a_module_that_computes_in_another_dtype_is_told_first(run_folder: Path) -> None:
    with_own_dtype(run_folder)
    _, told, first = before(run_folder)
    assert (first.kind, first.module, first.before, first.after) == (MoveKind.DTYPE, "2", "float32", "float16"), told
    assert first.source is not None


def test_a_resume_with_another_setting_is_told_first(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = train(run_folder, nothing, steps=AT)
    monkeypatch.setattr(torch.backends.mkldnn, "deterministic", True)

    def spoil(loop: Loop, step: int) -> None:
        if step == AT:
            loop.pixels[3, 2] = float("nan")

    train(run_folder, spoil, first=AT, loop=loop)
    _, told, first = before(run_folder)
    assert first.kind is MoveKind.SEGMENT, told.summary
    assert (first.before, first.after, first.step, first.score) == ("false", "true", AT, 1000.0)
    assert "setting mkldnn_deterministic false, now true" in first.text


def test_a_bad_value_in_a_batch_is_all_that_moved(run_folder: Path) -> None:
    def spoilt(loop: Loop, step: int) -> None:
        if step == AT:
            loop.pixels[3, 2] = float("nan")

    train(run_folder, spoilt)
    primary = ampscope.diagnose(run_folder).primary
    assert isinstance(primary, Incident)
    told = primary.last_good
    assert told is not None
    assert (told.step, told.calm_step) == (AT - 1, AT - 1)
    (move,) = [move for move in told.moves if move.score is not None and move.score >= 4]
    assert (move.kind, move.step, repr(move.after)) == (MoveKind.BATCH, AT, "nan")
    assert "holds NaN" in told.summary


def test_before_the_first_step_none_is_good(run_folder: Path) -> None:
    def spoilt(loop: Loop, step: int) -> None:
        loop.pixels[3, 2] = float("nan")

    train(run_folder, spoilt, steps=2)
    primary = ampscope.diagnose(run_folder).primary
    assert isinstance(primary, Incident)
    assert primary.last_good is not None
    assert (primary.last_good.step, primary.last_good.moves) == (None, ())
    assert primary.last_good.summary == "Last good step: none, for this is the first step."


def test_a_healthy_run_has_nothing_to_tell(run_folder: Path) -> None:
    train(run_folder, nothing)
    found: Any = ampscope.diagnose(run_folder)
    assert found.verdict is Verdict.HEALTHY
    assert [each.last_good for each in found.incidents] == [None] * len(found.incidents)
