"""Ops that an accelerator's own threads run in backward belong to the same modules and lines as on the host."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampscope
from ampscope.capture.torch_support.threads import HomeThread, origin
from ampscope.capture.torch_support.torch_private import next_sequence_number
from ampscope.trace.schema import Phase, Source
from tests.support.training.accelerator import fake_device
from tests.support.training.small_loop import BATCH, WIDTH, make_scaler
from tests.support.training.step_traces import Trace

pytestmark = pytest.mark.accelerator

BLOCKS = 6
#: Of a step and an execution of it, where its ops were.
Rows = dict[tuple[int, Source], list[object]]
Loss = Callable[[nn.Module, Tensor], Tensor]
#: The step that is replayed.
LAST = 3


class Block(nn.Module):
    """Forgets what it computed, and computes it again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)

    def inner(self, h: Tensor) -> Tensor:
        wide = self.wide(h).relu()
        return h + self.narrow(wide) * 0.5


class Net(nn.Module):
    """Blocks between two layers that keep what they compute."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(reentrant=reentrant) for _ in range(BLOCKS)))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x).tanh()))


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def steepness(model: nn.Module, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
    return slope.square().mean()


def backward_of(device: str, make: Callable[[], nn.Module], folder: Path, loss: Loss = squares) -> Rows:
    """Where each op of each traced step's backward was, live and replayed."""
    with ThreadPoolExecutor(1) as new_thread:
        return new_thread.submit(_backward_of, device, make, folder, loss).result()


def _backward_of(device: str, make: Callable[[], nn.Module], folder: Path, loss_of: Loss) -> Rows:
    _count_as_the_device_does()
    torch.manual_seed(0)
    model = make().to(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler(device=device)
    with ampscope.watch(model, scaler, dir=folder, every=1, quiet=True):
        for step in range(LAST + 1):
            optimizer.zero_grad()
            loss = loss_of(model, torch.randn(BATCH, WIDTH).to(device))
            scaler.scale(loss * (math.inf if step == LAST else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    run = ampscope.open_run(folder)
    return {(step, Source.LIVE): _rows(run, step, Source.LIVE) for step in range(LAST)} | {
        (LAST, Source.REPLAY): _rows(run, LAST, Source.REPLAY)
    }


def _count_as_the_device_does() -> None:
    """Each thread numbers the autograd nodes that it makes: makes the next numbers of this one those of the device."""
    x, its_next = torch.ones(1, device=fake_device.TYPE, requires_grad=True), []
    x.register_hook(lambda _: its_next.append(next_sequence_number()))
    (x * 1.0).backward()
    while next_sequence_number() < its_next[0]:
        _ = x * 1.0


def _rows(run: ampscope.Run, step: int, source: Source) -> list[object]:
    sites = [op.site for op in Trace(run, step, source).ops]
    return [(s.op, s.module, s.line, s.grad_fn) for s in sites if s.phase in {Phase.BACKWARD, Phase.RECOMPUTE}]


@pytest.mark.parametrize(
    "make",
    [partial(Net, reentrant=False), partial(Net, reentrant=True)],
    ids=["checkpoints", "reentrant checkpoints"],
)
def test_no_op_takes_the_place_of_another(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    on_host = backward_of("cpu", make, tmp_path / "host")
    on_device = backward_of(fake_device.TYPE, make, tmp_path / "device")
    assert on_host.keys() == on_device.keys()
    for key, places in on_host.items():
        assert len(places) > 10 * BLOCKS
        assert on_device[key] == places, key


def test_no_gradient_of_a_gradient_takes_the_place_of_another(tmp_path: Path) -> None:
    """The device evaluates the nodes of its own thread in another order, and so adds another gradient to the first."""
    on_host = backward_of("cpu", layers, tmp_path / "host", steepness)
    on_device = backward_of(fake_device.TYPE, layers, tmp_path / "device", steepness)
    assert on_host.keys() == on_device.keys()
    for key, places in on_host.items():
        assert sum("TanhBackwardBackward" in str(row) for row in places) >= BLOCKS
        assert _in_any_order(on_device[key]) == _in_any_order(places), key


def _in_any_order(rows: list[object]) -> list[str]:
    return sorted(map(str, (row for row in rows if "aten.add.Tensor" not in str(row))))


def test_an_accelerators_thread_counts_as_the_one_whose_backward_it_works_for() -> None:
    home = HomeThread()
    assert home.is_entered()

    def backward() -> tuple[int, int, bool]:
        seen = []
        x = torch.ones(1, device=fake_device.TYPE, requires_grad=True)
        x.register_hook(lambda _: seen.append((threading.get_ident(), origin(), home.is_elsewhere)))
        (x * 1.0).backward()
        return seen[0]

    here = threading.get_ident()
    ran_in, works_for, is_elsewhere = backward()
    assert (ran_in != here, works_for, is_elsewhere) == (True, here, False)
    with ThreadPoolExecutor(1) as pool:
        _, works_for, is_elsewhere = pool.submit(backward).result()
    assert works_for != here
    assert is_elsewhere
