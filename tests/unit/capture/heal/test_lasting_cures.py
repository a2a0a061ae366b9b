"""What lasts of healing: it is made again in a resumed run, lifted when it is not needed, and ended when of no use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture.keep_fp32 import Float32Forward
from ampscope.trace.schema import CureKind, EventKind, Table
from tests.support.training.small_loop import WIDTH
from tests.unit.capture.heal.told import cures
from tests.unit.capture.heal.trained import BAD_STEP, SCALE, Doubtful, arm, made, trained

pytestmark = pytest.mark.usefixtures("strict_guards")


@pytest.fixture
def scopes() -> Iterator[list[ampscope.Scope]]:
    opened: list[ampscope.Scope] = []
    yield opened
    for scope in opened:
        scope.close()


def healing(folder: Path, scopes: list[ampscope.Scope], **options: Any) -> Callable[..., None]:
    def call(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=folder, quiet=True, heal=ampscope.Healing(**options)))

    return call


def always(model: Any, step: int) -> None:
    model.armed = step >= BAD_STEP


def armed(model: Any, step: int) -> None:
    model.armed = True


def test_a_resumed_run_has_its_cures_again(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    trained(made(Doubtful), healing(run_folder, scopes), before=always)
    (told,) = cures(scopes[0])
    model = made(Doubtful)
    healed = trained(model, healing(run_folder, scopes), before=armed)
    kept = [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), Float32Forward)]
    assert kept == told["modules"]
    assert all(torch.isfinite(torch.tensor(healed["losses"])))
    assert cures(scopes[1]) == [told]
    diagnosis = ampscope.diagnose(run_folder)
    assert [(each.step, each.kind, each.lifted_at) for each in diagnosis.cures] == [(BAD_STEP, "modules_fp32", None)]
    since = "resumed at step 6, and the failure has not come back in the 6 steps since, 50 % of the run"
    assert since in diagnosis.since


def test_a_run_that_is_resumed_without_healing_fails_as_before(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    trained(made(Doubtful), healing(run_folder, scopes), before=always)
    scopes[0].close()

    def plain(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=run_folder, quiet=True))

    trained(made(Doubtful), plain, before=arm)
    scopes[1].close()
    assert "and the failure has come back since: at step 9" in ampscope.diagnose(run_folder).since


def test_a_cure_that_is_not_needed_any_more_is_lifted(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    model = made(Doubtful)
    trained(model, healing(run_folder, scopes, quiet_steps=2), steps=16)
    assert [vars(module).get("forward") for module in model.modules()] == [None] * 4
    (lifted,) = cures(scopes[0], EventKind.CURE_LIFTED)
    assert (lifted["cure"], lifted["step"]) == (BAD_STEP, BAD_STEP + 6)
    assert ampscope.diagnose(run_folder).cures[0].lifted_at == BAD_STEP + 6


def test_a_cure_that_is_needed_stays(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    healed = trained(made(Doubtful), healing(run_folder, scopes, quiet_steps=2), before=always, steps=16)
    assert len(cures(scopes[0])) == 1
    assert cures(scopes[0], EventKind.CURE_LIFTED) == []
    assert healed["scaler"]["scale"] == SCALE


def hopeless(step: int, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, y = given
    return (x * torch.nan, y) if step >= BAD_STEP else given


def test_healing_ends_where_it_does_not_help(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    """A cure is in force, and then nothing may be done about steps that go bad."""
    options: dict[str, Any] = {"kinds": [CureKind.MODULES_FP32]}

    def late(step: int, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return hopeless(step - 2, given)

    healed = trained(made(Doubtful), healing(run_folder, scopes, **options), batch=late, steps=20)
    assert [each["kind"] for each in cures(scopes[0])] == [CureKind.MODULES_FP32]
    notes = [row.text for row in ampscope.open_run(run_folder).rows(Table.EVENTS, kind=EventKind.NOTE)]
    assert notes[-1] == "healing ended: 4 steps in a row went bad all the same"
    assert healed["scaler"]["scale"] == SCALE / 2 ** (20 - BAD_STEP - 2)


def test_a_cure_stays_while_the_scaler_finds_its_place(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    """Steps that overflow by the loss scale alone, as many in a row as else end healing."""

    def louder(step: int, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = given
        return (x, y + 2.0**17) if step >= BAD_STEP + 2 else given

    healed = trained(made(Doubtful), healing(run_folder, scopes), before=always, batch=louder, steps=16)
    assert healed["scaler"]["scale"] <= SCALE / 2**5
    assert [each["kind"] for each in cures(scopes[0])] == [CureKind.MODULES_FP32]
    assert cures(scopes[0], EventKind.CURE_LIFTED) == []


def test_what_makes_it_permanent_is_printed(
    run_folder: Path, scopes: list[ampscope.Scope], capsys: pytest.CaptureFixture[str]
) -> None:
    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=run_folder, heal=True))

    trained(made(Doubtful), watch)
    scopes[0].close()
    told = capsys.readouterr().err
    assert "this training is changed, and each change is told" in told
    assert f"step {BAD_STEP}: healed: " in told
    assert "to keep what healed this run, write: ampscope.keep_fp32(model, [" in told


class Louder(nn.Module):
    """Multiplies by a number that is held as an attribute; no layer of it alone can be kept apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.gain)


def louder(model: Any, step: int) -> None:
    model.gain = 2.0**18 if step >= BAD_STEP else 1.0


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_change_has_compiled_again_is_told(
    run_folder: Path, scopes: list[ampscope.Scope], compiled: bool
) -> None:
    model = made(Louder)
    if compiled:
        model.compile(backend="eager")
    healed = trained(model, healing(run_folder, scopes), before=louder)
    assert len(cures(scopes[0])) == 1
    assert all(torch.isfinite(torch.tensor(healed["losses"][BAD_STEP + 1 :])))
    notes = [row.text for row in ampscope.open_run(run_folder).rows(Table.EVENTS, kind=EventKind.NOTE)]
    assert [note for note in notes if "compiled again" in note] == [
        "the change had one graph compiled again"
    ] * compiled
