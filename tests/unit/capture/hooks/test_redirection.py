"""A call of a module is let through where it runs something else than the forward the module had."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import ampscope
from ampscope.capture.hooks.module_calls import Redirections


def other(*_: Any) -> None:
    """What a framework puts in the place of forward for one call."""


def wraps_forward(module: nn.Module) -> None:
    @functools.wraps(module.forward)
    def decorated(*args: Any) -> Any:
        return module.forward(*args)

    vars(module)["forward"] = decorated


def replaces_forward(module: nn.Module) -> None:
    vars(module)["forward"] = other


def puts_forward_back(module: nn.Module) -> None:
    original, vars(module)["forward"] = module.forward, other
    vars(module)["forward"] = original


@pytest.mark.parametrize(
    ("change", "redirected"),
    [
        (lambda module: None, False),
        (replaces_forward, True),
        (puts_forward_back, False),
        (wraps_forward, False),
        (lambda module: ampscope.keep_fp32(module, [""]), False),
    ],
    ids=["untouched", "replaced", "put back", "decorated", "kept in float32"],
)
def test_after(change: Callable[[nn.Module], Any], redirected: bool) -> None:
    module = nn.Linear(2, 2)
    redirections = Redirections([module])
    change(module)
    assert redirections.is_redirected(module) is redirected


def test_a_forward_that_was_another_when_watching_began_is_the_models_own() -> None:
    module = nn.Linear(2, 2)
    replaces_forward(module)
    assert not Redirections([module]).is_redirected(module)


def test_a_forward_that_stays_becomes_the_models_own() -> None:
    module = nn.Linear(2, 2)
    redirections = Redirections([module])
    replaces_forward(module)
    assert [redirections.is_redirected(module) for _ in range(3)] == [True, False, False]


def test_a_forward_that_is_another_at_each_call_stays_a_redirection() -> None:
    module = nn.Linear(2, 2)
    redirections = Redirections([module])
    for _ in range(3):
        vars(module)["forward"] = lambda *_: None
        assert redirections.is_redirected(module)


def test_a_wrapper_and_what_it_wraps_are_asked_within_one_call() -> None:
    module = nn.Linear(2, 2)
    wrapper = nn.DataParallel(module)
    redirections = Redirections([module])
    replaces_forward(module)
    assert [redirections.is_redirected(asked) for asked in (wrapper, module)] == [True, True]
    assert [redirections.is_redirected(asked) for asked in (wrapper, module)] == [False, False]
