"""A loop is listened to after backward until it is known; what it begins to do later is told all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.capture.tape.step_tape import StepTape
from ampscope.trace.vocabulary import Cause, Verdict

Weights = list[nn.Parameter]
#: What the loop does in a step with its gradients, by the number of the step.
Edit = Callable[[int, Weights], object]

#: Past the steps that are heard at a run's start, and no power of two.
LATE = 100


def grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def nothing(step: int, weights: Weights) -> None:
    """No edit."""


class Loop:
    """A small model, trained with a scaler or in bfloat16."""

    def __init__(self, *, scaler: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.weights = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.weights, lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaler, growth_interval=30)
        self.dtype = torch.float16 if scaler else torch.bfloat16

    def train(self, steps: int, *, scaled: Edit = nothing, unscaled: Edit = nothing, unscales: bool = True) -> None:
        for step in range(steps):
            x = torch.randn(8, 6)
            with torch.autocast("cpu", self.dtype):
                loss = (self.model(x).float() - x.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            scaled(step, self.weights)
            if unscales:
                self.scaler.unscale_(self.optimizer)
            unscaled(step, self.weights)
            self.scaler.step(self.optimizer)
            self.scaler.update()


def watched(
    folder: Path, steps: int, *, scaler: bool = True, scaled: Edit = nothing, unscaled: Edit = nothing
) -> Diagnosis:
    loop = Loop(scaler=scaler)
    with ampscope.watch(loop.model, loop.scaler if scaler else None, dir=folder, quiet=True):
        loop.train(steps, scaled=scaled, unscaled=unscaled, unscales=scaler)
    return ampscope.diagnose(folder)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the steps in which something listened after backward."""
    numbers: list[int] = []
    listen = StepTape.listen_after_backward

    def noted(tape: StepTape, *, traced: bool) -> None:
        listen(tape, traced=traced)
        if tape.mode.inserted:
            numbers.append(tape.routine._number)

    monkeypatch.setattr(StepTape, "listen_after_backward", noted)
    return numbers


def clipped(step: int, weights: Weights) -> Tensor:
    return nn.utils.clip_grad_norm_(weights, 1.0)


def test_a_loop_that_is_known_is_left_alone(heard: list[int], run_folder: Path) -> None:
    assert watched(run_folder, 70, unscaled=clipped).verdict == Verdict.HEALTHY
    known = [step for step in heard if step >= 8]
    assert {16, 32, 64} <= set(known)  # a loop may change, so it is heard again, ever more rarely
    assert len(known) <= 6


def test_a_mistake_that_begins_late_is_found_in_the_step_after(run_folder: Path) -> None:
    diagnosis = watched(run_folder, LATE + 4, scaled=lambda step, weights: step >= LATE and clipped(step, weights))
    (finding,) = diagnosis.findings
    assert finding.cause == Cause.MISUSE_CLIP_BEFORE_UNSCALE
    assert finding.step in (LATE, LATE + 1)
    assert finding.source is not None
    assert finding.source.function == "clipped"


def test_so_is_one_that_begins_after_a_thousand_steps(run_folder: Path) -> None:
    diagnosis = watched(run_folder, 1004, scaled=lambda step, weights: step >= 1001 and clipped(step, weights))
    assert [(found.cause, found.step) for found in diagnosis.findings] == [(Cause.MISUSE_CLIP_BEFORE_UNSCALE, 1002)]


def test_so_is_one_of_some_batches(run_folder: Path) -> None:
    diagnosis = watched(run_folder, 60, scaled=lambda step, weights: step in (40, 43, 50) and clipped(step, weights))
    assert [(found.cause, found.step) for found in diagnosis.findings] == [(Cause.MISUSE_CLIP_BEFORE_UNSCALE, 43)]


def test_what_moves_no_counter_is_found_when_the_loop_is_heard_again(run_folder: Path) -> None:
    def through_data(step: int, weights: Weights) -> None:
        for weight in weights if step >= 40 else ():
            grad(weight).data.clamp_(-1.0, 1.0)

    diagnosis = watched(run_folder, 66, scaled=through_data)
    (finding,) = diagnosis.findings
    assert finding.cause == Cause.MISUSE_CLIP_BEFORE_UNSCALE
    assert finding.step is not None
    assert 40 < finding.step <= 64  # at a power of two; earlier, where a step is traced before


def test_a_clip_that_appears_with_a_resumed_run_is_found(run_folder: Path) -> None:
    watched(run_folder, 20)
    diagnosis = watched(run_folder, 4, scaled=clipped)
    assert [found.cause for found in diagnosis.findings] == [Cause.MISUSE_CLIP_BEFORE_UNSCALE]


def divided(step: int, weights: Weights) -> None:
    for weight in weights:
        grad(weight).div_(grad(weight).norm())


@pytest.mark.parametrize("scaler", [True, False], ids=["scaler", "bf16"])
def test_an_edit_that_spoils_gradients_unheard_is_named_with_its_op(
    scaler: bool, heard: list[int], run_folder: Path
) -> None:
    loop = Loop(scaler=scaler)
    with ampscope.watch(loop.model, loop.scaler if scaler else None, dir=run_folder, quiet=True):
        for step in range(LATE + 2):
            x = torch.randn(8, 6)
            with torch.autocast("cpu", loop.dtype):
                loss = (loop.model(x).float() - x.sum(1, keepdim=True)).square().mean() * float(step != LATE)
            loop.optimizer.zero_grad()
            loop.scaler.scale(loss).backward()
            if scaler:
                loop.scaler.unscale_(loop.optimizer)
            divided(step, loop.weights)
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
    assert LATE not in heard
    primary = ampscope.diagnose(run_folder).primary
    assert isinstance(primary, Incident)
    assert (primary.cause, primary.step, primary.op) == (Cause.DIV_ZERO, LATE, "aten.div_.Tensor")
    assert primary.source is not None
    assert primary.source.function == "divided"
    assert primary.replay == "exact"


def test_what_the_loop_unscales_by_itself_is_remembered(heard: list[int], run_folder: Path) -> None:
    loop = Loop()
    loop.scaler.set_growth_interval(10_000)
    with ampscope.watch(loop.model, loop.scaler, dir=run_folder, quiet=True):
        for _ in range(40):
            x = torch.randn(8, 6)
            with torch.autocast("cpu", torch.float16):
                loss = loop.model(x).float().square().mean()
            loop.optimizer.zero_grad()
            scale = loop.scaler.get_scale()
            loop.scaler.scale(loss).backward()
            for weight in loop.weights:
                grad(weight).div_(scale)
            loop.optimizer.step()
    assert 30 not in heard
    assert ampscope.diagnose(run_folder).findings == ()


def test_gradients_that_are_set_to_zero_from_some_step_on_are_told(run_folder: Path) -> None:
    def emptied(step: int, weights: Weights) -> None:
        for weight in weights if step >= 40 else ():
            grad(weight).zero_()

    diagnosis = watched(run_folder, 100, scaled=emptied)
    assert Cause.MISUSE_GRADIENTS_CLEARED in [found.cause for found in diagnosis.findings]


def test_weights_that_the_loop_moves_itself_are_heard_in_every_step(heard: list[int], run_folder: Path) -> None:
    def decayed(step: int, weights: Weights) -> None:
        with torch.no_grad():
            for weight in weights:
                weight.mul_(0.999)

    assert watched(run_folder, 40, scaled=decayed).verdict == Verdict.HEALTHY
    assert 30 in heard


def test_what_a_later_backward_begins_from_is_heard(heard: list[int], run_folder: Path) -> None:
    loop = Loop()
    with ampscope.watch(loop.model, loop.scaler, dir=run_folder, quiet=True):
        for step in range(41):
            x = torch.randn(8, 6) * (1e4 if step == 40 else 1.0)
            with torch.autocast("cpu", torch.float16):
                out = loop.model(x)
            loop.optimizer.zero_grad()
            loop.scaler.scale(out.float().square().mean()).backward(retain_graph=True)
            second = (out.half() * 1e4 * (1e2 if step == 40 else 1e-4)).float().square().mean()
            loop.scaler.scale(second).backward()
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
    assert 40 in heard
    primary = ampscope.diagnose(run_folder).primary
    assert isinstance(primary, Incident)
    assert (primary.cause, primary.step, primary.op) == (Cause.FP16_OVERFLOW, 40, "aten.mul.Tensor")
    assert primary.replay == "exact"


def test_a_known_loop_trains_to_the_same_bits(run_folder: Path) -> None:
    alone = Loop()
    alone.train(40, unscaled=clipped)
    watched_one = Loop()
    with ampscope.watch(watched_one.model, watched_one.scaler, dir=run_folder, quiet=True):
        watched_one.train(40, unscaled=clipped)
    assert all(map(torch.equal, alone.weights, watched_one.weights))
