"""Whose line is told: the innermost that is the user's, or a model's, and not that of the loop's framework."""

from __future__ import annotations

import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ampscope.capture.torch_support.user_line import Place, user_place


def in_module(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """A function of a module with this name, which calls ``call``."""
    module = types.ModuleType(name)
    source = f"def runs(): return call()  # {name}"
    vars(module).update(call=call)
    exec(compile(source, f"/installed/{name.replace('.', '/')}.py", "exec"), vars(module))  # noqa: S102
    runs: Callable[[], Any] = vars(module)["runs"]
    return runs


def told(*modules: str) -> str:
    """The function and file that are told of a call through ``modules``, the outermost first."""
    call: Callable[[], Place | None] = user_place
    for name in reversed(modules):
        call = in_module(name, call)
    place = call()
    assert place is not None
    return place.file if "/installed/" in place.file else place.function


@pytest.mark.parametrize(
    "framework",
    ["accelerate.utils.operations", "lightning.pytorch.loops.fit_loop", "lightning_fabric", "transformers.trainer"],
)
def test_a_framework_that_runs_the_loop_is_passed_over(framework: str) -> None:
    assert told(framework) == "told"


@pytest.mark.parametrize(
    "code",
    ["transformers.models.gpt2.modeling_gpt2", "transformers.loss.loss_utils", "transformers.trainer_pt_utils", "mine"],
)
def test_models_and_losses_of_a_library_are_told(code: str) -> None:
    assert told("transformers.trainer", code, "accelerate.accelerator") == f"/installed/{code.replace('.', '/')}.py"


def test_a_name_that_only_begins_alike_is_the_users() -> None:
    assert told("accelerated.model") == "/installed/accelerated/model.py"


def test_a_framework_that_nobody_called_is_told_itself() -> None:
    with ThreadPoolExecutor(1) as alone:  # a thread's first frame is the standard library's
        place = alone.submit(in_module("accelerate.accelerator", user_place)).result()
    assert place is not None
    assert place.file == "/installed/accelerate/accelerator.py"
