"""A run that ends with an error shows the call that raised; a loop that goes on, or stops on purpose, is left alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Verdict

Loss = Callable[[Tensor], Tensor]
#: The step that raises.
LAST = 2


class Scores(nn.Module):
    """Masks its input with a number that only float32 holds."""

    def __init__(self) -> None:
        super().__init__()
        self.lowest = -1e9

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, self.lowest)


class Net(nn.Module):
    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.part = part or nn.Identity()

    def forward(self, x: Tensor, *, raises: bool) -> Tensor:
        h = self.body(x)
        return self.part(h.half()).float() if raises else h


class _Refuses(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        return gradient.half().masked_fill(gradient > 0, 1e9)


class EarlyStop(Exception):
    """The loop has seen enough."""


def plain(out: Tensor) -> Tensor:
    return out.mean()


def filled(out: Tensor) -> Tensor:
    return (out.half() * torch.full_like(out.half(), -1e9)).sum()


def mixed(out: Tensor) -> Tensor:
    return (out @ out.double().t()).sum()


def refused_in_backward(out: Tensor) -> Tensor:
    return _Refuses.apply(out).mean()


def stops(_: Tensor) -> Tensor:
    raise EarlyStop


def trained(folder: Path, loss: Loss, *, part: nn.Module | None = None, goes_on: bool = False) -> Diagnosis:
    """Steps of which one fails; a loop that goes on catches the error and makes another."""
    torch.manual_seed(0)
    model = Net(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scope = ampscope.watch(model, dir=folder, quiet=True)
    for step in range(LAST + (2 if goes_on else 1)):
        optimizer.zero_grad()
        with contextlib.suppress(RuntimeError, EarlyStop):
            (loss if step == LAST else plain)(model(torch.randn(4, 8), raises=step == LAST)).backward()
            optimizer.step()
    scope.close()
    return ampscope.diagnose(folder)


@pytest.mark.parametrize(
    ("loss", "part", "said"),
    [
        (plain, Scores(), (Cause.LITERAL_OVERFLOW, "aten.masked_fill.Scalar", "part", "forward")),
        (filled, None, (Cause.LITERAL_OVERFLOW, "aten.full_like.default", "", "forward")),
        (mixed, None, (Cause.EXCEPTION, "aten.matmul.default", "", "forward")),
        (refused_in_backward, None, (Cause.LITERAL_OVERFLOW, "aten.masked_fill.Scalar", "", "backward")),
    ],
)
def test_the_call_that_raised_is_told(
    loss: Loss, part: nn.Module | None, said: tuple[Cause, str, str, str], run_folder: Path
) -> None:
    diagnosis = trained(run_folder, loss, part=part)
    told = diagnosis.primary
    assert isinstance(told, Incident), diagnosis.summary
    assert (diagnosis.verdict, told.step) == (Verdict.PROBLEM, LAST)
    assert (told.cause, told.op, told.module, told.phase) == said
    assert told.source is not None
    assert told.source.file.endswith("test_failed_calls.py")
    assert ("1e+09 does not fit float16" in told.explanation) == (told.cause is Cause.LITERAL_OVERFLOW)
    assert told.cause is not Cause.EXCEPTION or "RuntimeError: expected" in told.explanation


def test_a_loop_that_goes_on_has_got_over_an_error(run_folder: Path) -> None:
    assert trained(run_folder, plain, part=Scores(), goes_on=True).verdict is Verdict.HEALTHY


def test_a_loop_that_stops_on_purpose_is_well(run_folder: Path) -> None:
    diagnosis = trained(run_folder, stops)
    assert (diagnosis.verdict, diagnosis.incidents) == (Verdict.HEALTHY, ())


def test_a_model_that_raises_on_purpose_is_its_own_affair(run_folder: Path) -> None:
    class Stops(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            raise EarlyStop

    assert trained(run_folder, plain, part=Stops()).verdict is Verdict.HEALTHY
