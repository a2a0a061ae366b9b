"""What reduces gradients across ranks, as far as one rank can know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ampscope.capture.torch_support import process_group
from ampscope.capture.torch_support.process_group import GradientReduction, reduction_of_step, synchronising, wrapper_of

pytestmark = pytest.mark.usefixtures("alone")


class Asking(nn.Linear):
    """Notes what synchronises its own call."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: list[nn.Module | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(synchronising(wrapper_of(self)))
        return super().forward(x)


def test_the_wrapper_synchronises_its_own_call_and_the_one_inside() -> None:
    inner = Asking()
    model = DistributedDataParallel(inner)
    assert wrapper_of(inner) is None
    assert synchronising(wrapper_of(model)) is model
    model(torch.ones(1, 2))
    assert inner.seen == [model]


def test_not_within_no_sync() -> None:
    inner = Asking()
    model = DistributedDataParallel(inner)
    with model.no_sync():
        assert synchronising(wrapper_of(model)) is None
        model(torch.ones(1, 2))
    assert inner.seen == [None]


def test_a_compiled_wrapper() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    compiled: Any = torch.compile(model, backend="eager")
    assert synchronising(wrapper_of(compiled)) is model


@pytest.mark.parametrize(
    ("hook", "name", "dtype"),
    [
        (default_hooks.fp16_compress_hook, "fp16_compress_hook", torch.float16),
        (default_hooks.allreduce_hook, "allreduce_hook", None),
        (default_hooks.fp16_compress_wrapper(powerSGD_hook), "fp16_compress_wrapper", torch.float16),
    ],
)
def test_hooks(hook: Any, name: str, dtype: torch.dtype | None) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    state = PowerSGDState(None) if "wrapper" in name else None
    model.register_comm_hook(state, hook)
    found = reduction_of_step([model], 1)
    assert found is not None
    assert found.hook.startswith(name)
    assert (found.by, found.ranks, found.dtype) == ("DistributedDataParallel", 1, dtype)


def test_a_rank_by_itself_receives_nothing() -> None:
    assert reduction_of_step([DistributedDataParallel(nn.Linear(2, 2))], 3) is None
    assert reduction_of_step([], 3) is None


@pytest.mark.parametrize(
    ("collectives", "found"), [(0, None), (2, GradientReduction("", 4)), (None, GradientReduction("", 4))]
)
def test_collectives_of_which_nothing_is_known(
    collectives: int | None, found: GradientReduction | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "rank_of", lambda: (1, 4))
    assert process_group.reduction_of_step([], collectives) == found
