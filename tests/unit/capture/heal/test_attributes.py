"""Tensors in plain attributes of modules, no buffers: what is poisoned is put back, and what a bad step left undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.trace.schema import CureKind, EventKind, Table
from tests.support.training.small_loop import WIDTH
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures
from tests.unit.capture.heal.trained import BAD_STEP, made, spoil, trained

pytestmark = pytest.mark.usefixtures("strict_guards")


class Running(nn.Module):
    """Takes off a running mean that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mean = torch.zeros(WIDTH)

    def follow(self, x: Tensor) -> None:
        self.mean.lerp_(x.float().mean(0), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.follow(x)
        return self.last(x - self.mean)


class Replaced(Running):
    """Puts another tensor in its place each time."""

    def follow(self, x: Tensor) -> None:
        self.mean = torch.lerp(self.mean, x.float().mean(0), 0.1)


class Listed(Running):
    """Holds it in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.means = [self.mean]
        del self.mean

    def __getattr__(self, name: str) -> Any:
        return self.means[0] if name == "mean" else super().__getattr__(name)


@pytest.fixture
def scopes() -> Iterator[list[ampscope.Scope]]:
    opened: list[ampscope.Scope] = []
    yield opened
    for scope in opened:
        scope.close()


def healing(folder: Path, scopes: list[ampscope.Scope]) -> Callable[..., None]:
    return lambda model, scaler: scopes.append(ampscope.watch(model, scaler, dir=folder, quiet=True, heal=True))


def nobody(*_: Any) -> None:
    """Nobody watches, or does anything."""


@pytest.mark.parametrize("kind", [Running, Replaced])
@pytest.mark.parametrize("scaled", [True, False])
def test_what_was_poisoned_is_put_back(
    run_folder: Path, scopes: list[ampscope.Scope], kind: type[Running], scaled: bool
) -> None:
    held: list[Tensor] = []

    def poison(model: Any, step: int) -> None:
        held.append(model.mean.clone())
        if step == BAD_STEP:
            model.mean[0] = torch.nan

    def back(model: Any, step: int) -> None:
        if step == BAD_STEP:
            model.mean = held[BAD_STEP - 1].clone()

    model = made(kind)
    healed = trained(model, healing(run_folder, scopes), before=poison, scaled=scaled)
    (told,) = cures(scopes[0])
    assert (told["kind"], told["applied"]) == (CureKind.STATE, True)
    assert told["text"] == "mean put back to what it held a step before"
    twin = trained(other := made(kind), nobody, before=back, scaled=scaled)
    assert all(exact_state(healed[part]) == exact_state(twin[part]) for part in ("model", "optimizer", "scaler"))
    assert torch.equal(model.mean, other.mean)


@pytest.mark.parametrize("kind", [Running, Replaced])
def test_what_a_bad_step_has_spoilt_is_undone(
    run_folder: Path, scopes: list[ampscope.Scope], kind: type[Running]
) -> None:
    model = made(kind)
    healed = trained(model, healing(run_folder, scopes), before=nobody, batch=spoil)
    assert [each["kind"] for each in cures(scopes[0])] == [CureKind.ROWS_LEFT_OUT]
    assert all(torch.isfinite(torch.tensor(healed["losses"][BAD_STEP + 1 :])))
    assert bool(model.mean.isfinite().all())


def test_what_lies_in_a_list_is_left_as_it_is_and_that_is_told(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    def poison(model: Any, step: int) -> None:
        if step == BAD_STEP:
            model.mean[0] = torch.nan

    trained(model := made(Listed), healing(run_folder, scopes), before=poison)
    scopes[0].close()
    notes = [row.text for row in ampscope.open_run(run_folder).rows(Table.EVENTS, kind=EventKind.NOTE)]
    assert "not healed: means[0] is not finite, and lies in what an attribute holds" in notes
    assert not bool(model.mean.isfinite().all())
