"""What a torch function does with its arguments, told by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Functions that change what backward does with their tensor, and return nothing of use.
_ATTACHES = frozenset({"register_hook", "retain_grad"})

#: Functions whose name ends as if they wrote, and that leave every value as it is.
_LEAVES_VALUES = frozenset({"requires_grad_", "detach_", "rename_", "share_memory_", "retain_grad", "register_hook"})

_RANDOM = ("rand", "dropout", "bernoulli", "normal_", "uniform_", "multinomial", "exponential_", "gumbel", "rrelu")


def is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a torch function overwrites its first argument (or ``out=``), judged by torch's naming convention."""
    name = getattr(func, "__name__", "")
    if "out" in kwargs or name in _ATTACHES:
        return True
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (
            name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
        )
    return name.endswith("_")


def writes_values(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a torch function writes numbers into its first argument (or ``out=``), or gives it other memory."""
    name = getattr(func, "__name__", "")
    if name == "__set__":
        return getattr(func, "__self__", None) is torch.Tensor.data
    return name not in _LEAVES_VALUES and is_in_place(func, kwargs)


def attaches(func: Callable[..., Any]) -> bool:
    """Whether a function attaches a hook to its tensor."""
    return getattr(func, "__name__", "") in _ATTACHES


def draws_random_numbers(name: str) -> bool:
    """Whether a torch function of this name draws random numbers."""
    return any(word in name for word in _RANDOM)
