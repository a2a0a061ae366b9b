"""One call of the loop's own loss code in another form, in the live training: as by hand, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import ampscope
from ampscope.capture.changes.replaced_calls import Replacing
from ampscope.capture.torch_support.torch_private import function_modes
from ampscope.trace.schema import LOSS_CODE, CureKind, EventKind, Table
from tests.support.training.small_loop import WIDTH, make_batch
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures
from tests.unit.capture.heal.trained import BAD_STEP, SCALE

pytestmark = pytest.mark.usefixtures("strict_guards")

#: Of a model's outputs, and whether the fault is there.
Loss = Callable[[Tensor, bool], Tensor]
STEPS = 8


def logarithm(out: Tensor, bad: bool, bound: float | None = None) -> Tensor:
    """Adds the logarithm of a sum that is zero."""
    total = out.float().abs().sum(-1)
    total = total * 0.0 if bad else total
    total = total if bound is None else total.clamp(min=bound)
    return out.float().square().mean() + 1e-3 * torch.log(total).mean()


def by_hand(out: Tensor, bad: bool) -> Tensor:
    return logarithm(out, bad, 1e-37 if bad else None)


def certain(out: Tensor, bad: bool) -> Tensor:
    """A cross entropy by hand, of a model that is so sure of another class that the wanted one is impossible."""
    return -_sure(out, bad).softmax(-1)[:, 0].log().mean()


def certain_by_hand(out: Tensor, bad: bool) -> Tensor:
    return -_sure(out, bad).log_softmax(-1)[:, 0].mean()


def _sure(out: Tensor, bad: bool) -> Tensor:
    return out.float() + (200.0 if bad else 0.0) * torch.eye(WIDTH)[1]


def in_checkpoint(out: Tensor, bad: bool) -> Tensor:
    return checkpoint(logarithm, out, bad, use_reentrant=False)


def always(step: int) -> bool:
    return step >= BAD_STEP


def once(step: int) -> bool:
    return step == BAD_STEP


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
    """Nobody watches."""


def trained(
    watch: Callable[..., None],
    loss_of: Loss,
    is_bad: Callable[[int], bool] = always,
    *,
    steps: int = STEPS,
    after: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    watch(model, scaler)
    losses = []
    for step in range(steps):
        x, _ = make_batch()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model(x), is_bad(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        after(step)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    return {**state, "losses": losses}


@pytest.mark.parametrize(
    ("loss", "mended", "told"),
    [
        (logarithm, by_hand, "the operand of log kept at least 1e-37 at "),
        (certain, certain_by_hand, "log_softmax instead of the logarithm at "),
    ],
)
def test_as_by_hand(run_folder: Path, scopes: list[ampscope.Scope], loss: Loss, mended: Loss, told: str) -> None:
    healed = trained(healing(run_folder, scopes), loss)
    (cure,) = cures(scopes[0])
    assert (cure["kind"], cure["modules"], cure["applied"]) == (CureKind.FORM, [LOSS_CODE], True)
    assert cure["text"].startswith(told)
    twin = trained(nobody, mended)
    assert [exact_state(healed[part]) for part in ("model", "optimizer", "scaler")] == [
        exact_state(twin[part]) for part in ("model", "optimizer", "scaler")
    ]
    assert healed["losses"][BAD_STEP + 1 :] == twin["losses"][BAD_STEP + 1 :]


def test_a_healthy_training_is_left_alone(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    def never(_: int) -> bool:
        return False

    assert exact_state(trained(healing(run_folder, scopes), logarithm, never)) == exact_state(
        trained(nobody, logarithm, never)
    )
    assert cures(scopes[0]) == []


@pytest.mark.parametrize("loss", [logarithm, certain])
def test_it_is_there_again_in_a_resumed_run(run_folder: Path, scopes: list[ampscope.Scope], loss: Loss) -> None:
    trained(healing(run_folder, scopes), loss)
    told = cures(scopes[0])
    healed = trained(healing(run_folder, scopes), loss, lambda _: True)
    assert all(torch.isfinite(torch.tensor(healed["losses"])))
    assert cures(scopes[1]) == told


def test_it_is_lifted_where_it_is_not_needed(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    trained(healing(run_folder, scopes, quiet_steps=2), logarithm, once, steps=16)
    assert [lifted["cure"] for lifted in cures(scopes[0], EventKind.CURE_LIFTED)] == [BAD_STEP]


def test_where_it_is_needed_it_stays(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    healed = trained(healing(run_folder, scopes, quiet_steps=2), logarithm, steps=16)
    assert all(torch.isfinite(torch.tensor(healed["losses"][BAD_STEP + 1 :])))
    assert cures(scopes[0], EventKind.CURE_LIFTED) == []


class Heard(TorchFunctionMode):
    """A mode of the loop's own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_modes_of_the_loop_hear_what_it_calls(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    heard: list[list[str]] = []

    def heard_loss(out: Tensor, bad: bool) -> Tensor:
        with Heard() as mode:
            loss = logarithm(out, bad)
            assert function_modes()[-1] is mode
        heard.append(mode.names)
        return loss

    healed = trained(healing(run_folder, scopes), heard_loss)
    assert torch.isfinite(torch.tensor(healed["losses"][BAD_STEP + 1 :])).all()
    assert heard[BAD_STEP + 1] == heard[BAD_STEP]
    assert "log" in heard[BAD_STEP]


def test_only_the_thread_of_the_loop_within_a_step(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    elsewhere: list[float] = []
    zeros = torch.zeros(2, WIDTH)

    def loss_of(out: Tensor, bad: bool) -> Tensor:
        loss = logarithm(out, bad)
        if bad:
            other = threading.Thread(target=lambda: elsewhere.append(float(logarithm(zeros, True))))
            other.start()
            other.join()
        return loss

    def between(step: int) -> None:
        if step > BAD_STEP:
            elsewhere.append(float(logarithm(zeros, True)))
            assert not any(isinstance(mode, Replacing) for mode in function_modes())

    healed = trained(healing(run_folder, scopes), loss_of, after=between)
    assert torch.isfinite(torch.tensor(healed["losses"][BAD_STEP + 1 :])).all()
    assert torch.isneginf(torch.tensor(elsewhere)).all()
    scopes[0].close()
    assert function_modes() == []


def test_an_exception_of_the_loss_code_leaves_nothing(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    def loss_of(out: Tensor, bad: bool) -> Tensor:
        with pytest.raises(RuntimeError):
            torch.log(out.reshape(-1, 7))
        return logarithm(out, bad)

    healed = trained(healing(run_folder, scopes), loss_of)
    assert torch.isfinite(torch.tensor(healed["losses"][BAD_STEP + 1 :])).all()
    assert [cure["kind"] for cure in cures(scopes[0])] == [CureKind.FORM]


def test_a_call_within_a_checkpoint_is_left_alone(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    trained(healing(run_folder, scopes), in_checkpoint)
    assert {cure["kind"] for cure in cures(scopes[0])} <= {CureKind.FORM, CureKind.LEFT_OUT}
    assert len(cures(scopes[0], EventKind.CURE_LIFTED)) == sum(
        cure["kind"] == CureKind.FORM for cure in cures(scopes[0])
    )


def test_compiled_parts_are_not_compiled_again(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    compiled = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph

    @torch.compile(backend=backend)
    def root(x: Tensor) -> Tensor:
        return x.square().mean()

    counts: list[int] = []

    def loss_of(out: Tensor, bad: bool) -> Tensor:
        with torch.no_grad():
            root(out.float())
        counts.append(compiled)
        return logarithm(out, bad)

    healed = trained(healing(run_folder, scopes), loss_of)
    assert torch.isfinite(torch.tensor(healed["losses"][BAD_STEP + 1 :])).all()
    assert [cure["kind"] for cure in cures(scopes[0])] == [CureKind.FORM]
    assert counts[BAD_STEP] == counts[-1]


def test_what_is_declined_is_told(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    trained(healing(run_folder, scopes, kinds=["modules_fp32"]), logarithm)
    assert cures(scopes[0]) == []
    notes = [row.text for row in ampscope.open_run(run_folder).rows(Table.EVENTS, kind=EventKind.NOTE)]
    assert any(text.startswith("not healed: ") for text in notes)
