"""What a step received is kept only where a replay can use it; why it cannot is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ampscope
from ampscope.capture.tape import received_values
from ampscope.capture.torch_support import guard
from ampscope.trace.schema import EventKind, IncidentRow, ReplayStatus, Table

pytestmark = pytest.mark.usefixtures("two_ranks")

Watch = Callable[..., ampscope.Scope]


class Exchanging(nn.Module):
    """Adds what ``exchange`` makes of its mean."""

    def __init__(self, exchange: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        mean = hidden.detach().mean(0)
        self.exchange(mean)
        return hidden + mean


def summed(mean: Tensor) -> None:
    dist.all_reduce(mean)


def step(model: nn.Module, batch: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(torch.full((2, 4), batch)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def incident(watch: Watch, exchange: Callable[[Tensor], None]) -> IncidentRow:
    """Of a second step whose batch is not finite."""
    model = Exchanging(exchange)
    scope = watch(model)
    step(model, 1.0)
    step(model, torch.nan)
    scope.close()
    (row,) = ampscope.open_run(scope.folder).rows(Table.INCIDENTS)
    return row


def test_what_the_loop_waited_for_is_used(watch: Watch) -> None:
    row = incident(watch, summed)
    assert (row.replay, row.replay_reason) == (ReplayStatus.EXACT, "")


def test_what_the_loop_did_not_wait_for_is_not(watch: Watch) -> None:
    row = incident(watch, lambda mean: setattr(dist, "_unwaited", dist.all_reduce(mean, async_op=True)))
    assert row.replay == ReplayStatus.UNAVAILABLE
    assert "(c10d.allreduce_.default), and the loop has not waited for it" in row.replay_reason


def test_a_kind_of_tensor_with_values_elsewhere_is_not(watch: Watch) -> None:
    class Wrapped(Tensor):
        pass

    row = incident(watch, lambda mean: summed(mean.as_subclass(Wrapped)))
    assert "what it received was no plain tensor" in row.replay_reason


def test_more_than_the_budget_is_not_kept(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_values, "MOST_BYTES", 8)
    assert "received more than AMPscope keeps" in incident(watch, summed).replay_reason


def test_a_rank_that_would_send_something_else_gets_nothing(watch: Watch) -> None:
    counter = itertools.count()

    def exchange(mean: Tensor) -> None:
        mean.fill_(next(counter))
        dist.all_reduce(mean)

    assert "what this rank sends came out otherwise" in incident(watch, exchange).replay_reason


def test_another_collective_at_the_same_place_gets_nothing(watch: Watch) -> None:
    counter = itertools.count()

    def exchange(mean: Tensor) -> None:
        if next(counter) < 2:
            dist.all_reduce(mean)
        else:
            dist.broadcast(mean, 0)

    assert "did something else at this place" in incident(watch, exchange).replay_reason


def test_a_fault_switches_the_keeping_off_and_nothing_else(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> list[Tensor]:
        raise ValueError("a fault")

    monkeypatch.setattr(received_values, "extremes_of", fails)
    monkeypatch.setattr(guard, "RAISE", False)
    with pytest.warns(RuntimeWarning, match="the keeping of what other ranks sent switched itself off"):
        row = incident(watch, summed)
    assert "what it received was not seen" in row.replay_reason


def test_the_users_own_exception_passes(watch: Watch) -> None:
    model = Exchanging(lambda mean: dist.all_reduce(mean, op="no such"))
    watch(model)
    with pytest.raises(TypeError):
        step(model, 1.0)


def test_nothing_is_left_in_torch(watch: Watch) -> None:
    kinds = (dist.ProcessGroup, dist.distributed_c10d.Work)
    before = [dict(vars(kind)) for kind in kinds]
    scope = watch(nn.Linear(2, 2))
    assert [dict(vars(kind)) for kind in kinds] != before
    scope.close()
    assert [dict(vars(kind)) for kind in kinds] == before


def test_gradients_that_the_loop_reduces_by_itself_are_not_kept(watch: Watch) -> None:
    model = nn.Linear(4, 4)
    scope = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(torch.full((2, 4), torch.nan)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    scope.close()
    run = ampscope.open_run(scope.folder)
    assert run.rows(Table.INCIDENTS)[0].replay == ReplayStatus.EXACT
    assert run.rows(Table.EVENTS, kind=EventKind.WARNING) == []


class Shifted(nn.Module):
    """Adds a buffer, which every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.shift: Tensor
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.shift
        self.shift.add_(1.0)
        return out


@pytest.mark.parametrize(("source", "written"), [(1, 5.0), (0, None)], ids=["of another rank", "of its own"])
def test_a_buffer_is_read_as_another_rank_wrote_it(
    source: int, written: float | None, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spread(group: dist.ProcessGroup, tensors: list[Tensor], size: int, source: int) -> None:
        for tensor in tensors:  # behind its change counter, as DistributedDataParallel has it
            tensor.data.copy_(tensor if written is None else torch.tensor(written))

    library: Any = dist
    monkeypatch.setattr(library, "_broadcast_coalesced", spread)
    model = Shifted()
    scope = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch in (1.0, torch.nan):
        model(torch.full((2, 4), batch)).sum().backward()
        library._broadcast_coalesced(dist.group.WORLD, [model.shift], 1, source)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    scope.close()
    assert library._broadcast_coalesced is spread
    (row,) = ampscope.open_run(scope.folder).rows(Table.INCIDENTS)
    assert (row.replay, row.replay_reason) == (ReplayStatus.EXACT, "")
