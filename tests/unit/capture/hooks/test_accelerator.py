"""What a loop calls to run a model: the outermost wrapper around it, where there is one."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ampscope.capture.hooks.amp_objects import as_called, is_accelerator, prepared


def compiled(model: nn.Module) -> nn.Module:
    made: Any = torch.compile(model, backend="eager")
    assert isinstance(made, nn.Module)
    return made


def test_a_model_without_a_wrapper_is_called_itself() -> None:
    compiled(nn.Linear(1, 1))  # dynamo is there, and this model has nothing to do with it
    model = nn.Linear(1, 1)
    assert as_called(model) is model


def test_the_outermost_wrapper_is_called() -> None:
    model = nn.Linear(1, 1)
    inner = nn.DataParallel(model)
    outer = compiled(inner)
    assert as_called(model) is outer
    assert as_called(inner) is outer
    assert as_called(outer) is outer


def test_which_of_two_wrappers_is_called_nobody_knows() -> None:
    model = nn.Linear(1, 1)
    two = [compiled(model), nn.DataParallel(model)]
    assert as_called(model) is model
    del two[1]
    gc.collect()
    assert as_called(model) is two[0]


def test_a_model_is_watched_once_in_whatever_form_it_was_prepared() -> None:
    model = nn.Linear(1, 1)
    outer = compiled(model)
    accelerator = SimpleNamespace(_models=[model, outer], scaler=None)
    assert prepared(accelerator).models == [outer]


def test_an_accelerator_is_known_by_its_class() -> None:
    class Accelerator:
        pass

    assert not is_accelerator(Accelerator())
    assert not is_accelerator(nn.Linear(1, 1))
    Accelerator.__module__, Accelerator.__qualname__ = "accelerate.accelerator", "Accelerator"
    assert is_accelerator(type("Own", (Accelerator,), {})())
