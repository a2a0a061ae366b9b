"""What is repaired in one bad step: rows of its batch, elements of weights; and steps that are left out for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture import budgets
from ampscope.trace.schema import CureKind, EventKind, Table
from tests.support.training.small_loop import WIDTH, make_batch
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures
from tests.unit.capture.heal.trained import BAD_STEP, SCALE, STEPS, made, spoil, trained

pytestmark = pytest.mark.usefixtures("strict_guards")

Pair = tuple[Tensor, Tensor]


class Layers(nn.Module):
    """Two layers; in the first one's place a mask may leave rows without anything, or a root may have no slope."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.armed = self.by_hand = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).float()
        return self.last(self.fault(x) if self.armed else x)

    def fault(self, x: Tensor) -> Tensor:
        return x


class Masked(Layers):
    """A softmax with one row of which nothing is left."""

    def fault(self, x: Tensor) -> Tensor:
        empty = torch.arange(len(x)) == 0
        scores = x.masked_fill(empty[:, None], 0.0 if self.by_hand else -torch.inf)
        chosen = scores.softmax(-1)
        return x + (chosen.masked_fill(empty[:, None], 0.0) if self.by_hand else chosen)


class Rooted(Layers):
    """A root of squares, one of which is zero."""

    def fault(self, x: Tensor) -> Tensor:
        squares = x.square() * (torch.arange(len(x)) > 0)[:, None]
        if self.by_hand:
            unsafe = squares <= 0
            return x + torch.where(unsafe, 0.0, torch.where(unsafe, 1.0, squares).sqrt())
        return x + squares.sqrt()


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


def nobody(*_: Any) -> None:
    """Nobody watches, or does anything."""


def notes(folder: Path) -> list[str]:
    return [row.text for row in ampscope.open_run(folder).rows(Table.EVENTS, kind=EventKind.NOTE)]


def without_row(step: int, given: Pair) -> Pair:
    x, y = given
    rest = [row for row in range(len(x)) if row != 1]
    return (x[rest], y[rest]) if step == BAD_STEP else given


def is_twin(healed: dict[str, Any], twin: dict[str, Any]) -> bool:
    return all(exact_state(healed[part]) == exact_state(twin[part]) for part in ("model", "optimizer", "scaler"))


@pytest.mark.parametrize("scaled", [True, False])
def test_a_step_is_made_without_the_rows_that_came_in_bad(
    run_folder: Path, scopes: list[ampscope.Scope], scaled: bool
) -> None:
    healed = trained(made(Layers), healing(run_folder, scopes), batch=spoil, before=nobody, scaled=scaled)
    (told,) = cures(scopes[0])
    assert (told["kind"], told["applied"]) == (CureKind.ROWS_LEFT_OUT, True)
    assert told["text"] == "1 of 4 rows of its batch left out, which came in not finite"
    assert is_twin(healed, trained(made(Layers), nobody, batch=without_row, before=nobody, scaled=scaled))


def never(*_: Any) -> bool:
    return False


def bad_rows_for_good(step: int, given: Pair) -> Pair:
    return spoil(BAD_STEP, given) if step >= BAD_STEP else given


def test_what_has_helped_goes_on_when_replays_have_used_up_their_time(
    run_folder: Path, scopes: list[ampscope.Scope], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "ALWAYS_REPLAYED", 1)
    monkeypatch.setattr(budgets.ReplayBudget, "_within_share", never)
    healed = trained(made(Layers), healing(run_folder, scopes), batch=bad_rows_for_good, before=nobody)
    assert [(each["step"], each["kind"]) for each in cures(scopes[0])] == [
        (step, CureKind.ROWS_LEFT_OUT) for step in range(BAD_STEP, STEPS)
    ]
    assert notes(run_folder) == []

    def by_hand(step: int, given: Pair) -> Pair:
        return without_row(BAD_STEP, given) if step >= BAD_STEP else given

    assert is_twin(healed, trained(made(Layers), nobody, batch=by_hand, before=nobody))


def ruined(value: float) -> Callable[[Any, int], None]:
    def before(model: Any, step: int) -> None:
        if step == BAD_STEP:
            with torch.no_grad():
                model.first.weight[0, 0] = value

    return before


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("scaled", [True, False])
def test_an_element_of_a_weight_that_is_not_finite_is_set_to_zero(
    run_folder: Path, scopes: list[ampscope.Scope], scaled: bool, value: float
) -> None:
    healed = trained(made(Layers), healing(run_folder, scopes), before=ruined(value), scaled=scaled)
    (told,) = cures(scopes[0])
    assert (told["kind"], told["applied"]) == (CureKind.WEIGHTS, True)
    assert told["text"] == "1 element of first.weight set to zero, not finite as the step began"
    assert is_twin(healed, trained(made(Layers), nobody, before=ruined(0.0), scaled=scaled))


def test_a_weight_of_which_much_is_lost_is_not_made_up(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    def before(model: Any, step: int) -> None:
        ruined(torch.nan)(model, step)
        ruined(torch.nan)(model, step - 1)
        if step >= BAD_STEP:
            with torch.no_grad():
                model.first.weight[0] = torch.nan

    trained(made(Layers), healing(run_folder, scopes), before=before)
    told = {each["text"] for each in cures(scopes[0])}
    assert told == {"left out, for weights of the model are not finite, and the loss scale kept"}


class FrozenMask(Layers):
    """A softmax with a mask that is a frozen parameter, of infinities by design."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.zeros(WIDTH)
        mask[0] = -torch.inf
        self.mask = nn.Parameter(mask, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x).float() + self.mask).softmax(-1))


def test_a_frozen_mask_of_infinities_is_left_as_it_is(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    healed = trained(made(FrozenMask), healing(run_folder, scopes), batch=spoil, before=nobody)
    assert [each["kind"] for each in cures(scopes[0])] == [CureKind.ROWS_LEFT_OUT]
    assert is_twin(healed, trained(made(FrozenMask), nobody, batch=without_row, before=nobody))


def test_a_weight_is_repaired_beside_a_frozen_mask(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    healed = trained(made(FrozenMask), healing(run_folder, scopes), before=ruined(torch.nan))
    (told,) = cures(scopes[0])
    assert told["text"] == "1 element of first.weight set to zero, not finite as the step began"
    assert is_twin(healed, trained(made(FrozenMask), nobody, before=ruined(0.0)))


def by_their_norm(model: nn.Module) -> None:
    """A loop's own clipping, by a number that it reads."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    size = float(torch.stack([each.norm() for each in gradients]).norm())
    for each in gradients:
        each.mul_(min(1.0, 1.0 / size))


@pytest.mark.parametrize(("value", "kind"), [(torch.nan, CureKind.WEIGHTS), (0.0, CureKind.LEFT_OUT)])
def test_a_step_that_no_scaler_skips_is_left_out_where_its_gradients_cannot_be_replaced(
    run_folder: Path, scopes: list[ampscope.Scope], value: float, kind: CureKind
) -> None:
    """Of a weight, or of a row of the batch; by gradients that are not finite, all weights would be lost."""
    model, weights = made(Layers), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    healing(run_folder, scopes)(model, None)
    for step in range(STEPS):
        x, y = make_batch()
        if step == BAD_STEP:
            ruined(value)(model, step)
            weights = {name: each.clone() for name, each in model.state_dict().items()}
            x[1, 2] = torch.nan if value == 0.0 else x[1, 2]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        by_their_norm(model)
        optimizer.step()
        if step == BAD_STEP:
            assert exact_state(model.state_dict()) == exact_state(weights)
    assert [each["kind"] for each in cures(scopes[0])] == [kind]
    assert all(bool(each.isfinite().all()) for each in model.parameters())


def armed(model: Any, step: int) -> None:
    model.armed = step >= BAD_STEP


def mended(model: Any, step: int) -> None:
    model.armed, model.by_hand = step >= BAD_STEP, True


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Masked, "rows without a key zero at "), (Rooted, "the operand of sqrt 1 where that is not above zero at ")],
)
def test_a_form_of_a_call_lasts_and_is_there_again_in_a_resumed_run(
    run_folder: Path, scopes: list[ampscope.Scope], kind: type[Layers], text: str
) -> None:
    healed = trained(made(kind), healing(run_folder, scopes), before=armed)
    (told,) = cures(scopes[0])
    assert (told["kind"], told["applied"], told["text"][: len(text)]) == (CureKind.FORM, True, text)
    assert is_twin(healed, trained(made(kind), nobody, before=mended))
    scopes[0].close()

    def at_once(model: Any, step: int) -> None:
        model.armed = True

    again = trained(made(kind), healing(run_folder, scopes), before=at_once)
    assert cures(scopes[1]) == [told]
    assert again["scaler"]["scale"] == SCALE


def hopeless(step: int, given: Pair) -> Pair:
    x, y = given
    return (x * torch.nan, y) if step >= BAD_STEP else given


@pytest.mark.parametrize("scaled", [True, False])
def test_steps_that_nothing_helps_are_left_out_to_the_end(
    run_folder: Path, scopes: list[ampscope.Scope], monkeypatch: pytest.MonkeyPatch, scaled: bool
) -> None:
    monkeypatch.setattr(budgets, "ALWAYS_REPLAYED", 2)
    monkeypatch.setattr(budgets.ReplayBudget, "_within_share", never)
    steps = BAD_STEP + 8
    healed = trained(
        made(Layers), healing(run_folder, scopes), batch=hopeless, before=nobody, steps=steps, scaled=scaled
    )
    assert [each["kind"] for each in cures(scopes[0])] == [CureKind.LEFT_OUT] * 8
    stands = "4 steps in a row were left out: weights and loss scale are kept, but the training stands still"
    assert notes(run_folder) == [stands]
    before = trained(made(Layers), nobody, before=nobody, steps=BAD_STEP, scaled=scaled)
    assert exact_state(healed["model"]) == exact_state(before["model"])
    assert not scaled or healed["scaler"]["scale"] == SCALE  # as it is saved: no step has followed the last
