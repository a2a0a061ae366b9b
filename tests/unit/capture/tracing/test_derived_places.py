"""Ops that no line of forward calls directly have a place all the same: op, module and line are known by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.trace.schema import Phase, Source
from tests.support.training.small_loop import POISONED, WIDTH, Forward, train
from tests.support.training.step_traces import Trace, line_of
from tests.support.training.twin_runs import Watched

Look = Callable[[nn.Module, Forward], Trace]


@pytest.fixture(params=["live", "replay"])
def trace(request: pytest.FixtureRequest, device: str, run_folder: Path) -> Look:
    """Trains under watch with every step traced, and gives the trace of a healthy step, or of the replay.

    On the host, and on a device whose backward has a thread of its own.
    """

    def look(model: nn.Module, forward: Forward) -> Trace:
        run = Watched.train(lambda watch: train(watch, model, forward), run_folder, every=1).run
        return Trace(run, POISONED, Source.REPLAY) if request.param == "replay" else Trace(run, POISONED - 1)

    return look


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).float() - y).pow(2).mean()


class Within(nn.Module):
    """A layer, and a part of which the tests ask."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.lin(x).float())


class Cubic(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.pow(3)


def test_a_gradient_of_a_gradient_belongs_to_the_line_of_the_first(trace: Look) -> None:
    def penalty(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.pow(2).mean()

    traced = trace(Within(Cubic()), penalty)
    seconds = [op for op in traced.find("aten.", phase=Phase.BACKWARD) if _backward_of_backward(traced, op)]
    assert seconds
    of_part = [op for op in seconds if op.site.line == line_of(Cubic, "h.pow(3)")]
    assert {op.site.module for op in of_part} == {"part"}
    assert {op.site.module for op in seconds} <= {"part", "lin", ""}
    assert any("pow" in op.site.op or "mul" in op.site.op for op in of_part)


def _backward_of_backward(traced: Trace, op: Any) -> bool:
    of = traced.sites.get(op.site.forward_site)
    return of is not None and of.phase == Phase.BACKWARD


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 0.5

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return _HalvedGradient.apply(gradient)


class _HalvedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient.ceil()


class Halved(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return _Halved.apply(h).pow(3)


def test_a_function_that_is_the_gradient_of_another_has_its_own_line_alone(trace: Look) -> None:
    def penalty(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.pow(2).mean()

    op = trace(Within(Halved()), penalty).one("aten.ceil", phase=Phase.BACKWARD)
    assert (op.site.module, op.site.line) == ("", line_of(_HalvedGradient, "gradient.ceil()"))


def test_a_product_with_second_derivatives_belongs_to_the_line_of_the_first(trace: Look) -> None:
    def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (bent,) = torch.autograd.grad(slope, x, grad_outputs=y, create_graph=True)
        return bent.pow(2).mean()

    traced = trace(Within(Cubic()), penalty)
    seconds = [op for op in traced.find("aten.", phase=Phase.BACKWARD) if _backward_of_backward(traced, op)]
    assert {op.site.line for op in seconds if op.site.module == "part"} == {line_of(Cubic, "h.pow(3)")}


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        steep = gradient.exp2()
        return steep * 2


class Doubled(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return _Doubled.apply(h)


def test_a_functions_own_backward_has_its_line_and_the_module_of_its_forward(trace: Look) -> None:
    op = trace(Within(Doubled()), squares).one("aten.exp2", phase=Phase.BACKWARD)
    assert (op.site.module, op.site.line) == ("part", line_of(_Doubled, "gradient.exp2()"))


class _Recomputed(torch.autograd.Function):
    """Saves memory: what forward computed is computed again, and differentiated, in backward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.sinh()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        with torch.enable_grad():
            again = h.detach().requires_grad_()
            out = again.sinh()
            (inner,) = torch.autograd.grad(out, again, gradients[0])
        return inner


class Recomputed(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return _Recomputed.apply(h)


def test_a_gradient_taken_within_a_functions_backward_is_backward_in_its_module(trace: Look) -> None:
    traced = trace(Within(Recomputed()), squares)
    again = traced.one("aten.sinh", phase=Phase.BACKWARD)
    inner = traced.one("aten.cosh", phase=Phase.BACKWARD)
    assert (again.site.module, again.site.line) == ("part", line_of(_Recomputed, "again.sinh()"))
    assert inner.site.module == "part"
    assert not traced.find("", phase=Phase.RECOMPUTE)


class Hooked(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        h = h.sin()
        h.register_hook(self.soften)
        return h

    @staticmethod
    def soften(gradient: Tensor) -> Tensor:
        return gradient.ceil()


def test_a_hook_on_a_tensor_has_its_line_and_the_module_of_the_tensor(trace: Look) -> None:
    op = trace(Within(Hooked()), squares).one("aten.ceil", phase=Phase.BACKWARD)
    assert (op.site.module, op.site.line) == ("part", line_of(Hooked, "gradient.ceil()"))


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        wide = self.gain.expand(h.shape)
        return h * wide


def test_the_gradient_of_a_view_belongs_to_the_line_of_the_view(trace: Look) -> None:
    op = trace(Within(Expanded()), squares).one("aten.sum", phase=Phase.BACKWARD, grad_fn="ExpandBackward0")
    assert (op.site.module, op.site.line) == ("part", line_of(Expanded, "self.gain.expand"))
