"""A replay whose size nobody knows ends before it takes more memory than there is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampscope.capture.replay import memory
from ampscope.capture.replay.memory import Bounded, NoRoomError

KIB = 256  # float32 elements


def test_what_forward_gives_is_counted() -> None:
    x = torch.ones(KIB)
    with Bounded(2 * 1024):
        (x + 1) * 2
        with pytest.raises(NoRoomError, match="not enough free memory"):
            x - 1


def test_views_take_no_memory() -> None:
    x = torch.ones(KIB)
    with Bounded(0):
        assert x.view(16, 16).t()[0].shape == (16,)


def test_what_backward_gives_takes_the_place_of_what_forward_gave() -> None:
    model = nn.Linear(16, 16)
    x = torch.ones(16, 16)
    with Bounded(2 * 1024 + 8):
        model(x).sum().backward()
    assert model.weight.grad is not None


def test_where_nobody_can_tell_there_is_no_bound() -> None:
    assert memory.room(torch.device("meta")) is None
