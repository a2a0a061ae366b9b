"""Reads what an `accelerate.Accelerator` has prepared, recognising it without importing accelerate."""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple, Protocol

from torch import distributed, nn

from ampscope.capture.torch_support.models import is_wrapper, unwrapped


class Accelerator(Protocol):
    """An `accelerate.Accelerator`, as far as capture asks it."""

    scaler: Any  #: its ``GradScaler``; None without fp16


class Prepared(NamedTuple):
    """The models and the scaler that an accelerator trains with."""

    models: list[nn.Module]  #: as the loop calls them
    scaler: Any | None


def is_accelerator(thing: object) -> bool:
    """Whether ``thing`` is an `accelerate.Accelerator`."""
    kinds = ((kind.__module__, kind.__qualname__) for kind in type(thing).__mro__)
    return ("accelerate.accelerator", "Accelerator") in kinds


def prepared(accelerator: Any) -> Prepared:
    """The models and the scaler of an accelerator; no models where nothing was prepared yet."""
    called = [as_called(model) for model in getattr(accelerator, "_models", ())]
    return Prepared(list({id(model): model for model in called}.values()), accelerator.scaler)


def as_called(model: nn.Module) -> nn.Module:
    """Finds the module by which a loop runs ``model``: a ``DistributedDataParallel`` or compiled module around it.

    A wrapper knows its model and not the other way round, so all modules of the process are asked.

    Args:
        model: The model, perhaps wrapped.

    Returns:
        The outermost wrapper; the model itself where it has none, or more than one that do not lie in each other.
    """
    if not (distributed.is_available() and distributed.is_initialized()) and "torch._dynamo" not in sys.modules:
        return model
    inner = unwrapped(model)
    modules = (
        thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and vars(thing).get("_modules")
    )
    around = [module for module in modules if is_wrapper(module) and unwrapped(module) is inner]
    outermost = [each for each in around if not any(other is not each and _lies_in(each, other) for other in around)]
    return outermost[0] if len(outermost) == 1 else model


def _lies_in(module: nn.Module, wrapper: nn.Module) -> bool:
    return any(module is part for part in wrapper.modules())
