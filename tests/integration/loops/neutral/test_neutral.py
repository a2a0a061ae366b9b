"""Watching must not change training by a single bit: losses, weights, buffers, optimizer, scaler, random streams.

Each loop skips a few steps on its way, so that incidents are recorded and replayed while it trains.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ampscope
from ampscope.trace.schema import Table
from tests.integration.loops import plain
from tests.integration.loops.trained import Trained, Watch, differences, exact_state

Loop = Callable[[Watch | None], Trained]


def _plain() -> Loop:
    return plain.train


def _relation() -> Loop:
    pytest.importorskip("transformers")
    from tests.integration.loops import relation

    return partial(relation.train, init_scale=2.0**24)


def _digits() -> Loop:
    pytest.importorskip("sklearn")
    from tests.integration.loops import digits

    return partial(digits.train, epochs=2, samples=256)


LOOPS: dict[str, Callable[[], Loop]] = {"plain": _plain, "relation": _relation, "digits": _digits}


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> Loop:
    return LOOPS[request.param]()


def _watched_state(loop: Loop, folder: Path, **options: Any) -> dict[str, bytes]:
    """Train watched; what is compared is read while the scope is still open, as the user would."""
    scopes: list[ampscope.Scope] = []
    try:
        run = loop(lambda model, scaler: scopes.append(ampscope.watch(model, scaler, dir=folder, **options)))
        return exact_state(run)
    finally:
        for scope in scopes:
            scope.close()


def test_an_unwatched_loop_repeats_itself(loop: Loop) -> None:
    first, second = loop(None), loop(None)
    assert first.skipped, "a loop that never skips would not show that replays are neutral"
    assert differences(exact_state(first), exact_state(second)) == []


@pytest.mark.parametrize("options", [{}, {"every": 1}, {"audit_every": 2}], ids=["default", "every=1", "audit_every=2"])
def test_watching_changes_no_bit(loop: Loop, options: dict[str, Any], run_folder: Path) -> None:
    unwatched = loop(None)
    expected = exact_state(unwatched)
    assert differences(_watched_state(loop, run_folder, **options), expected) == []
    record = ampscope.open_run(run_folder)
    assert len(record.rows(Table.STEPS)) == len(unwatched.losses)
    assert {row.step for row in record.rows(Table.INCIDENTS)} & set(unwatched.skipped)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("options", [{}, {"every": 1}], ids=["default", "every=1"])
def test_watching_the_recipe_changes_no_bit_on_any_device(options: dict[str, Any], run_folder: Path) -> None:
    expected = exact_state(plain.train())
    assert differences(_watched_state(plain.train, run_folder, **options), expected) == []


def test_a_closed_scope_leaves_nothing_behind(loop: Loop, run_folder: Path) -> None:
    scopes: list[ampscope.Scope] = []
    watched = loop(lambda model, scaler: scopes.append(ampscope.watch(model, scaler, dir=run_folder)))
    scopes[0].close()
    state = exact_state(watched)
    unwatched = loop(None)
    assert differences(state, exact_state(unwatched)) == []
    assert _furniture(watched) == _furniture(unwatched)


def _furniture(run: Trained) -> dict[str, Any]:
    """Everything of a model and a scaler that a watch may have dressed up: classes, attributes, hooks."""
    modules = dict(run.model.named_modules())
    return {
        "scaler": (type(run.scaler), sorted(vars(run.scaler))),
        "optimizer": (type(run.optimizer), sorted(vars(run.optimizer))),
        "classes": {name: type(module) for name, module in modules.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "hooks": {
            name: [key for key, value in vars(module).items() if "hook" in key and value]
            for name, module in modules.items()
        },
    }


def _draws_from_torch(model: nn.Module, scaler: Any) -> None:
    model.register_forward_hook(lambda *_: torch.rand(1) and None)


def _draws_from_python(model: nn.Module, scaler: Any) -> None:
    random.random()


def _draws_from_numpy(model: nn.Module, scaler: Any) -> None:
    np.random.rand()


def _nudges_a_weight(model: nn.Module, scaler: Any) -> None:
    weight = next(model.parameters())
    with torch.no_grad():
        weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(1e9))


def _runs_the_model_once_more(model: nn.Module, scaler: Any) -> None:
    done: list[bool] = []

    def again(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not done:
            done.append(True)
            state = torch.get_rng_state()
            module(*args, **kwargs)
            torch.set_rng_state(state)

    model.register_forward_pre_hook(again, with_kwargs=True)


def _counts_a_step_too_many(model: nn.Module, scaler: Any) -> None:
    model.register_forward_hook(lambda *_: _add_one(scaler._growth_tracker))


def _add_one(tracker: torch.Tensor | None) -> None:
    if tracker is not None:
        tracker += 1


def _forgets_training_mode(model: nn.Module, scaler: Any) -> None:
    model.register_forward_hook(lambda module, *_: module.eval() and None)


PERTURBATIONS = [
    _draws_from_torch,
    _draws_from_python,
    _draws_from_numpy,
    _nudges_a_weight,
    _runs_the_model_once_more,
    _counts_a_step_too_many,
    _forgets_training_mode,
]


@pytest.mark.parametrize("perturb", PERTURBATIONS, ids=lambda f: f.__name__.strip("_"))
def test_the_comparison_notices_a_watch_that_interferes(perturb: Callable[[nn.Module, Any], None]) -> None:
    assert differences(exact_state(plain.train(perturb)), exact_state(plain.train()))
