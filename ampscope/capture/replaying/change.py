"""What a counterfactual replay does otherwise than the real step: the changes whose effect is tried."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampscope.capture import ambient, torch_private
from ampscope.capture.fp32 import in_float32
from ampscope.capture.models import Models
from ampscope.trace import schema
from ampscope.trace.schema import LOSS_CODE

HALF = frozenset({torch.float16, torch.bfloat16})


class Change:
    """Nothing is changed: the faithful replay, and the base of every change."""

    kind = schema.Change.NONE
    modules: tuple[str, ...] = ()  #: that run in float32
    scale: float | None = None  #: the loss scale to run with; None for that of the step

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes the change, for the body."""
        yield

    def leaf(self, tensor: Tensor) -> Tensor:
        """A parameter, buffer or operand from outside as the replay reads it."""
        return tensor

    def function(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A torch function of the loss code as the replay calls it."""
        return call

    def dress(self, models: Models) -> None:
        """Changes modules; their attributes are twins at this time, and go with the replay."""


class AllIn(Change):
    """Every half-precision computation in another dtype: autocast, explicit conversions, half parameters and inputs.

    Args:
        dtype: ``torch.float32`` in place of both half dtypes, or ``torch.bfloat16`` in place of ``torch.float16``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.kind = schema.Change.FP32 if dtype is torch.float32 else schema.Change.BF16
        self._instead = dict.fromkeys(HALF - {dtype}, dtype)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """See `Change.active`."""
        with _autocast_in(self._instead), _Conversions(self._instead):
            yield

    def leaf(self, tensor: Tensor) -> Tensor:
        """See `Change.leaf`."""
        return tensor.to(self._instead.get(tensor.dtype, tensor.dtype))


class ModulesIn32(Change):
    """Some modules in float32 inside their autocast region, as `ampscope.keep_fp32` runs them.

    Args:
        modules: Qualified names; `LOSS_CODE` for the functions outside every watched module.
    """

    kind = schema.Change.MODULES_FP32

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules

    def function(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """See `Change.function`."""
        return in_float32(call) if LOSS_CODE in self.modules else call

    def dress(self, models: Models) -> None:
        """See `Change.dress`."""
        for module in models.modules:
            if models.names[id(module)] in self.modules:
                module.__dict__["forward"] = in_float32(module.forward)


class Scale(Change):
    """Another loss scale.

    Args:
        scale: The scale to run with.
    """

    kind = schema.Change.SCALE

    def __init__(self, scale: float) -> None:
        self.scale = scale


class _Conversions(TorchFunctionMode):
    """Gives every call that names a half dtype another one in its place.

    Args:
        instead: The dtypes to replace.
    """

    def __init__(self, instead: dict[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        self._instead = instead
        self._methods = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._methods:
            return args[0].to(self._other(self._methods[func]), **kwargs)
        if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
            args = tuple(self._other(value) for value in args)
            kwargs = {name: self._other(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _other(self, value: Any) -> Any:
        return self._instead.get(value, value) if isinstance(value, torch.dtype) else value


@contextlib.contextmanager
def _autocast_in(instead: dict[torch.dtype, torch.dtype]) -> Iterator[None]:
    """Every autocast region entered in the body computes in another dtype; float32 switches it off.

    ``torch.autocast`` sets its state through two functions of the torch module, whoever enters it: the loop, a
    module's own forward, a checkpoint's recomputation. Other threads of the process keep what they ask for.
    """
    enable, set_dtype, thread = torch.set_autocast_enabled, torch.set_autocast_dtype, threading.get_ident()
    kept = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ambient.device_types()]
    off = torch.float32 in instead.values()

    def is_replay() -> bool:
        return threading.get_ident() == thread or torch_private.current_backward_node() is not None

    def set_other_dtype(device_type: str, dtype: torch.dtype) -> None:
        other = dtype if off or not is_replay() else instead.get(dtype, dtype)
        set_dtype(device_type, other)

    def enable_or_not(device_type: str, enabled: bool) -> None:
        enable(device_type, enabled and not (off and is_replay()))

    torch.set_autocast_enabled, torch.set_autocast_dtype = enable_or_not, set_other_dtype  # type: ignore[assignment]
    try:
        for kind, _, _ in kept:
            enable(kind, False)
        yield
    finally:
        torch.set_autocast_enabled, torch.set_autocast_dtype = enable, set_dtype
        for kind, enabled, dtype in kept:
            enable(kind, enabled)
            set_dtype(kind, dtype)
