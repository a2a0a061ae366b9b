"""Sequences of several lengths in one nested tensor, of either layout: their ops are traced like any others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Incident
from ampscope.trace.schema import Node, Phase
from ampscope.trace.vocabulary import Cause
from tests.support.training.small_loop import POISONED, STEPS, WIDTH, make_scaler
from tests.support.training.step_traces import Trace, line_of
from tests.support.training.twin_runs import EXACT, Loop, Watched, train_both

LENGTHS = (3, 5)
Sequences = list[Tensor]
Forward = Callable[[nn.Module, Sequences], Tensor]


@pytest.fixture(params=[torch.strided, torch.jagged], ids=["strided", "jagged"])
def layout(request: pytest.FixtureRequest) -> Iterator[torch.layout]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        yield request.param


class Net(nn.Module):
    """Takes sequences, or a nested tensor of them."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.gain = 1.0

    def forward(self, x: Sequences | Tensor) -> Tensor:
        nested = x if isinstance(x, Tensor) else torch.nested.nested_tensor(x, layout=self.layout)
        hidden = torch.relu(self.first(nested)) * self.gain
        return torch.nested.to_padded_tensor(self.last(hidden), 0.0)


def of_sequences(model: nn.Module, x: Sequences) -> Tensor:
    return model(x).square().mean()


def of_a_nested_tensor(model: nn.Module, x: Sequences) -> Tensor:
    return model(torch.nested.nested_tensor(x, layout=model.layout)).square().mean()


@pytest.fixture(params=[of_sequences, of_a_nested_tensor])
def forward(request: pytest.FixtureRequest) -> Forward:
    return request.param


def train(
    watch: Callable[..., object], layout: torch.layout, forward: Forward, *, gain: float = 1.0, spoilt: bool = False
) -> Any:
    model, scaler = Net(layout), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch(model, scaler)
    for step in range(STEPS):
        x = [torch.randn(length, WIDTH) for length in LENGTHS]
        if spoilt and step == POISONED:
            x[1][2, 0] = torch.nan
        model.gain = gain if step == POISONED else 1.0
        optimizer.zero_grad()
        scaler.scale(forward(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
    return [model, optimizer, scaler]


def test_a_healthy_run_is_traced_and_changed_by_nothing(
    layout: torch.layout, forward: Forward, run_folder: Path
) -> None:
    watched = train_both(partial(train, layout=layout, forward=forward), run_folder, every=1)
    assert (watched.warnings, watched.incidents) == ([], [])
    found = ampscope.diagnose(run_folder)
    assert (found.incidents, {each.cause for each in found.findings}) == ((), {Cause.AMP_WITHOUT_EFFECT})  # no autocast
    op = Trace(watched.run, STEPS - 1).one("relu", phase=Phase.FORWARD)
    assert op.site.line == line_of(Net, "torch.relu")
    assert (op.out.numel, op.out.min) == (sum(LENGTHS) * WIDTH, 0.0)


def test_where_one_stops_being_finite_is_told(layout: torch.layout, forward: Forward, run_folder: Path) -> None:
    incident = origin(partial(train, layout=layout, forward=forward, gain=torch.inf), run_folder)
    assert (incident.op, incident.source and incident.source.line) == ("aten.mul.Tensor", line_of(Net, "* self.gain"))


def test_a_bad_sequence_came_from_outside(layout: torch.layout, forward: Forward, run_folder: Path) -> None:
    incident = origin(partial(train, layout=layout, forward=forward, spoilt=True), run_folder)
    assert (incident.op, incident.cause) == (Node.INPUT, Cause.BAD_INPUT)
    has_rows = forward is of_sequences  # a nested tensor holds those of several samples
    assert ("at index 2 of its first dimension" in incident.explanation) == has_rows
    assert ("of its first dimension" in incident.explanation) == has_rows


def origin(loop: Loop, folder: Path) -> Incident:
    """The incident at the only bad step of a run that is replayed."""
    watched = Watched.train(loop, folder)
    assert (watched.warnings, watched.replay_of(POISONED)) == ([], EXACT)
    primary = ampscope.diagnose(folder).primary
    assert isinstance(primary, Incident)
    return primary
