"""A bfloat16 loop whose model, loss, step or optimizer is compiled; one of its batches divides zero by zero."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, BATCH, CLASSES = 8, 16, 4
STEPS, BAD_STEP = 9, 6


class Normalise(nn.Module):
    """Divides each row by its norm; a row of zeros makes a NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH, bias=False), Normalise(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.relu(self.first(x))))


class Order(Enum):
    """What is compiled, what is watched and what is called."""

    IN_PLACE = auto()  #: ``model.compile()`` before ``watch``
    IN_PLACE_LATER = auto()
    COMPILED_WATCHED = auto()  #: the compiled model is watched and called
    RAW_WATCHED = auto()  #: compiled, then the model inside is watched
    RAW_WATCHED_FIRST = auto()  #: what Transformers and Accelerate do
    RAW_CALLED = auto()  #: the compiled model is watched, the one inside called
    SUBMODULE = auto()  #: a part of the model is compiled
    OPTIMIZER = auto()
    LOSS = auto()
    FORWARD_AND_LOSS = auto()
    FORWARD_AND_BACKWARD = auto()
    WHOLE_STEP = auto()  #: forward, backward and the optimizer


class Loop:
    """One training; call it with ``watch``."""

    def __init__(
        self, order: Order, backend: Any, *, bad: bool, steps: int = STEPS, net: Callable[[], nn.Module] = Net
    ):
        self.order, self.backend, self.bad, self.steps, self.net = order, backend, bad, steps, net

    def __call__(self, watch: Callable[..., object]) -> Any:
        torch._dynamo.reset()
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        step = self._step(model, optimizer, watch)
        losses = []
        for number in range(STEPS):
            x, y = torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))
            if self.bad and number == BAD_STEP:
                x[3] = 0
            losses.append(step(x, y).item())
            optimizer.zero_grad()
        return [dict(model.named_parameters()), optimizer, losses]

    def _step(self, model: Any, optimizer: Any, watch: Callable[..., object]) -> Callable[[Tensor, Tensor], Tensor]:
        order, compiled = self.order, torch.compile(backend=self.backend)
        called, watched, criterion, stepped = model, model, F.cross_entropy, optimizer.step
        if order is Order.IN_PLACE:
            model.compile(backend=self.backend)
        elif order is Order.SUBMODULE:
            model.norm = compiled(model.norm)
        elif order in (Order.COMPILED_WATCHED, Order.RAW_WATCHED):
            called = compiled(model)
            watched = called if order is Order.COMPILED_WATCHED else model
        elif order is Order.RAW_CALLED:
            watched = compiled(model)
        elif order is Order.LOSS:
            criterion = compiled(F.cross_entropy)
        elif order is Order.OPTIMIZER:
            stepped = compiled(optimizer.step)
        watch(watched)
        if order is Order.IN_PLACE_LATER:
            model.compile(backend=self.backend)
        elif order is Order.RAW_WATCHED_FIRST:
            called = compiled(model)

        def forward(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return criterion(called(x), y)

        if order is Order.FORWARD_AND_LOSS:
            forward = compiled(forward)

        def backward(x: Tensor, y: Tensor) -> Tensor:
            loss = forward(x, y)
            loss.backward()
            return loss

        if order is Order.FORWARD_AND_BACKWARD:
            backward = compiled(backward)

        def whole(x: Tensor, y: Tensor) -> Tensor:
            loss = backward(x, y)
            stepped()
            return loss

        return compiled(whole) if order is Order.WHOLE_STEP else whole


class Counting:
    """A backend that runs graphs as they are, and counts how many it was given and how often they ran."""

    def __init__(self) -> None:
        self.compiled = self.ran = 0

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph(*args)

        return run


@contextlib.contextmanager
def compiled_autograd() -> Iterator[None]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield
