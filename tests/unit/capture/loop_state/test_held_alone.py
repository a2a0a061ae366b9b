"""What a loop lets go of between two steps is kept up to a limit, and what is more is gone in the next step."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.capture.loop_state import loop_calls
from ampscope.capture.loop_state.loop_calls import MOST_CALLS, Gap
from ampscope.capture.torch_support import call_state

WIDTH, STEPS, CALLS = 6, 8, 12
SIZE = 400  # bytes of each tensor


@pytest.fixture
def gap(monkeypatch: pytest.MonkeyPatch) -> Gap:
    monkeypatch.setattr(loop_calls, "MOST_HELD", 3 * SIZE)
    return Gap(call_state.device_types())


def read(gap: Gap, tensor: Tensor) -> None:
    """The loop calls something that reads a tensor."""
    gap.called(torch.neg, (tensor,), {}, torch.neg(tensor), {})


def test_no_more_is_taken_down_when_the_calls_alone_keep_too_much(gap: Gap) -> None:
    seen: list[weakref.ref[Tensor]] = []
    while not gap.full and len(seen) < MOST_CALLS // 2:
        tensor = torch.ones(SIZE // 4)
        seen.append(weakref.ref(tensor))
        read(gap, tensor)
        del tensor
    assert 3 < len(seen) <= 8
    assert gap.holds_too_much()


def test_what_the_loop_keeps_itself_is_nothing_that_the_calls_keep(gap: Gap) -> None:
    kept = [torch.ones(SIZE // 4) for _ in range(CALLS)]
    for tensor in [*kept, *kept]:
        read(gap, tensor)
    del tensor
    assert not gap.full
    assert not gap.holds_too_much()
    kept.clear()
    assert gap.holds_too_much()


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_was_let_go_of_is_gone_in_the_next_step(
    by_hand: bool, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_calls, "MOST_HELD", 3 * SIZE)
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    scope = ampscope.watch(model, dir=run_folder, quiet=True)
    dropped: list[weakref.ref[Tensor]] = []
    alive = []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(torch.randn(4, WIDTH)).float(), torch.zeros(4, WIDTH))
        alive.append(sum(each() is not None for each in dropped))
        dropped.clear()
        loss.backward()
        with torch.no_grad():
            if by_hand:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(1e-2 * parameter.grad)
            else:
                optimizer.step()
            optimizer.zero_grad()
            for mine, theirs in zip(average, model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        for _ in range(CALLS):
            tensor = torch.randn(SIZE // 4)
            dropped.append(weakref.ref(tensor))
            tensor.abs().sum()
            del tensor
    scope.close()
    assert alive == [0] * STEPS
