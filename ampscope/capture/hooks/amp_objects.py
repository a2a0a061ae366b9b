"""A loop's AMP objects are told here: which scalers can be watched, what an accelerator has, and names of our own."""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed, nn

from ampscope.capture.torch_support.models import is_wrapper, unwrapped
from ampscope.capture.torch_support.optimizer_view import is_optimizer


class autocast(torch.autocast):  # noqa: N801  # named as what it replaces
    """``torch.autocast``, unchanged in what it computes.

    A watched run records the autocast state of every op by itself; this name is for loops that like to say that
    they are instrumented.
    """


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, noticed by every open scope as soon as it scales a loss.

    Args and behaviour are those of ``torch.amp.GradScaler``; `ampscope.watch` gives it (as any other scaler) its
    instrumented form.
    """


_INSTEAD = "leave the scaler out, watch(model), to record the model; steps that this scaler skips leave no row then"


def torch_scaler(thing: Any) -> Any | None:
    """The ``torch.amp.GradScaler`` that ``thing`` is, or that it holds in one of its attributes; None without one.

    Subclasses count (``ShardedGradScaler``), and so do wrappers that only call it (timm's ``NativeScaler``).
    """
    if isinstance(thing, torch.amp.GradScaler):
        return thing
    held = [value for value in getattr(thing, "__dict__", {}).values() if isinstance(value, torch.amp.GradScaler)]
    return held[0] if len(held) == 1 else None


def refusal(thing: Any) -> str:
    """Why ``thing`` is not watched as a scaler, and what to do instead, in one sentence."""
    if is_optimizer(thing):
        return "ampscope.watch got an optimizer where the scaler goes; write watch(model, scaler)"
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    if hasattr(thing, "loss_scale") and callable(getattr(thing, "update_scale", None)):
        return (
            f"{kind} decides inside its engine's optimizer whether a step is skipped, as DeepSpeed's loss scalers do, "
            f"and ampscope.watch cannot follow that; {_INSTEAD}"
        )
    if hasattr(thing, "inv_scale") and callable(getattr(thing, "update", None)):
        return (
            f"{kind} only keeps the scale and its optimizer decides whether a step is skipped, as Megatron's scalers "
            f"do, and ampscope.watch cannot follow that; {_INSTEAD}"
        )
    return f"ampscope.watch understands torch.amp.GradScaler, its subclasses and what holds one, not {kind}; {_INSTEAD}"


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
