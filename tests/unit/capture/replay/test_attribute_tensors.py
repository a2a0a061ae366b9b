"""The tensors that modules keep in plain attributes are found, named, and kept as they were referred to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.replay.state.attribute_tensors import AttributeTensors
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
    kept = {each.name: each.tensor for each in held.at(attributes)}
    assert kept["cache['keys']"] is before
    assert not kept["state.hidden"].any()
    assert attributes[0][1]["also"] is attributes[0][1]["cache"] is not cell.cache


def test_what_is_put_there_later_is_found_by_a_later_search() -> None:
    cell = _Cell()
    held = _searched(cell)
    vars(cell)["later"] = [torch.zeros(2)]
    held.search()
    assert "later[0]" in {each.name for each in held.now()}
