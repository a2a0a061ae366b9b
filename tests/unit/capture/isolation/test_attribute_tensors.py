"""The tensors that modules keep in plain attributes are found, named, and kept as they were referred to."""

from __future__ import annotations

import random
import time
import weakref
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.isolation.state_snapshot import AttributeTensors, StateSnapshot
from ampscope.capture.torch_support.models import Models


@dataclass
class _State:
    hidden: Tensor
    steps: int = 0


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(2))
        self.hidden = torch.zeros(2)
        self.cache = {"keys": torch.zeros(2), 3: [torch.zeros(2)]}
        self.state = _State(torch.zeros(2))
        self.counts = torch.zeros(2, dtype=torch.long)
        self.graph = self.weight * 2
        self.name = "cell"
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)


def _searched(model: nn.Module) -> AttributeTensors:
    held = AttributeTensors(Models([model]))
    held.search()
    return held


def test_floating_tensors_without_a_history_are_named_by_where_they_lie() -> None:
    found = _searched(nn.ModuleDict({"cell": _Cell()})).now()
    names = ["cell.hidden", "cell.cache['keys']", "cell.cache[3][0]", "cell.state.hidden"]
    assert [each.name for each in found] == names
    assert [each.attribute for each in found] == ["cell.hidden", "cell.cache", "cell.cache", "cell.state"]
    assert [each.is_nested for each in found] == [False, True, True, True]


def test_a_model_without_any_has_none() -> None:
    assert not _searched(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_what_holds_tensors_is_kept_as_it_was_and_stays_shared() -> None:
    cell = _Cell()
    vars(cell)["also"] = cell.cache
    held = _searched(cell)
    attributes: list[tuple[nn.Module, dict[str, Any]]] = [(cell, dict(vars(cell)))]
    held.keep(attributes)
    before = cell.cache["keys"]
    cell.cache["keys"] = torch.ones(2)
    cell.state.hidden = torch.ones(2)
    kept = attributes[0][1]
    assert kept["cache"]["keys"] is before
    assert not kept["state"].hidden.any()
    assert kept["also"] is kept["cache"] is not cell.cache


def test_what_is_put_there_later_is_found_by_a_later_search() -> None:
    cell = _Cell()
    held = _searched(cell)
    vars(cell)["later"] = [torch.zeros(2)]
    held.search()
    assert "later[0]" in {each.name for each in held.now()}


class _Thing:
    pass


class _Unwilling:
    """An object that lets nobody look at it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class _Counting(list[Any]):
    """A list that knows how often code that is not its own went through it."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        _Counting.looks += 1
        return super().__iter__()


class _Lazy(UserDict[str, Any]):
    """A mapping that makes what it is asked for."""

    def __getitem__(self, key: str) -> Any:
        self.data[f"made {len(self.data)}"] = key
        return self.data[key]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param([weakref.proxy(_Thing()), torch.ones(2)], id="a proxy of what is gone"),
        pytest.param(weakref.proxy(_Thing()), id="nothing but that"),
        pytest.param(torch.max(torch.ones(2, 2), 1), id="what an op returned"),
        pytest.param({"at": time.localtime(), "tensor": torch.ones(2)}, id="a time"),
        pytest.param([random.SystemRandom(), torch.ones(2)], id="a generator without a state"),
        pytest.param([_Unwilling(), torch.ones(2)], id="an object that raises"),
        pytest.param(_Lazy(tensor=torch.ones(2)), id="a lazy mapping"),
    ],
)
def test_nothing_that_a_model_holds_stops_the_tape(value: Any) -> None:
    model = nn.Linear(2, 2)
    vars(model)["held"] = value
    snapshot = StateSnapshot(Models([model]))
    snapshot.take()
    assert "held" in dict(snapshot.attributes())[model]


def test_no_code_of_a_container_runs_and_no_key_is_put_into_words() -> None:
    model = nn.Linear(2, 2)
    key = torch.zeros(2)
    vars(model)["rows"], vars(model)["by_tensor"] = _Counting([torch.ones(2)]), {key: torch.ones(2)}
    snapshot = StateSnapshot(Models([model]))
    snapshot.take()
    assert [each.name for each in snapshot.attribute_tensors()] == ["rows[0]", "by_tensor[Tensor 0]"]
    assert _Counting.looks == 0


def test_what_refers_to_itself_is_looked_through_once() -> None:
    model, rows = nn.Linear(2, 2), [torch.ones(2)]
    nodes: list[Any] = [_Thing() for _ in range(50)]
    for node in nodes:
        vars(node).update(peers=nodes, rows=rows)
    vars(model)["nodes"] = nodes
    assert [each.name for each in _searched(model).now()] == ["nodes[0].rows[0]"]


def test_a_memo_of_many_is_not_looked_through_in_each_step() -> None:
    model = nn.Linear(2, 2)
    vars(model)["memo"] = {number: torch.ones(1) for number in range(1000)}
    vars(model)["nested"] = {"words": list(range(1000)), "hidden": torch.ones(1)}
    vars(model)["hidden"] = [torch.ones(1)]
    assert [each.name for each in _searched(model).now()] == ["hidden[0]"]
