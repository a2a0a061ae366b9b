"""What a step has computed is gone when it has ended, and a closed scope's model, without a collection."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.training.model_parts import grad_of
from tests.support.training.small_loop import BATCH, WIDTH, make_scaler, mlp

STEPS = 6
#: A step whose loss is infinite.
BAD = 3


class _Label:
    """Dies with whatever holds it; autograd's nodes cannot be referred to weakly."""


class Freed:
    """Watches what a step has computed."""

    def __init__(self) -> None:
        self._known: list[tuple[str, weakref.ref[Any]]] = []

    def results(self, **named: Tensor) -> None:
        """Tensors, and the graphs that they end."""
        for name, tensor in named.items():
            self._known.append((name, weakref.ref(tensor)))
            if tensor.grad_fn is not None:
                label, metadata = _Label(), cast(dict[str, Any], tensor.grad_fn.metadata)
                metadata["label"] = label
                self._known.append((f"graph of {name}", weakref.ref(label)))

    def gradients(self, model: nn.Module) -> None:
        """The gradients of a model."""
        known = [each.grad for each in model.parameters() if each.grad is not None]
        self._known += [("gradient", weakref.ref(gradient)) for gradient in known]

    def alive(self) -> set[str]:
        """What of that is still there."""
        return {name for name, each in self._known if each() is not None}


class Loop:
    """A training loop, step by step."""

    is_autocast = True
    dtype = torch.bfloat16
    has_scaler = False
    clips = False
    micro_batches = 1
    bad: tuple[int, ...] = ()
    set_to_none = True

    def __init__(self) -> None:
        self.model: nn.Module = self.make_model()
        self.scaler = make_scaler() if self.has_scaler else None
        self.optimizers = self.make_optimizers()

    def make_model(self) -> nn.Module:
        return mlp()

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.model.parameters())]

    def loss(self, freed: Freed, x: Tensor | None = None) -> Tensor:
        """The loss on a new batch."""
        x, y = torch.randn(BATCH, WIDTH) if x is None else x, torch.randn(BATCH, WIDTH)
        with torch.autocast("cpu", self.dtype, enabled=self.is_autocast):
            out = self.model(x)
            loss = nn.functional.mse_loss(out.float(), y)
        freed.results(x=x, y=y, out=out, loss=loss)
        return loss

    def step(self, number: int, freed: Freed) -> None:
        for _ in range(self.micro_batches):
            loss = self.loss(freed) * (torch.inf if number in self.bad else 1.0)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.clips:
            if self.scaler is not None:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.set_to_none:
            freed.gradients(self.model)
        for optimizer in self.optimizers:
            if self.scaler is not None:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        self.model.zero_grad(set_to_none=self.set_to_none)


class Clipped(Loop):
    clips = True


class KeepsGradients(Clipped):
    set_to_none = False


class InFloat32(Loop):
    is_autocast = False


class Accumulates(Clipped):
    micro_batches = 3


class GoesBad(Clipped):
    bad = (BAD,)


class Scaled(Loop):
    has_scaler = True
    dtype = torch.float16


class ScaledAndClipped(Scaled):
    clips = True


class AccumulatesScaled(ScaledAndClipped):
    micro_batches = 3


class SkipsSteps(ScaledAndClipped):
    bad = (0, 1, BAD)


class Evaluates(Clipped):
    def step(self, number: int, freed: Freed) -> None:
        super().step(number, freed)
        x = torch.randn(BATCH, WIDTH)
        with torch.no_grad():
            freed.results(evaluated=x, its_result=self.model.eval()(x))
        self.model.train()


class TwoOptimizers(Scaled):
    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        first, _, last = self.model.children()
        return [torch.optim.SGD(first.parameters(), 0.01), torch.optim.SGD(last.parameters(), 0.01)]


class HeadAlone(Loop):
    """Weights that require gradients and that no optimizer holds: another might show up in the first steps."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(list(self.model.children())[-1].parameters(), 0.01)]


class WithClosure(Loop):
    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.LBFGS(self.model.parameters(), max_iter=3)]

    def step(self, number: int, freed: Freed) -> None:
        x = torch.randn(BATCH, WIDTH)

        def closure() -> Tensor:
            self.model.zero_grad()
            loss = self.loss(freed, x)
            loss.backward()
            freed.gradients(self.model)
            return loss

        self.optimizers[0].step(closure)  # type: ignore[arg-type]  # torch wants a float
        self.model.zero_grad()


class Checkpointed(Loop):
    def make_model(self) -> nn.Module:
        return _Checkpointed()


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class ByHand(Loop):
    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return []

    def step(self, number: int, freed: Freed) -> None:
        self.loss(freed).backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(0.01 * grad_of(parameter))
                parameter.grad = None


class Adversarial(Loop):
    """The generator's results are read by the step of the discriminator, and then by its own."""

    def make_model(self) -> nn.Module:
        return nn.ModuleDict({"generator": mlp(), "discriminator": mlp()})

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters()) for part in self.model.children()]

    def step(self, number: int, freed: Freed) -> None:
        generator, discriminator = self.model.children()
        z, real = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
        with torch.autocast("cpu", self.dtype):
            fake = generator(z)
            first = (discriminator(fake.detach()) - discriminator(real)).float().mean()
        freed.results(z=z, real=real, fake=fake, first=first)
        first.backward()
        freed.gradients(discriminator)
        self.optimizers[1].step()
        self.model.zero_grad()
        with torch.autocast("cpu", self.dtype):
            second = -discriminator(fake).float().mean()
        freed.results(second=second)
        second.backward()
        freed.gradients(self.model)
        self.optimizers[0].step()
        self.model.zero_grad()


#: From which step on nothing of one outlives it: in the first ones, another optimizer may show up.
LOOPS: dict[type[Loop], int] = {
    Loop: 0,
    Clipped: 0,
    KeepsGradients: 0,
    InFloat32: 0,
    Accumulates: 0,
    GoesBad: 0,
    Scaled: 0,
    ScaledAndClipped: 0,
    AccumulatesScaled: 0,
    SkipsSteps: 0,
    Evaluates: 0,
    WithClosure: 0,
    Checkpointed: 0,
    Adversarial: 0,
    ByHand: 0,
    TwoOptimizers: 0,
    HeadAlone: 3,
}
#: What is kept for a while all the same, within a limit of bytes: gradients by which weights of few elements are moved
#: between two steps.
MAY_STAY: dict[type[Loop], set[str]] = {ByHand: {"gradient"}, TwoOptimizers: {"gradient"}}


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("every", [None, 0, 1])
@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.__name__)
def test_nothing_of_a_step_outlives_it(kind: Callable[[], Loop], every: int | None, watch: Any) -> None:
    loop = kind()
    watch(loop.model, loop.scaler, every=every)
    stayed: dict[int, set[str]] = {}
    for number in range(STEPS):
        freed = Freed()
        loop.step(number, freed)
        stayed[number] = freed.alive() - MAY_STAY.get(type(loop), set())
    assert {number: names for number, names in stayed.items() if names and number >= LOOPS[type(loop)]} == {}


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("kind", [GoesBad, SkipsSteps, WithClosure, Checkpointed, ByHand], ids=lambda k: k.__name__)
def test_a_closed_scope_frees_its_model(kind: Callable[[], Loop], watch: Any) -> None:
    alive = []
    for _ in range(2):  # what torch imports in a process's first step keeps that step's frames
        loop = kind()
        model = weakref.ref(loop.model)
        scope = watch(loop.model, loop.scaler)
        for number in range(STEPS):
            loop.step(number, Freed())
        scope.close()
        del loop
        alive.append(model() is not None)
    assert not alive[1]
