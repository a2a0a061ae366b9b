"""An eps that its dtype makes zero is replaced before a step divides by it, as if it had been written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import ampscope
from ampscope.trace.schema import CureKind, EventKind, Table
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures
from tests.unit.capture.ruined_optimizers import Loop, loop

pytestmark = pytest.mark.usefixtures("strict_guards")
Watch = Callable[..., ampscope.Scope]

TINY = 2.0**-10
ZERO_IN_HALF = {"large": TINY, "at": 0, "dtype": torch.float16}
NONE = {"dead": True}


def adam(eps: float, **options: Any) -> Loop:
    return loop(partial(torch.optim.Adam, lr=1e-3, eps=eps), **options)


def healed(watch: Watch, run: Loop, **options: Any) -> tuple[dict[str, Any], ampscope.Scope]:
    scopes: list[ampscope.Scope] = []
    heal = ampscope.Healing(**options)
    state = run(lambda model: scopes.append(watch(model, heal=heal)))
    scopes[0].close()
    return state, scopes[0]


def nobody(_: Any) -> None:
    """Nobody watches."""


@pytest.mark.parametrize(
    ("options", "was", "eps"), [(ZERO_IN_HALF, 1e-8, 1e-4), (NONE, 0.0, 1e-8)], ids=["zero in float16", "none"]
)
def test_the_eps_that_was_proved_is_there_from_the_step_on(
    watch: Watch, options: dict[str, Any], was: float, eps: float
) -> None:
    state, scope = healed(watch, adam(was, **options))
    (told,) = cures(scope)
    assert (told["kind"], told["step"], told["eps"]) == (CureKind.FORM, 0, [[was, eps]])
    assert told["text"].startswith(f"the eps of Adam {eps:g} instead of {was:g}")
    assert told["code"] == f"torch.optim.Adam(..., eps={eps:g})"
    assert exact_state(state) == exact_state(adam(eps, **options)(nobody))


def test_that_of_a_compiled_model_is_no_compiled_code(watch: Watch) -> None:
    def compiled(model: torch.nn.Module) -> ampscope.Scope:
        model.compile(backend="eager")
        return watch(model, heal=True)

    scopes: list[ampscope.Scope] = []
    adam(0.0, **NONE)(lambda model: scopes.append(compiled(model)))
    scopes[0].close()
    assert [each["eps"] for each in cures(scopes[0])] == [[[0.0, 1e-8]]]


def test_one_that_no_step_needs_stays(watch: Watch) -> None:
    state, scope = healed(watch, adam(0.0))
    assert cures(scope) == []
    assert exact_state(state) == exact_state(adam(0.0)(nobody))


def test_the_loop_has_its_own_again_when_the_run_is_over(watch: Watch) -> None:
    made: list[torch.optim.Optimizer] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(parameters, 1e-3, eps=0.0))
        return made[0]

    healed(watch, loop(make, dead=True))
    assert made[0].param_groups[0]["eps"] == 0.0


def test_the_loop_has_its_own_again_though_it_has_loaded_the_optimizer_meanwhile(watch: Watch) -> None:
    made: list[torch.optim.Optimizer] = []

    def reloading(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(parameters, 1e-3, eps=0.0))
        made[0].register_step_post_hook(reloading)
        return made[0]

    _, scope = healed(watch, loop(make, dead=True))
    assert len(cures(scope)) == 1
    assert made[0].param_groups[0]["eps"] == 0.0


def test_where_forms_are_not_allowed_none_is_changed(watch: Watch) -> None:
    _, scope = healed(watch, adam(0.0, dead=True), kinds=["state"])
    assert cures(scope) == []


class Own(torch.optim.Adam):
    """Keeps what cannot be copied."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 1e-3, eps=0.0)
        self.kept = lambda: None


def test_one_that_cannot_be_tried_on_copies_is_left_and_that_is_told(watch: Watch) -> None:
    _, scope = healed(watch, loop(Own))
    assert cures(scope) == []
    notes = [row.text for row in ampscope.open_run(scope.folder).rows(Table.EVENTS, kind=EventKind.NOTE)]
    told = "not healed: the eps of Own is zero in the dtype of its parameters; it cannot be stepped on copies first"
    assert notes == [told]
