"""A step that does not fail again is a fault of the device only where all else was the same, to the last bit."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ampscope import diagnose
from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import Cause
from tests.support.primary import primary_incident
from tests.support.training.twin_runs import Watched

BAD, STEPS, WIDTH = 3, 6, 6
HUGE = 1e6

Batch = Callable[[bool], Tensor]


def once(usual: Any, odd: Any, at: int = BAD) -> Iterator[Any]:
    """What moves on at each call, replays included."""
    return itertools.chain([usual] * at, [odd], itertools.repeat(usual))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Made(Plain):
    """A layer whose result goes through what a schedule says."""

    def __init__(self, schedule: Iterator[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.schedule = schedule

    def forward(self, x: Tensor) -> Tensor:
        return next(self.schedule)(super().forward(x))


class Struck(nn.Module):
    """A layer of whose result after ``between`` one number is overwritten once, in memory, as a device would."""

    def __init__(
        self, value: float, between: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor], at: int = BAD
    ) -> None:
        super().__init__()
        self.lin, self.value, self.between, self.after = nn.Linear(WIDTH, WIDTH), value, between, after
        self.faults = once(usual=False, odd=True, at=at)

    def forward(self, x: Tensor) -> Tensor:
        out = self.between(self.lin(x).float())
        if next(self.faults):
            out.detach().numpy()[0, 0] = self.value
        return self.after(out)


class Raised(TorchFunctionMode):
    """A mode of the user's that multiplies what tanh gives."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.by if func is torch.tanh else result


def mean_square(model: nn.Module, x: Tensor, *, bad: bool) -> Tensor:
    out: Tensor = model(x)
    return out.float().square().mean()


def behind_the_counters(model: nn.Module, x: Tensor, *, bad: bool) -> Tensor:
    weight = next(model.parameters()).data
    weight.mul_(HUGE if bad else 1.0)
    loss = mean_square(model, x, bad=bad)
    weight.div_(HUGE if bad else 1.0)
    return loss


def nothing(model: nn.Module, x: Tensor, *, bad: bool) -> None:
    """Leaves all as it is."""


def past_torch(model: nn.Module, x: Tensor, *, bad: bool) -> None:
    for gradient in [p.grad for p in model.parameters() if p.grad is not None] * bad:
        gradient.numpy().fill(math.nan)


def next_batch_in_its_memory(model: nn.Module, x: Tensor, *, bad: bool) -> None:
    x.numpy()[:] = 0.5


def drawn(bad: bool) -> Tensor:
    return torch.randn(4, WIDTH)


def enormous(bad: bool) -> Tensor:
    return torch.randn(4, WIDTH) * (HUGE if bad else 1.0)


def loop(
    model: Callable[[], nn.Module] = Plain,
    *,
    loss: Callable[..., Tensor] = mean_square,
    after_backward: Callable[..., None] = nothing,
    batch: Batch = drawn,
    mode: Callable[[bool], Any] = lambda _: contextlib.nullcontext(),
    at: int = BAD,
) -> Callable[[Callable[..., Any]], None]:
    def run(watch: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        watch(net, scaler)
        for step in range(at + 3):
            bad = step == at
            optimizer.zero_grad()
            x = batch(bad)
            with mode(bad), torch.autocast("cpu", dtype=torch.float16):
                value = loss(net, x, bad=bad)
            scaler.scale(value).backward()
            after_backward(net, x, bad=bad)
            scaler.step(optimizer)
            scaler.update()

    return run


def positive(x: Tensor) -> Tensor:
    return x.abs() + 1.0


FAULTS = {
    "a logarithm of positive numbers": lambda: Struck(math.nan, lambda x: positive(x).log(), torch.tanh),
    "a quotient by none that is zero": lambda: Struck(math.nan, lambda x: x / positive(x), torch.tanh),
    "a large number in one place": lambda: Struck(1e30, positive, lambda x: x * 1.0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_number_that_the_device_got_wrong_once_is_transient(name: str, run_folder: Path) -> None:
    found = primary_incident(Watched.train(loop(FAULTS[name]), run_folder).run)
    assert (found.cause, found.step, found.replay) == (Cause.HARDWARE_TRANSIENT, BAD, ReplayStatus.NOT_REPRODUCED)
    assert "the same to the last bit" in found.explanation


def test_one_in_a_step_that_was_not_traced_is_unknown(run_folder: Path) -> None:
    late = 12
    model = lambda: Struck(math.nan, positive, torch.tanh, at=late)  # noqa: E731  # as a loop takes it
    found = primary_incident(Watched.train(loop(model, at=late), run_folder).run)
    assert (found.cause, found.step) == (Cause.UNKNOWN, late)
    assert "no trace of how it first ran" in found.explanation


NOISE = torch.Generator()


def loud_noise(x: Tensor) -> Tensor:
    return x * torch.randn(x.shape, generator=NOISE).mul(1e3).exp().float().clamp(max=1e30)


def by_numpy(x: Tensor) -> Tensor:
    return x * (HUGE * (1.0 + np.random.random()))  # the global generator is the point


STORED = torch.ones(WIDTH)


def read_stored(x: Tensor) -> Tensor:
    return x * STORED.clone()


def refilled(model: nn.Module, x: Tensor, *, bad: bool) -> None:
    STORED.numpy()[:] = 1.0


def stored(bad: bool) -> Tensor:
    STORED.numpy()[:] = HUGE if bad else 1.0
    return drawn(bad)


def same(x: Tensor) -> Tensor:
    return x


#: What a second run did not see; with the op that overflowed, as its own operands show.
OTHERS = {
    "a mode": (loop(mode=lambda bad: Raised(HUGE if bad else 1.0)), "aten.mul.Tensor"),
    "an iterator": (loop(lambda: Made(once(same, lambda x: x * HUGE))), "aten.mul.Tensor"),
    "numpy's generator, drawn from late": (loop(lambda: Made(once(same, by_numpy))), "aten.mul.Tensor"),
    "weights behind their counters": (loop(loss=behind_the_counters), "aten._to_copy.default"),
    "a batch whose memory holds the next": (
        loop(batch=enormous, after_backward=next_batch_in_its_memory),
        "aten._to_copy.default",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_overflow_is_told_as_one_where_the_second_run_was_another(name: str, run_folder: Path) -> None:
    run, op = OTHERS[name]
    found = primary_incident(Watched.train(run, run_folder).run)
    assert found.cause in (Cause.FP16_OVERFLOW, Cause.LITERAL_OVERFLOW, Cause.SCALE_OVERFLOW)
    assert (found.step, found.op) == (BAD, op)


UNSEEN = {
    "a generator in a closure": loop(lambda: Made(once(same, loud_noise))),
    "a tensor that the loop keeps": loop(
        lambda: Made(itertools.repeat(read_stored)), batch=stored, after_backward=refilled
    ),
    "gradients written past torch": loop(after_backward=past_torch),
    "an operation that is not the same twice": loop(lambda: Made(once(same, lambda x: x * math.nan))),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_a_second_run_does_not_see_is_no_fault_of_the_device(name: str, run_folder: Path) -> None:
    incidents = diagnose(Watched.train(UNSEEN[name], run_folder).run).incidents
    assert BAD in [incident.step for incident in incidents]
    assert Cause.HARDWARE_TRANSIENT not in {incident.cause for incident in incidents}
