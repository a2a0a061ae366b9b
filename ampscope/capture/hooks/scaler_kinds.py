"""Recognises which loss scalers can be watched, by what they do: torch's own, what holds one, and those of others."""

from __future__ import annotations

from typing import Any

import torch

from ampscope.capture.torch_support.optimizer_view import is_optimizer

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
