"""The order in which capture's parts hear of a step is the one that was recorded for each loop of the tests.

After a deliberate change, record anew and read the difference:
``pytest tests/integration/step_order -n0 --record-order``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from ampscope.capture import budgets
from tests.integration.loops import deprecated, digits, handwritten_loss, plain, relation
from tests.integration.step_order.seams import in_steps, noted
from tests.support.training import call_orders, small_loop

GOLDEN = Path(__file__).parent / "golden.txt"
Watch = Callable[..., Any]


def small(watch: Watch) -> Any:
    torch.manual_seed(0)
    return small_loop.train(watch, small_loop.mlp())


def small_traced(watch: Watch) -> Any:
    torch.manual_seed(0)
    return small_loop.train(lambda model, scaler: watch(model, scaler, every=1), small_loop.mlp())


def unscaled(watch: Watch) -> None:
    torch.manual_seed(0)
    model = small_loop.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch(model)
    for step in range(small_loop.STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(
                model(small_loop.make_batch()[0]), torch.zeros(small_loop.BATCH, small_loop.WIDTH)
            )
        (loss * 1e38 * (small_loop.GAIN if step == small_loop.POISONED else 1e-38)).backward()
        optimizer.step()


def with_closure(watch: Watch) -> None:
    torch.manual_seed(0)
    model = small_loop.mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    watch(model)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(small_loop.make_batch()[0]).square().mean()
        loss.backward()
        return loss

    for _ in range(small_loop.STEPS):
        optimizer.step(closure)


LOOPS: dict[str, Callable[..., Any]] = {
    "small": small,
    "small traced": small_traced,
    "without a scaler": unscaled,
    "with a closure": with_closure,
    "plain": plain.train,
    "deprecated names": deprecated.train,
    "handwritten loss": handwritten_loss.train,
    "digits": digits.train,
    "relation": relation.train,
    "relation as found": relation.train_as_found,
    **{name.replace("_", " "): loop for name, loop in call_orders.RIGHT.items()},
    **{name.replace("_", " "): loop for name, (loop, _, _) in call_orders.WRONG.items()},
}


def _recorded() -> dict[str, str]:
    """The orders of the golden file, by loop."""
    sections = GOLDEN.read_text("utf-8").split("== ")[1:] if GOLDEN.exists() else []
    return dict(section.split("\n", 1) for section in sections)


def _record(name: str, order: str) -> None:
    orders = _recorded() | {name: order}
    GOLDEN.write_text("".join(f"== {each}\n{orders[each]}" for each in LOOPS if each in orders), "utf-8")


@pytest.mark.filterwarnings("ignore:`torch.cuda.amp:FutureWarning", "ignore:.*CUDA is not available:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:.*different devices")
@pytest.mark.filterwarnings("ignore:torch.cpu.amp:FutureWarning")
@pytest.mark.parametrize("name", LOOPS)
def test_parts_hear_of_a_step_in_this_order(
    name: str, run_folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets.ReplayBudget, "_within_share", lambda *_: True)  # on a busy machine too
    calls: list[str] = []
    scopes: list[ampscope.Scope] = []

    def watch(*args: Any, **options: Any) -> ampscope.Scope:
        folder = run_folder / str(len(scopes))
        scopes.append(ampscope.watch(*args, **{"dir": folder, **options}))
        return scopes[-1]

    torch.manual_seed(0)
    with noted(calls), contextlib.ExitStack() as stack:
        stack.callback(lambda: list(map(ampscope.Scope.close, scopes)))
        with contextlib.suppress(RuntimeError, AssertionError, ValueError):  # torch refuses some mistakes
            LOOPS[name](watch)
    if request.config.getoption("--record-order"):
        _record(name, in_steps(calls))
    assert in_steps(calls) == _recorded()[name]
