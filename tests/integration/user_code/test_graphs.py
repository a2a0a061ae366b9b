"""Graphs that torch makes of a watched model are those of the model alone, at any moment of its training."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import ampscope
from ampscope.trace.vocabulary import Verdict
from tests.support.training.small_loop import make_scaler, mlp

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)
#: The step at which a graph is made, and after what: the first is traced, and so are others of the beginning.
MOMENTS = ["before", "forward 0", "end 0", "backward 3", "end 4"]
STEPS = 6


class Around(nn.Module):
    """A model of the loop's around the watched one, with a constant of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu() * 2


def _submodule(model: Any) -> str:
    return str(torch.jit.trace(model[0], X).inlined_graph)


def _copied(model: Any) -> str:
    twin = copy.deepcopy(model)
    return f"{type(twin)} {twin} {twin(X)}"


def _flops(model: Any) -> str:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(X)
    return str(counter.get_flop_counts())


MAKERS: dict[str, Callable[[Any], str]] = {
    "jit.trace": lambda model: str(torch.jit.trace(model, X).inlined_graph),
    "jit.trace of a part": _submodule,
    "jit.trace around": lambda model: str(torch.jit.trace(Around(model), X).inlined_graph),
    "onnx": lambda model: str(torch.jit._trace._get_trace_graph(model, (X,))[0]),
    "jit.script": lambda model: str(torch.jit.script(model).inlined_graph),
    "export": lambda model: str(torch.export.export(model, (X,), strict=False)),
    "strict export": lambda model: str(torch.export.export(model, (X,), strict=True)),
    "symbolic_trace": lambda model: str(torch.fx.symbolic_trace(model).code),
    "make_fx": lambda model: str(make_fx(model)(X).code),
    "deepcopy": _copied,
    "flops": _flops,
}


def _made(make: Callable[[Any], str], moment: str, watch: Callable[..., ampscope.Scope] | None) -> tuple[str, Tensor]:
    """The graph, and the weights in the end."""
    torch.manual_seed(0)
    model, scaler = mlp(), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scope = watch(model, scaler) if watch is not None else None
    graphs: list[str] = []

    def comes(now: str) -> None:
        if now == moment:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                text = make(model)
            graphs.append(re.sub(r"0x[0-9a-f]+|___torch_mangle_\d+\.|# File: .*", "", text))

    comes("before")
    for step in range(STEPS):
        with torch.autocast("cpu", torch.float16):
            loss = model(X + step).square().mean()
        comes(f"forward {step}")
        scaler.scale(loss).backward()
        comes(f"backward {step}")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        comes(f"end {step}")
    if scope is not None:
        scope.close()
        told = ampscope.diagnose(scope.folder)
        assert (told.verdict, told.run.steps) == (Verdict.HEALTHY, STEPS), told.summary
    return graphs[0], torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_graph_is_that_of_the_model_alone(maker: str, moment: str, watch: Callable[..., ampscope.Scope]) -> None:
    alone, watched = (_made(MAKERS[maker], moment, each) for each in (None, watch))
    assert watched[0] == alone[0]
    assert torch.equal(watched[1], alone[1])


def test_torch_has_its_own_functions_again(watch: Callable[..., ampscope.Scope]) -> None:
    own = torch.jit.trace, torch.jit.trace_module, torch.export.export
    watch(mlp(), make_scaler()).close()
    assert (torch.jit.trace, torch.jit.trace_module, torch.export.export) == own
