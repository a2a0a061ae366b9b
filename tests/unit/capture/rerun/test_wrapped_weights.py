"""Weights in tensor subclasses that wrap others: replays run on wrappers like them, and their inner ops have places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ampscope import diagnose
from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import Cause, Verdict
from tests.support.primary import primary_incident
from tests.support.training.small_loop import here
from tests.support.training.step_traces import line_of
from tests.support.training.twin_runs import Watched

WIDTH, BAD, STEPS = 8, 4, 7


pytestmark = pytest.mark.usefixtures("device")


class Blocks(Tensor):
    """Small integers with a scale for each block of rows; every op works on what they stand for."""

    asked: ClassVar[list[str]] = []  #: the ops that this class answered
    blocks: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, blocks: Tensor, scales: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, (WIDTH, WIDTH), dtype=scales.dtype, device=scales.device)
        made.blocks, made.scales = blocks, scales
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def whole(self) -> Tensor:
        wide = self.blocks.to(self.scales.dtype)
        return (wide * self.scales[:, None, None]).reshape(WIDTH, WIDTH)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(str(func))
        if func is torch.ops.aten.detach.default:
            return cls(args[0].blocks, args[0].scales)
        args, kwargs = tree_map(lambda each: each.whole() if isinstance(each, cls) else each, (args, kwargs or {}))
        return func(*args, **kwargs)


class Dense(Tensor):
    """A trained weight that is stored beside a gain, and knows only the few ops that it needs."""

    store: Tensor
    gain: Tensor

    @staticmethod
    def __new__(cls, store: Tensor, gain: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, store.shape, dtype=store.dtype, device=store.device)
        made.store, made.gain = store, gain
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own, kwargs = args[0], kwargs or {}
        if func is torch.ops.aten.detach.default:
            return cls(own.store, own.gain)
        if func is torch.ops.aten._to_copy.default:
            half = own.store.half() * own.gain.half()
            return half.to(kwargs["dtype"])
        if func is torch.ops.aten.add_.Tensor:
            own.store.add_(args[1], **kwargs)
            return own
        raise NotImplementedError(func)


class Tagged(Tensor):
    """A weight with memory of its own, whose class answers torch's functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            x, weight = args[0], args[1].as_subclass(Tensor)
            return F.linear(x.half(), weight.half() * x.half().square().sum())


def as_buffer(layer: nn.Module) -> None:
    layer.register_buffer("weight", blocks())


def as_frozen(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(blocks(), requires_grad=False)


def as_attribute(layer: nn.Module) -> None:
    layer.weight = blocks()


def as_trained(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(Dense(torch.randn(WIDTH, WIDTH), torch.ones(())))


def as_tagged(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).as_subclass(Tagged))


def blocks() -> Tensor:
    scales = torch.full((2,), 1e-2, dtype=torch.float16)
    made: Tensor = Blocks(torch.randint(-100, 100, (2, WIDTH // 2, WIDTH), dtype=torch.int8), scales)
    return made


class Layer(nn.Module):
    weight: Tensor

    def __init__(self, hold: Callable[[nn.Module], None]) -> None:
        super().__init__()
        hold(self)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.half(), self.weight)


def recalibrated(weight: Any, *, badly: bool) -> None:
    """The loop writes into what a weight consists of, past the weight itself."""
    if isinstance(weight, Blocks):
        weight.scales.fill_(3000.0 if badly else 1e-2)
    elif isinstance(weight, Dense):
        weight.gain.fill_(60000.0 if badly else 1.0)


def loop(hold: Callable[[nn.Module], None], bad: int = BAD) -> Callable[[Callable[..., Any]], Any]:
    def run(watch: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        layer = Layer(hold)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity(), layer, nn.Tanh(), nn.Linear(WIDTH, 2))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        scaler = torch.amp.GradScaler(here(), init_scale=64.0)
        watch(model, scaler)
        losses = []
        Blocks.asked.clear()
        for step in range(STEPS):
            x = torch.randn(4, WIDTH) * (1e3 if step == bad and hold is as_tagged else 1.0)
            recalibrated(layer.weight, badly=step == bad)
            optimizer.zero_grad()
            with torch.autocast(here(), dtype=torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return {"losses": losses, "asked": len(Blocks.asked)}

    return run


PLACES: dict[Callable[[nn.Module], None], tuple[str, int]] = {
    as_buffer: ("aten.mul.Tensor", line_of(Blocks, "wide * self.scales")),
    as_frozen: ("aten.mul.Tensor", line_of(Blocks, "wide * self.scales")),
    as_attribute: ("aten.mul.Tensor", line_of(Blocks, "wide * self.scales")),
    as_trained: ("aten.mul.Tensor", line_of(Dense, "own.gain.half()")),
}


@pytest.mark.parametrize("hold", PLACES)
def test_an_overflow_inside_a_wrapper_has_its_op_its_line_and_the_module(
    hold: Callable[[nn.Module], None], run_folder: Path
) -> None:
    found = primary_incident(Watched.train(loop(hold), run_folder).run)
    op, line = PLACES[hold]
    assert (found.cause, found.step, found.replay) == (Cause.FP16_OVERFLOW, BAD, ReplayStatus.EXACT)
    assert (found.op, found.module, found.phase) == (op, "2", "forward")
    assert found.source is not None
    assert found.source.line == line
    assert found.fp32_ok is True or hold is as_trained


@pytest.mark.parametrize("hold", [*PLACES, as_tagged])
def test_its_harmless_twin_is_healthy_and_the_class_is_asked_nothing_more(
    hold: Callable[[nn.Module], None], run_folder: Path
) -> None:
    watched = Watched.train(loop(hold, bad=-1), run_folder)
    assert diagnose(watched.run).verdict is Verdict.HEALTHY
    alone = loop(hold, bad=-1)(lambda *_: None)
    assert watched.state["losses"] == alone["losses"]
    assert watched.state["asked"] == alone["asked"]


def test_a_class_that_answers_functions_has_the_lines_of_its_answers(run_folder: Path) -> None:
    found = primary_incident(Watched.train(loop(as_tagged), run_folder).run)
    assert (found.cause, found.step, found.module) == (Cause.FP16_OVERFLOW, BAD, "2")
    assert found.source is not None
    assert found.source.line == line_of(Tagged, "x.half().square().sum()")
