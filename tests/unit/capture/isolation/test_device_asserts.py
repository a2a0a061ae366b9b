"""Where an accelerator would end the process, a replay ends before it gives it an index that is out of range."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.capture.isolation import device_asserts
from ampscope.capture.isolation.device_asserts import DeviceAsserts, OutOfRangeError, can_assert
from ampscope.trace.schema import ReplayStatus, Table, Trial
from tests.support.training.small_loop import make_scaler
from tests.support.training.twin_runs import Loop, train_both

SIZE = 4
TABLE = torch.randn(SIZE, 3)


def whole(*numbers: float) -> Tensor:
    """Numbers that a float has a part in."""
    return torch.tensor(numbers, dtype=torch.float32).long()


def shared() -> Tensor:
    return TABLE.clone()


#: What is run on an index that reaches from 0 to 3, and on one that goes past it.
READS: dict[str, Callable[[Tensor], Any]] = {
    "embedding": lambda index: F.embedding(index, TABLE),
    "embedding_bag": lambda index: F.embedding_bag(index.unsqueeze(0), TABLE),
    "index": lambda index: TABLE[index],
    "index of two": lambda index: TABLE.t()[:, index],
    "index_put": lambda index: shared().index_put_((index,), torch.ones(3)),
    "gather": lambda index: TABLE.gather(0, index.unsqueeze(1)),
    "scatter": lambda index: torch.zeros(SIZE).scatter(0, index, 1.0),
    "scatter_add": lambda index: torch.zeros(SIZE).scatter_add(0, index, torch.ones(len(index))),
    "index_select": lambda index: TABLE.index_select(0, index),
    "index_add": lambda index: torch.zeros(SIZE).index_add(0, index, torch.ones(len(index))),
    "take": lambda index: TABLE[:, 0].contiguous().take(index),
    "nll_loss": lambda index: F.nll_loss(torch.randn(len(index), SIZE), index),
    "one_hot": lambda index: F.one_hot(index, SIZE),
    "cross_entropy with what is ignored": lambda index: F.cross_entropy(
        torch.randn(len(index) + 1, SIZE), torch.cat([index, whole(-100)])
    ),
}


@pytest.mark.parametrize("name", READS)
def test_an_index_that_was_computed_is_looked_at(name: str) -> None:
    with DeviceAsserts(contextlib.nullcontext):
        READS[name](whole(0, 2, SIZE - 1))
        too_large = whole(0, 2, SIZE * (3 if name == "one_hot" else 1))
        with pytest.raises((OutOfRangeError, RuntimeError), match=r"out of range|smaller than num_classes"):
            READS[name](too_large)


def test_one_that_was_given_is_that_of_the_real_step() -> None:
    given = torch.tensor([0, SIZE])
    with DeviceAsserts(contextlib.nullcontext), pytest.raises(IndexError):  # the host's own error
        F.embedding(given, TABLE)


def test_a_copy_of_an_index_and_what_is_calculated_of_it_are_looked_at() -> None:
    with DeviceAsserts(contextlib.nullcontext), pytest.raises(OutOfRangeError):
        F.embedding(whole(1, 2).clone().mul(2).view(2, 1), TABLE)


def test_the_order_of_numbers_is_computed_from_them() -> None:
    with DeviceAsserts(contextlib.nullcontext):
        best = torch.randn(5, SIZE).argmax(1)
        assert F.embedding(best, TABLE).shape == (5, 3)
        kept = (torch.randn(SIZE).sort().indices > 1).nonzero().squeeze(1)
        assert TABLE[kept].shape[1] == 3
        with pytest.raises(OutOfRangeError):
            F.embedding(best + SIZE, TABLE)


def test_a_backward_reads_what_its_forward_has_read() -> None:
    table = nn.Parameter(TABLE.clone())
    with DeviceAsserts(contextlib.nullcontext):
        (F.embedding(whole(1, 3), table).sum() + table[whole(0, 1)].sum()).backward()
    assert table.grad is not None


@pytest.mark.parametrize("bad", [torch.nan, -0.5, 2.0])
def test_probabilities_are_looked_at(bad: float) -> None:
    chances = torch.tensor([0.5, bad])
    with DeviceAsserts(contextlib.nullcontext):
        torch.bernoulli(torch.tensor([0.0, 1.0]))
        F.dropout(torch.randn(4), 0.5)
        F.binary_cross_entropy(torch.tensor([0.25, 1.0]), torch.ones(2))
        torch.multinomial(torch.tensor([0.5, 7.0]), 1)
        reads: list[Callable[[], Any]] = [
            lambda: torch.bernoulli(chances),
            lambda: torch.zeros(2).bernoulli_(chances),
            lambda: F.binary_cross_entropy(chances, torch.ones(2)),
        ]
        for read in [*reads, *([] if bad > 1 else [lambda: torch.multinomial(chances, 1)])]:
            with pytest.raises(OutOfRangeError, match="no probability"):
                read()


@torch.library.custom_op("ampscope_tests::rows", mutates_args=())
def rows(table: Tensor, index: Tensor) -> Tensor:
    """An op of somebody's own."""
    return table[index].clone()


def test_an_op_that_nobody_knows_gets_no_index_that_was_computed() -> None:
    given = torch.tensor([0, 1])
    with DeviceAsserts(contextlib.nullcontext):
        assert rows(TABLE, given).shape == (2, 3)
        with pytest.raises(OutOfRangeError, match="ampscope_tests::rows"):
            rows(TABLE, whole(0, 1))


def test_the_host_tells_by_itself() -> None:
    assert not can_assert({torch.device("cpu"), torch.device("mps", 0), torch.device("meta")})
    assert can_assert({torch.device("cpu"), torch.device("cuda", 1)})
    assert can_assert({torch.device("xpu", 0)})


# -- in a replay ------------------------------------------------------------------------------------------------------


class Rounded(nn.Module):
    """Looks rows up by what its first layer gives, which float16 rounds down to the last row, and float32 does not."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(1, 1)
        self.table = nn.Embedding(2048, 4)
        self.gain = 1.0
        nn.init.constant_(self.place.weight, 2048.4)
        nn.init.zeros_(self.place.bias)

    def forward(self, x: Tensor) -> Tensor:
        place = self.place(x)
        index = (place - 1).ceil().long().squeeze(1)
        return self.table(index).half() * self.gain * 1e4


def loop(watch: Callable[..., object]) -> Any:
    model = Rounded()
    optimizer, scaler = torch.optim.SGD(model.table.parameters(), 0.01), make_scaler()
    watch(model, scaler)
    for step in range(4):
        optimizer.zero_grad()
        model.gain = 100.0 if step == 2 else 1e-3
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(2, 1)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


@pytest.mark.parametrize("on_device", [True, False], ids=["an accelerator", "the host"])
def test_a_change_that_would_read_past_the_end_is_not_run_there(
    on_device: bool, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        monkeypatch.setattr(device_asserts, "_RAISING", frozenset())
    run: Loop = loop
    watched = train_both(run, run_folder)
    assert watched.replay_of(2) == (ReplayStatus.EXACT, "")
    in_float32 = next(row for row in watched.run.rows(Table.REPLAYS) if row.change == "fp32")
    assert in_float32.outcome == Trial.UNAVAILABLE
    assert ("ends the process" in in_float32.reason) is on_device
    assert ("IndexError" in in_float32.reason) is not on_device
