"""A loss scale that a backward begins with is one, as a factor of the loss is; a run without any is told still."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampscope
from ampscope.trace.vocabulary import Cause
from tests.support.training.small_loop import here

SCALE, SAMPLES = 1024.0, 8

pytestmark = pytest.mark.usefixtures("device")

#: Leaves gradients of the losses of single samples in a model's parameters.
Backward = Callable[[nn.Module, Tensor], None]


def given(model: nn.Module, gradients: tuple[Tensor, ...]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def divided(model: nn.Module, by: Tensor | float = SCALE) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(by)


def divided_by_a_number(model: nn.Module, losses: Tensor) -> None:
    losses.mean().backward(torch.tensor(SCALE))
    divided(model)


def divided_by_the_seed(model: nn.Module, losses: Tensor) -> None:
    seed = torch.tensor(SCALE)
    torch.autograd.backward([losses.mean()], grad_tensors=[seed])
    divided(model, seed)


def each_sample_its_share(model: nn.Module, losses: Tensor) -> None:
    torch.autograd.backward(losses, torch.full_like(losses, SCALE / SAMPLES))
    divided(model)


def skipped_where_not_finite(model: nn.Module, losses: Tensor) -> None:
    divided_by_a_number(model, losses)
    if not all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None):
        model.zero_grad()


def asked_for_and_divided(model: nn.Module, losses: Tensor) -> None:
    seed = torch.tensor(SCALE)
    slopes = torch.autograd.grad(losses.mean(), list(model.parameters()), grad_outputs=seed)
    given(model, tuple(slope / seed for slope in slopes))


def asked_for_and_multiplied(model: nn.Module, losses: Tensor) -> None:
    slopes = torch.autograd.grad([losses.mean()], list(model.parameters()), [torch.tensor(SCALE)])
    given(model, tuple(slope * (1 / SCALE) for slope in slopes))


def no_scale(_: nn.Module, losses: Tensor) -> None:
    losses.mean().backward()


def a_seed_of_one(_: nn.Module, losses: Tensor) -> None:
    losses.mean().backward(torch.tensor(1.0))


def ones_and_a_mean(model: nn.Module, losses: Tensor) -> None:
    torch.autograd.backward(losses, torch.ones_like(losses))
    divided(model, SAMPLES)


def never_divided(_: nn.Module, losses: Tensor) -> None:
    torch.autograd.backward(losses.mean(), torch.tensor(SCALE))


def asked_for_without_a_scale(model: nn.Module, losses: Tensor) -> None:
    given(model, torch.autograd.grad(losses.mean(), list(model.parameters())))


def mistakes(backward: Backward, folder: Path) -> set[Cause]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with ampscope.watch(model, dir=folder, quiet=True):
        for _ in range(4):
            with torch.autocast(here(), torch.float16):
                results = model(torch.randn(SAMPLES, 6))
            losses = F.cross_entropy(results.float(), torch.randint(3, (SAMPLES,)), reduction="none")
            backward(model, losses)
            optimizer.step()
            optimizer.zero_grad()
    return {each.cause for each in ampscope.diagnose(folder).findings}


@pytest.mark.parametrize(
    "backward",
    [
        divided_by_a_number,
        divided_by_the_seed,
        each_sample_its_share,
        skipped_where_not_finite,
        asked_for_and_divided,
        asked_for_and_multiplied,
    ],
)
def test_a_scale_given_as_the_seed_and_divided_out_again_is_no_missing_scaler(
    backward: Backward, run_folder: Path
) -> None:
    assert mistakes(backward, run_folder) == set()


@pytest.mark.parametrize(
    "backward", [no_scale, a_seed_of_one, ones_and_a_mean, never_divided, asked_for_without_a_scale]
)
def test_a_run_without_a_scale_is_told(backward: Backward, run_folder: Path) -> None:
    assert mistakes(backward, run_folder) == {Cause.MISUSE_MISSING_SCALER}
