"""Modules that ``fully_shard`` was applied to keep the names that the user gave them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ampscope.capture.hooks import instrumented
from ampscope.capture.torch_support import sharding
from ampscope.capture.torch_support.models import Models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


@pytest.mark.usefixtures("two_ranks")
def test_names_are_those_of_the_model_as_it_was_written() -> None:
    model = Block()
    fully_shard(model.inner, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    instrumented.instrument(model, instrumented.Instrumented, None)
    models = Models([model])
    assert models.types == {"": "", "inner": "Linear"}
    assert models.main_type() == "Block"
    assert [name for name, _ in models.parameters.values()] == ["inner.weight", "inner.bias"]
    assert "several ranks" in sharding.obstacle_to_replay(models.modules)


def test_a_plain_model_has_no_obstacle() -> None:
    assert sharding.obstacle_to_replay(Models([Block()]).modules) == ""
    assert sharding.class_name(Block()) == "Block"


@pytest.mark.usefixtures("two_ranks")
def test_parameters_in_parts_are_an_obstacle_and_those_that_all_have_are_none() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = Block()
    for placement, reason in ((Replicate(), ""), (Shard(0), "tensor parallelism")):
        model.inner.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [placement]))
        found = sharding.obstacle_to_replay(model.modules())
        assert (reason in found) if reason else (found == "")
