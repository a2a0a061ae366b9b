"""No collective begins within AMPscope's own work, whatever asks for it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ampscope.capture.step.own_work import OwnWork
from ampscope.capture.torch_support import sharding
from ampscope.capture.torch_support.modes import Pause
from ampscope.capture.torch_support.own_collectives import CommunicationError
from ampscope.capture.torch_support.torch_private import dispatch_modes

pytestmark = pytest.mark.usefixtures("two_ranks")


def own_work() -> OwnWork:
    return OwnWork(Pause(), str)


def test_a_collective_is_refused() -> None:
    with own_work(), pytest.raises(CommunicationError, match="allreduce_"):
        dist.all_reduce(torch.ones(2))
    with own_work(), pytest.raises(CommunicationError, match="all_reduce"):
        all_reduce(torch.ones(2), "sum", dist.group.WORLD)  # type: ignore[arg-type]  # there is one


def test_a_statistic_of_a_sharded_tensor_is_refused_and_that_of_its_shard_is_not() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(torch.arange(2.0), mesh, [Shard(0)])
    with own_work():
        with pytest.raises(CommunicationError):
            whole.norm().isfinite()
        shard = sharding.local(whole)
        assert shard.numel() == 2
        assert shard.norm() == torch.arange(2.0).norm()


def test_what_the_loop_does_itself_is_left_alone() -> None:
    work = own_work()
    with work, work:
        pass
    assert dispatch_modes() == []
    dist.all_reduce(torch.ones(2))


def test_a_value_that_is_still_on_its_way_is_not_waited_for() -> None:
    arriving = all_reduce(torch.ones(2), "sum", dist.group.WORLD)  # type: ignore[arg-type]  # there is one
    assert not sharding.has_arrived(arriving)
    assert (arriving + 1).tolist() == [2.0, 2.0]  # the loop has used it
    assert sharding.has_arrived(arriving)
    assert sharding.local(arriving).tolist() == [1.0, 1.0]
