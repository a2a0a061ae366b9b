"""What a replay does not see of a step (Python, modes, memory) is not taken for a fault of the device."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ampscope import diagnose
from ampscope.capture.replay.tape.fingerprints import Differences, contradict
from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import Cause
from tests.support.primary import primary_incident
from tests.support.training.twin_runs import Watched

BAD, STEPS, WIDTH = 3, 6, 6
HUGE = 1e6


class Raised(TorchFunctionMode):
    """A mode of the user's that multiplies what tanh gives."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.by if func is torch.tanh else result


class Counted(nn.Module):
    """A layer with a schedule that moves on at each call, replays included."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.gains = itertools.chain([1.0] * BAD, [HUGE], itertools.repeat(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) * next(self.gains)


class Faulty(nn.Module):
    """A layer of whose result after ``between`` one number is overwritten once, in memory, as a device would."""

    def __init__(self, value: float, between: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.value, self.between, self.after = nn.Linear(WIDTH, WIDTH), value, between, after
        self.faults = itertools.chain([False] * BAD, [True], itertools.repeat(False))

    def forward(self, x: Tensor) -> Tensor:
        out = self.between(self.lin(x).float())
        if next(self.faults):
            out.detach().numpy()[0, 0] = self.value
        return self.after(out)


class Scheduled(nn.Module):
    """A layer that gives what `schedule` says, which moves on at each call, replays included."""

    def __init__(self, usual: Callable[[Tensor], Tensor], once: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.schedule = itertools.chain([usual] * BAD, [once], itertools.repeat(usual))

    def forward(self, x: Tensor) -> Tensor:
        return next(self.schedule)(torch.tanh(self.lin(x)).float())


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


def mean_square(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    return model(x).float().square().mean()


def behind_the_counters(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    weight = next(model.parameters()).data
    weight.mul_(HUGE if bad else 1.0)
    loss = mean_square(model, x, bad)
    weight.div_(HUGE if bad else 1.0)
    return loss


def past_torch(model: nn.Module, bad: bool) -> None:
    for gradient in [p.grad for p in model.parameters() if p.grad is not None] * bad:
        gradient.numpy().fill(math.nan)


def nothing(model: nn.Module, bad: bool) -> None:
    """Leaves the gradients as they are."""


def loop(
    model: Callable[[], nn.Module] = Plain,
    *,
    loss: Callable[[nn.Module, Tensor, bool], Tensor] = mean_square,
    edit: Callable[[nn.Module, bool], None] = nothing,
    mode: Callable[[bool], Any] = lambda _: contextlib.nullcontext(),
) -> Callable[[Callable[..., Any]], None]:
    def run(watch: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        watch(net, scaler)
        for step in range(STEPS):
            optimizer.zero_grad()
            with mode(step == BAD), torch.autocast("cpu", dtype=torch.float16):
                value = loss(net, torch.randn(4, WIDTH), step == BAD)
            scaler.scale(value).backward()
            edit(net, step == BAD)
            scaler.step(optimizer)
            scaler.update()

    return run


SHOWN = {
    "mode": (loop(mode=lambda bad: Raised(HUGE if bad else 1.0)), "aten.mul.Tensor"),
    "iterator": (loop(Counted), "aten.mul.Tensor"),
    "memory": (loop(loss=behind_the_counters), "aten._to_copy.default"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_an_overflow_that_its_operands_prove_is_one_though_the_replay_is_finite(name: str, run_folder: Path) -> None:
    run, op = SHOWN[name]
    found = primary_incident(Watched.train(run, run_folder).run)
    assert found.cause in (Cause.FP16_OVERFLOW, Cause.LITERAL_OVERFLOW, Cause.SCALE_OVERFLOW)
    assert (found.step, found.op) == (BAD, op)


def test_gradients_that_something_unseen_wrote_are_unknown(run_folder: Path) -> None:
    incidents = diagnose(Watched.train(loop(edit=past_torch), run_folder).run).incidents
    assert [incident.step for incident in incidents if incident.cause is Cause.UNKNOWN] == [BAD]
    assert Cause.HARDWARE_TRANSIENT not in {incident.cause for incident in incidents}


def positive(x: Tensor) -> Tensor:
    return x.abs() + 1.0


FAULTS = {
    "a logarithm of positive numbers": lambda: Faulty(math.nan, lambda x: positive(x).log(), torch.tanh),
    "a quotient by none that is zero": lambda: Faulty(math.nan, lambda x: x / positive(x), torch.tanh),
    "an infinity of which finite numbers came": lambda: Faulty(
        math.inf, positive, lambda x: x - x.detach().amax().tanh() + 1 / x
    ),
    "a large number in one place": lambda: Faulty(1e30, positive, lambda x: x * 1.0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_number_that_the_device_got_wrong_once_is_transient(name: str, run_folder: Path) -> None:
    found = primary_incident(Watched.train(loop(FAULTS[name]), run_folder).run)
    assert (found.cause, found.step) == (Cause.HARDWARE_TRANSIENT, BAD)


def test_a_logarithm_that_was_given_a_zero_is_none(run_folder: Path) -> None:
    model = functools.partial(Scheduled, lambda x: positive(x).log(), lambda x: (x * 0.0).log())
    found = primary_incident(Watched.train(loop(model), run_folder).run)
    assert (found.cause, found.op, found.step) == (Cause.LOG_ZERO, "aten.log.default", BAD)


def sum_of_products(model: nn.Module, x: Tensor, bad: bool) -> Tensor:
    out = model(x)
    return (out @ out.t()).float().mean()  # too large in float16, as far as its operands can tell


def test_a_replay_with_other_numbers_proves_nothing_of_the_device(run_folder: Path) -> None:
    model = functools.partial(Scheduled, lambda x: x, lambda x: x * 3e4)
    found = primary_incident(Watched.train(loop(model, loss=sum_of_products), run_folder).run)
    assert (found.cause, found.step, found.replay) == (Cause.FP16_OVERFLOW, BAD, ReplayStatus.UNAVAILABLE)
    assert "other numbers" in found.replay_reason


THEIRS = torch.linspace(-2.0, 2.0, 16)


@pytest.mark.parametrize(
    ("ours", "contradicts"),
    [
        pytest.param(THEIRS * 1.5 + 0.5, True, id="other values"),
        pytest.param(THEIRS[:8], True, id="another shape"),
        pytest.param(THEIRS * 1.01, False, id="rounding"),
        pytest.param(torch.where(THEIRS > 1, 9.0, THEIRS), False, id="some of them"),
    ],
)
def test_most_numbers_are_others(ours: Tensor, contradicts: bool) -> None:
    assert contradict([ours], [THEIRS]) is contradicts


def test_what_came_of_a_number_that_was_not_finite_contradicts_nothing() -> None:
    found = Differences()
    found.of_output("a", [THEIRS], [torch.full_like(THEIRS, math.nan)], computed_alike=True)
    found.of_output("b", [THEIRS], [THEIRS + 5.0], computed_alike=True)
    assert (found.contradicted, len(found.words)) == (False, 2)


def test_code_that_was_compiled_may_give_other_numbers() -> None:
    found = Differences()
    found.of_output("a", [THEIRS], [THEIRS + 5.0], computed_alike=False)
    assert not found.contradicted
