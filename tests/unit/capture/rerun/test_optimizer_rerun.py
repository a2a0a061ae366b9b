"""What an optimizer's own arithmetic ruins is named by its op, its parameter and its step, and stays the only thing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.trace.vocabulary import Cause, Verdict
from tests.unit.capture.ruined_optimizers import Loop, Make, loop, primary


class Normed(torch.optim.Optimizer):
    """Steps of one length."""

    def __init__(self, parameters: Any, eps: float = 0.0) -> None:
        super().__init__(parameters, {"eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(0.01 * parameter.grad / (parameter.grad.norm() + group["eps"]))


class OverLists(torch.optim.Optimizer):
    """Steps as long as the weights are, for all parameters at once."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = [each for each in self.param_groups[0]["params"] if each.grad is not None]
        gradients = [each.grad for each in weights]
        ratios = torch._foreach_div(torch._foreach_norm(weights), torch._foreach_norm(gradients))
        torch._foreach_add_(weights, torch._foreach_mul(gradients, ratios), alpha=-0.01)


class RootMeanSquare(torch.optim.Optimizer):
    """Squares in the dtype of the gradients, which may round them to zero."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.01 * parameter.grad / (parameter.grad * parameter.grad).mean().sqrt())


RUINED: dict[str, tuple[Loop, Cause, int, str]] = {
    "second moment": (
        loop(lambda p: torch.optim.Adam(p, 1e-3), large=1e23),
        *(Cause.BAD_OPTIMIZER_STATE, 3, "aten.addcmul_.default"),
    ),
    "in float16": (
        loop(lambda p: torch.optim.Adam(p, 1e-3, eps=1e-4), large=60000.0, at=5, dtype=torch.float16),
        *(Cause.BAD_OPTIMIZER_STATE, 5, "aten.addcmul_.default"),
    ),
    "running average": (
        loop(lambda p: torch.optim.RMSprop(p, 1e-3), large=1e23, at=6),
        *(Cause.BAD_OPTIMIZER_STATE, 6, "aten.addcmul_.default"),
    ),
    "no eps": (
        loop(lambda p: torch.optim.Adam(p, 1e-3, eps=0.0), dead=True),
        *(Cause.DIV_ZERO, 0, "aten.addcdiv_.default"),
    ),
    "no eps, later on": (
        loop(Normed, at=5, silent=True),
        *(Cause.DIV_ZERO, 5, "aten.div.Tensor"),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("make", "op"), [(Normed, "aten.div.Tensor"), (OverLists, "aten._foreach_div.List")])
def test_a_division_by_a_gradient_of_zeros_is_told_with_the_module_that_had_it(
    make: Make, op: str, dtype: torch.dtype, run_folder: Path
) -> None:
    found = primary(loop(make, at=1, dtype=dtype, silent=True), run_folder)
    assert (found.cause, found.op, found.step) == (Cause.DIV_ZERO, op, 1)
    assert (found.phase, found.module) == ("optimizer", "0")


def test_a_divisor_that_half_precision_rounds_to_zero_is_no_division_by_zero(run_folder: Path) -> None:
    found = primary(loop(RootMeanSquare, at=0, dtype=torch.float16, large=1e-3), run_folder)
    assert (found.cause, found.phase, found.op) == (Cause.HALF_PARAMS, "optimizer", "aten.div.Tensor")
    assert not found.module  # the dtype is that of all


@pytest.mark.parametrize("name", RUINED)
def test_the_op_of_the_optimizer_is_named(name: str, run_folder: Path) -> None:
    run, cause, step, op = RUINED[name]
    found = primary(run, run_folder)
    assert (found.cause, found.step, found.op) == (cause, step, op)
    assert (found.phase, found.module) == ("optimizer", "0")


HARMLESS: dict[str, Loop] = {
    "large, and within range": loop(lambda p: torch.optim.Adam(p, 1e-3), large=1e15),
    "float16 within range": loop(lambda p: torch.optim.Adam(p, 1e-3, eps=1e-4), large=100.0, dtype=torch.float16),
    "zeros, and an eps": loop(lambda p: Normed(p, 1e-8), silent=True),
    "no eps, and no zeros": loop(lambda p: torch.optim.Adam(p, 1e-3, eps=0.0)),
    "sums of squares": loop(lambda p: torch.optim.Adagrad(p, 1e-3), large=1e10),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_its_harmless_twin_is_not_told(name: str, run_folder: Path) -> None:
    scopes: list[ampscope.Scope] = []
    HARMLESS[name](lambda model: scopes.append(ampscope.watch(model, dir=run_folder, quiet=True)))
    scopes[0].close()
    assert ampscope.diagnose(run_folder).verdict is Verdict.HEALTHY


def flat(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from flat(value)


@pytest.mark.parametrize("name", RUINED)
def test_the_training_keeps_its_bits(name: str, run_folder: Path) -> None:
    run = RUINED[name][0]
    scopes: list[ampscope.Scope] = []
    watched = run(lambda model: scopes.append(ampscope.watch(model, dir=run_folder, quiet=True)))
    scopes[0].close()
    pairs = zip(flat(watched), flat(run(lambda _: None)), strict=True)
    assert all(torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in pairs)


class KeepsMore(torch.optim.SGD):
    """An optimizer of the user's that writes into tensors of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 1e-3, momentum=0.9)
        self.written = torch.zeros(())
        self.slow = {id(p): p.detach().clone() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.written += 1
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            slow = self.slow[id(parameter)].lerp_(parameter, 0.5)
            parameter.copy_(slow / (slow.norm() if self.written < 3 else 0.0))


class Notes:
    """What is no value, and may lead anywhere."""

    def __init__(self) -> None:
        self.steps = torch.zeros(())


class KeepsNotes(KeepsMore):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.notes = Notes()


@pytest.mark.parametrize("kind", [KeepsMore, KeepsNotes])
def test_an_optimizer_with_tensors_of_its_own_is_run_again_on_copies_of_them(
    kind: type[KeepsMore], run_folder: Path
) -> None:
    made: list[KeepsMore] = []

    def make(parameters: Any) -> KeepsMore:
        made.append(kind(parameters))
        return made[0]

    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # from now on torch calls the hooks of the base's step too
    found = primary(loop(make), run_folder)
    if kind is KeepsMore:
        assert (found.cause, found.op, found.step, found.module) == (Cause.DIV_ZERO, "aten.div.Tensor", 2, "0")
    else:
        assert (found.cause, found.op, found.step) == (Cause.BAD_WEIGHT, "", 2)
    assert float(made[0].written) == 6
