"""A replay shares memory with the training, and what it writes there is put back to the last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.capture.changes.replay_change import EverythingIn, ReplayChange
from ampscope.capture.isolation import memory, write_guard
from ampscope.capture.isolation.state_snapshot import SMALL_BUFFER_BYTES
from ampscope.capture.isolation.write_guard import WriteGuard
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.places import Places
from ampscope.capture.tracing.running_code import FunctionWatch
from ampscope.capture.tracing.sites import Sites
from ampscope.trace.schema import ReplayStatus
from tests.support.training.small_loop import BATCH, POISONED, WIDTH, mse, train
from tests.support.training.twin_runs import train_both

#: Columns of a frozen weight that is too large to be copied in every step.
WIDE = SMALL_BUFFER_BYTES // 4 // WIDTH + 1

Write = Callable[[Tensor], object]


@pytest.fixture
def guard() -> WriteGuard:
    return WriteGuard()


@contextlib.contextmanager
def active(guard: WriteGuard) -> Iterator[None]:
    """As in a replay."""
    functions = FunctionWatch(Places(Sites(0, str), ()), Guard("the test", pytest.fail))
    with guard.putting_back(), functions, guard.active(functions):
        yield


def _without_gradients(write: Write) -> Write:
    def wrapped(weight: Tensor) -> None:
        with torch.no_grad():
            write(weight)

    return wrapped


def _row_by_row(weight: Tensor) -> None:
    for row in weight.data:
        row.mul_(0.5)


def _view_then_whole(weight: Tensor) -> None:
    weight.data[1:, 2:].fill_(3.0)
    weight.data.mul_(2.0)
    weight.data.flatten()[:5] = torch.nan


def _other_dtype(weight: Tensor) -> None:
    weight.data.view(torch.int32).bitwise_not_()


WRITES: dict[str, Write] = {
    "data": lambda weight: weight.data.mul_(0.5),
    "no_grad": _without_gradients(lambda weight: weight.lerp_(torch.zeros_like(weight), 0.25)),
    "a view": _without_gradients(lambda weight: weight[2].zero_()),
    "rows": _row_by_row,
    "overlapping views": _view_then_whole,
    "item": _without_gradients(lambda weight: weight.__setitem__((0, slice(2)), torch.inf)),
    "transposed": lambda weight: weight.data.t().add_(1.0),
    "strided": lambda weight: weight.data.as_strided((4,), (3,), 1).neg_(),
    "another dtype": _other_dtype,
    "a list": lambda weight: torch._foreach_mul_([weight.data, weight.data[:1]], 3.0),
    "out": lambda weight: torch.add(torch.ones(WIDTH, WIDTH), 1.0, out=weight.data),
    "random": nn.init.normal_,
    "storage": lambda weight: weight.untyped_storage().copy_(torch.ones(WIDTH, WIDTH).untyped_storage()),
    "NumPy": lambda weight: weight.numpy().fill(7.0),
    "an array": lambda weight: torch.from_numpy(weight.data.__array__()).zero_(),
    "DLPack": lambda weight: torch.utils.dlpack.from_dlpack(weight.data).zero_(),
    "renormalised": lambda weight: F.embedding(torch.tensor([1, 2]), weight, max_norm=0.1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_is_put_back(write: Write, guard: WriteGuard) -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
    weight.data[3, 3], weight.data[3, 4] = torch.nan, -0.0
    before, version, address = _bits(weight), weight._version, weight.data_ptr()
    alias = nn.Parameter(guard.alias(weight), requires_grad=False)
    with active(guard):
        write(alias)
        assert not torch.equal(_bits(alias), before)
        assert torch.equal(_bits(alias), _bits(weight))  # whoever reads them in the replay sees what it wrote
    assert torch.equal(_bits(weight), before)
    assert (weight._version, weight.data_ptr()) == (version, address)


def _bits(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return weight.view(torch.int32).clone()


def test_it_is_put_back_after_an_error(guard: WriteGuard) -> None:
    weight = torch.ones(3)

    def fail() -> None:
        with active(guard):
            guard.alias(weight).zero_()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_memory_of_others_is_not_looked_at(guard: WriteGuard) -> None:
    weight, other = torch.ones(3), torch.ones(3)
    guard.alias(weight)
    with active(guard):
        other.zero_()
    assert other.tolist() == [0.0, 0.0, 0.0]


class Adapted(nn.Module):
    """A frozen base, and what is trained upon it; the address of the base is taken down at each call."""

    def __init__(self, write: Write | None = None) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.rand(WIDTH, WIDE), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self._write = write
        self.addresses: SimpleQueue[int] = SimpleQueue()  # which a replay does not put back

    def forward(self, x: Tensor) -> Tensor:
        self.addresses.put(self.base.untyped_storage().data_ptr())
        if self._write is not None:
            self._write(self.base)
        wide = (x @ self.base).mean(1, keepdim=True)
        return wide + self.up(self.down(x))


@pytest.mark.parametrize("write", [None, WRITES["data"], WRITES["rows"]], ids=["", "averaged", "rows"])
def test_a_replay_shares_frozen_weights(write: Write | None, run_folder: Path) -> None:
    found: list[Adapted] = []

    def loop(watch: Callable[..., object]) -> Any:
        found.append(Adapted(write))
        state = train(watch, found[-1], mse, parameters=[p for p in found[-1].parameters() if p.requires_grad])
        return [state["losses"], state["optimizer"], dict(found[-1].named_parameters())]

    watched = train_both(loop, run_folder)
    status, _ = watched.replay_of(POISONED)
    assert status != ReplayStatus.UNAVAILABLE
    assert (status == ReplayStatus.EXACT) is (write is None)
    calls = found[-1].addresses
    assert calls.qsize() > found[0].addresses.qsize()
    assert {calls.get_nowait() for _ in range(calls.qsize())} == {found[-1].base.untyped_storage().data_ptr()}


@pytest.mark.parametrize("write", [None, WRITES["data"], lambda weight: weight.numpy().__imul__(0.5)])
def test_no_replay_writes_where_what_lies_there_is_too_much_to_keep(
    write: Write | None, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_guard, "COPIED_BYTES", 64)

    def loop(watch: Callable[..., object]) -> Any:
        model = Adapted(write)
        state = train(watch, model, mse, parameters=[p for p in model.parameters() if p.requires_grad])
        return [state["losses"], state["optimizer"], dict(model.named_parameters())]

    status, reason = train_both(loop, run_folder).replay_of(POISONED)
    is_told = write is not None and write is not WRITES["data"]
    assert (status == ReplayStatus.UNAVAILABLE) is is_told
    assert ("asks for the address (numpy)" in reason) is is_told


class Coded(nn.Parameter):
    """A weight of a class of its own, as libraries make them of quantised ones."""

    code: float


def test_a_frozen_weight_is_what_it_was_to_code_that_asks(run_folder: Path) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Coded(torch.ones(WIDTH, WIDE, dtype=torch.int8), requires_grad=False)
            self.weight.code = 0.01
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            assert type(self.weight) is Coded
            return self.layer(x) + (x @ (self.weight * self.weight.code)).mean(1, keepdim=True)

    def loop(watch: Callable[..., object]) -> Any:
        return train(watch, Quantised())["losses"]

    assert train_both(loop, run_folder).replay_of(POISONED) == (ReplayStatus.EXACT, "")


def test_frozen_weights_are_no_part_of_what_a_replay_needs() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDE, BATCH, bias=False)).half()
    models, trained = Models([model]), WIDE * BATCH
    model[0].requires_grad_(requires_grad=False)
    assert memory.of_weights(models, ReplayChange().dtype) == 2 * trained
    assert memory.of_weights(models, EverythingIn(torch.float32).dtype) == 4 * (2 * trained + WIDTH * WIDE)
