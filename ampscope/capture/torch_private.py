"""Every private name of torch that AMPscope relies on, each in one function; nothing else touches them.

Read against torch 2.10 to 2.15. `missing()` says which are gone, so that a test and a warning can name them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_NEEDED = (
    "_len_torch_function_stack",
    "_get_function_stack_at",
    "_pop_torch_function_stack",
    "_push_on_torch_function_stack",
    "_len_torch_dispatch_stack",
    "_get_dispatch_stack_at",
    "_pop_torch_dispatch_stack",
    "_push_on_torch_dispatch_stack",
    "_current_autograd_node",
)


def missing() -> list[str]:
    """Names that this torch no longer has."""
    gone = [f"torch._C.{name}" for name in _NEEDED if not hasattr(torch._C, name)]
    if not hasattr(torch._C._autograd, "_get_sequence_nr"):
        gone.append("torch._C._autograd._get_sequence_nr")
    return gone


def _restack(current: list[Any], wanted: list[Any], pop: Any, push: Any) -> None:
    for _ in current:
        pop()
    for mode in wanted:
        push(mode)


def function_modes() -> list[Any]:
    """The active torch function modes, bottom first."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def insert_function_mode(mode: TorchFunctionMode) -> None:
    """Puts ``mode`` at the *bottom* of the stack, so that contexts of the user's that end later pop their own mode.

    Only the mode of ``torch.set_default_device`` stays below: torch insists on that.
    """
    stack = function_modes()
    above = 1 if stack and stack[0] is _default_device_mode() else 0
    _restack(
        stack,
        [*stack[:above], mode, *stack[above:]],
        torch._C._pop_torch_function_stack,
        torch._C._push_on_torch_function_stack,
    )


def remove_function_mode(mode: TorchFunctionMode) -> None:
    """Takes ``mode`` off the stack, wherever it is; nothing happens when it is not there."""
    stack = function_modes()
    rest = [other for other in stack if other is not mode]
    if len(rest) != len(stack):
        _restack(stack, rest, torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack)


def dispatch_modes() -> list[Any]:
    """The active dispatch modes, bottom first."""
    return [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]


def _pop_dispatch_mode() -> None:
    torch._C._pop_torch_dispatch_stack(None)


def insert_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Puts ``mode`` at the bottom of the dispatch stack (see `insert_function_mode`)."""
    stack = dispatch_modes()
    _restack(stack, [mode, *stack], _pop_dispatch_mode, torch._C._push_on_torch_dispatch_stack)


def remove_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Takes ``mode`` off the dispatch stack, wherever it is."""
    stack = dispatch_modes()
    rest = [other for other in stack if other is not mode]
    if len(rest) != len(stack):
        _restack(stack, rest, _pop_dispatch_mode, torch._C._push_on_torch_dispatch_stack)


def next_sequence_number() -> int:
    """The number the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def current_backward_node() -> Any | None:
    """The autograd node that is being evaluated, or None outside backward."""
    return torch._C._current_autograd_node()


def node_sequence_number(node: Any) -> int:
    """The number ``node`` got in forward."""
    return int(node._sequence_nr())


def seen_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as one that the topmost function mode sees, but not what it calls.

    So torch runs ``Tensor.backward``; torch 2.10 not ``torch.autograd.backward``, which a replay calls in its place.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_function_stack():
            return function(*args, **kwargs)
        mode = torch._C._pop_torch_function_stack()
        try:
            return mode.__torch_function__(function, (), args, kwargs)
        finally:
            torch._C._push_on_torch_function_stack(mode)

    return call


class OthersAside:
    """Takes the modes of other people off both stacks for AMPscope's own work, so that they do not see it.

    Args:
        ours: Whether a mode is one of AMPscope's; those stay, at the bottom.
    """

    __slots__ = ("_dispatch", "_function", "_ours")

    def __init__(self, ours: Callable[[Any], bool]) -> None:
        self._ours = ours
        self._function: list[Any] = []
        self._dispatch: list[Any] = []

    def __enter__(self) -> None:
        if torch._C._len_torch_function_stack():
            stack = function_modes()
            self._function = [mode for mode in stack if not self._ours(mode)]
            if self._function:
                own = [mode for mode in stack if self._ours(mode)]
                _restack(stack, own, torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack)
        if torch._C._len_torch_dispatch_stack():
            stack = dispatch_modes()
            self._dispatch = [mode for mode in stack if not self._ours(mode)]
            if self._dispatch:
                own = [mode for mode in stack if self._ours(mode)]
                _restack(stack, own, _pop_dispatch_mode, torch._C._push_on_torch_dispatch_stack)

    def __exit__(self, *_: object) -> None:
        if self._function:
            own = function_modes()
            below = 1 if self._function[0] is _default_device_mode() else 0
            wanted = [*self._function[:below], *own, *self._function[below:]]
            _restack(own, wanted, torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack)
        if self._dispatch:
            own = dispatch_modes()
            _restack(own, [*own, *self._dispatch], _pop_dispatch_mode, torch._C._push_on_torch_dispatch_stack)
        self._function, self._dispatch = [], []


def _default_device_mode() -> Any:
    """The mode of ``torch.set_default_device``, which torch wants at the bottom; None without one."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def compiles() -> bool:
    """Whether ``torch.compile`` was used in this process."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(callable(backend) for backend in backends.values())


def in_functorch() -> bool:
    """Whether code runs inside ``vmap``, ``grad`` or another transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` is recording."""
    return torch._C._get_tracing_state() is not None


def forward_kwargs(frame: FrameType) -> dict[str, Any]:
    """Keyword arguments of the module call whose hook was called from ``frame``; hooks on all modules get none."""
    return dict(frame.f_locals.get("kwargs") or {})


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory ``tensor`` lives in; unique only while something refers to that storage."""
    return int(tensor.untyped_storage()._cdata)


def storage_ref(tensor: Tensor) -> StorageWeakRef:
    """A reference that keeps `storage_key` from being given to another storage, without keeping the memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def scaler_tensors(scaler: Any) -> tuple[Tensor | None, Tensor | None]:
    """The loss scale and the growth tracker of a ``GradScaler``: device tensors, None before the first use."""
    return getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)


def scaler_initial(scaler: Any) -> dict[str, Any]:
    """The constructor's arguments of a ``GradScaler`` that matter for its history."""
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    return {name: getattr(scaler, f"_{name}", None) for name in names}


def scaler_is_fresh(scaler: Any) -> bool:
    """Whether a ``GradScaler`` has neither scaled a loss nor, as far as can be seen, been given a saved state."""
    return scaler_tensors(scaler)[0] is None and not getattr(scaler, "_init_growth_tracker", 0)


def scaler_found_inf(scaler: Any, optimizer: Any) -> list[Tensor]:
    """The per-device ``found_inf`` flags that ``scaler`` holds for ``optimizer``."""
    states = getattr(scaler, "_per_optimizer_states", {})
    if id(optimizer) not in states:
        return []
    return list(states[id(optimizer)]["found_inf_per_device"].values())


def steps_on_device(optimizer: Any) -> bool:
    """Whether the optimizer unscales and skips by itself, on the device (``fused=True``)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
