"""Every private name of torch that AMPscope relies on, each in one function; nothing else touches them.

Those of ``torch.compile`` are in `dynamo`. Read against torch 2.10 to 2.15. `missing` says which are gone, so that a
test and a warning can name them.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import _symbolic_trace
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_calls
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.torch_support.sharding import local

_PLAIN = frozenset({Tensor, nn.Parameter})
_STACK = ("_len_torch_{}_stack", "_get_{}_stack_at", "_pop_torch_{}_stack", "_push_on_torch_{}_stack")
FUNCTION_STACK = tuple(name.format("function") for name in _STACK)
DISPATCH_STACK = tuple(name.format("dispatch") for name in _STACK)
MODES_ASIDE = ("_DisableTorchDispatch", "DisableTorchFunction")
_past_dispatch, _past_functions = (getattr(torch._C, name, nullcontext) for name in MODES_ASIDE)
#: Below ``torch._C``. Without one of these, what needs it is left out of the watch; training goes on as it is.
NAMES = (
    *FUNCTION_STACK,
    *DISPATCH_STACK,
    *MODES_ASIDE,
    "_current_autograd_node",
    "_autograd._get_sequence_nr",
    "_functorch.peek_interpreter_stack",
)


def _private(name: str) -> Any | None:
    """Looks up a dotted name in ``torch._C``; None where this torch has no such thing."""
    return functools.reduce(lambda home, part: getattr(home, part, None), name.split("."), cast("Any", torch._C))


def needed(name: str) -> Callable[..., Any]:
    """The function that ``torch._C`` has under a name; one that raises when this torch has no such thing."""
    return _private(name) or operator.attrgetter(f"_C.{name}")


def missing() -> list[str]:
    """Names that this torch no longer has."""
    return [f"torch._C.{name}" for name in NAMES if _private(name) is None]


class ModeStack:
    """One of torch's stacks of modes; without one of its names it looks empty and takes no mode in.

    Args:
        names: Of the functions that tell its length, get, pop and push.
        popped: Arguments of pop.
    """

    def __init__(self, names: tuple[str, ...], *popped: Any) -> None:
        functions: list[Any] = [_private(name) for name in names]
        self.length, self._get, self._pop, self._push = functions
        self._popped = popped
        self._gone = [name for name in names if _private(name) is None]
        if self._gone:
            self.length = int  # always 0

    def modes(self) -> list[Any]:
        """The active modes, bottom first."""
        return [self._get(index) for index in range(self.length())]

    def pop(self) -> Any:
        """Takes the topmost mode off."""
        return self._pop(*self._popped)

    def push(self, mode: Any) -> None:
        """Puts a mode on top.

        Raises:
            RuntimeError: This torch lacks a name that it takes.
        """
        if self._gone:
            raise RuntimeError(f"this torch lacks torch._C.{self._gone[0]}")
        self._push(mode)

    def become(self, wanted: list[Any]) -> None:
        """Replaces all modes; at once, for what comes from outside must not find half of them."""
        if self._gone:
            return
        pops = itertools.repeat(functools.partial(self._pop, *self._popped), self.length())
        pushes = [functools.partial(self._push, mode) for mode in wanted]
        deque(map(operator.call, itertools.chain(pops, pushes)), maxlen=0)  # no signal is looked for within C

    def remove(self, mode: Any) -> None:
        """Takes ``mode`` off, wherever it is; nothing happens when it is not there."""
        top = self.length() - 1
        if top >= 0 and self._get(top) is mode:
            self.pop()
            return
        stack = self.modes()
        rest = [other for other in stack if other is not mode]
        if len(rest) != len(stack):
            self.become(rest)


function_stack = ModeStack(FUNCTION_STACK)
dispatch_stack = ModeStack(DISPATCH_STACK, None)


def function_modes() -> list[Any]:
    """The active torch function modes, bottom first."""
    return function_stack.modes()


def insert_function_mode(mode: TorchFunctionMode) -> None:
    """Puts ``mode`` at the *bottom* of the stack, so that contexts of the user's that end later pop their own mode.

    Only the mode of ``torch.set_default_device`` stays below: torch insists on that.
    """
    if not function_stack.length():
        function_stack.push(mode)
        return
    stack = function_modes()
    above = 1 if stack and stack[0] is default_device_mode() else 0
    function_stack.become([*stack[:above], mode, *stack[above:]])


def remove_function_mode(mode: TorchFunctionMode) -> None:
    """Takes ``mode`` off the stack, wherever it is; nothing happens when it is not there."""
    function_stack.remove(mode)


def insert_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Puts ``mode`` at the bottom of the dispatch stack (see `insert_function_mode`)."""
    dispatch_stack.become([mode, *dispatch_stack.modes()])


def dispatch_modes() -> list[Any]:
    """The active dispatch modes, bottom first."""
    return dispatch_stack.modes()


def push_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Puts ``mode`` on top of the dispatch stack."""
    dispatch_stack.push(mode)


def remove_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Takes ``mode`` off the dispatch stack, wherever it is."""
    dispatch_stack.remove(mode)


def past_modes(tensors: Iterable[Tensor | None] = ()) -> tuple[Any, ...]:
    """Contexts in which ops on these tensors run past all modes, if they are plain; for a few ops that come often."""
    are_plain = _PLAIN.issuperset(map(type, tensors))
    return (_past_dispatch(), _past_functions()) if are_plain else (nullcontext(), nullcontext())


def called_by(overload: Any) -> Any:
    """Gives what a plain op overload calls, and does nothing besides; any other callable as it is."""
    return overload._op if type(overload) is torch._ops.OpOverload else overload


def are_fake(types: Any) -> bool:
    """Whether an op runs on tensors without values, as ``DTensor`` does to find out how its result is sharded."""
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and any(issubclass(each, kind) for each in types)


# These are asked for at every op of a traced step, and are torch's own functions therefore.

#: The number the next autograd node of this thread will get.
next_sequence_number: Callable[[], int] = needed("_autograd._get_sequence_nr")
#: The autograd node that is being evaluated, or None outside backward.
current_backward_node: Callable[[], Any | None] = needed("_current_autograd_node")
#: The number a node got in forward.
node_sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")


def runs_engine() -> Any:
    """The code from which `torch.autograd` starts the engine; None where it has no name."""
    return getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)


def through_topmost_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as a call that goes through the topmost function mode, while what it calls does not.

    So torch runs ``Tensor.backward``; torch 2.10 not ``torch.autograd.backward``, which a replay calls in its place.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not function_stack.length():
            return function(*args, **kwargs)
        mode = function_stack.pop()
        try:
            return mode.__torch_function__(function, (), args, kwargs)
        finally:
            function_stack.push(mode)

    return call


def default_device_mode() -> Any:
    """The mode of ``torch.set_default_device``, which torch wants at the bottom; None without one."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def default_device() -> Any:
    """The device that ``torch.set_default_device`` or a context has chosen, also while its mode is aside; or None."""
    return getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)


#: The transform of torch.func (``vmap``, ``grad``) inside which code runs; None outside.
functorch_level: Callable[[], Any] = _private("_functorch.peek_interpreter_stack") or (lambda: None)
#: What ``torch.jit.trace`` records into; None where it does not. Torch's own module call asks the same way.
tracing_state: Callable[[], Any] = torch._C._get_tracing_state


#: Its flag tells that ``torch.fx`` traces.
symbolic_trace: Any = _symbolic_trace


def in_functorch() -> bool:
    """Whether code runs inside ``vmap``, ``grad`` or another transform of torch.func."""
    return functorch_level() is not None


def is_tracing() -> bool:
    """Whether torch makes a graph of what is called now (Dynamo, export, ``jit.trace``, ``torch.fx``, ``make_fx``).

    Nothing is seen of such calls, and no op of AMPscope's may come between them: it would be part of the graph.
    """
    return torch.compiler.is_compiling() or records_calls()


def records_calls() -> bool:
    """Whether it does so by another way than Dynamo, which asks for itself; the hottest paths ask it spelled out."""
    is_fx: bool = getattr(symbolic_trace, "_is_fx_tracing_flag", False)
    return tracing_state() is not None or graphs.in_the_making > 0 or is_fx


class _Graphs(threading.local):
    """The graphs that torch makes in each thread."""

    in_the_making = 0  #: calls of torch that make one, their own checks of it included


graphs = _Graphs()


def hooks_on_all_modules() -> tuple[dict[int, Any], ...]:
    """The hooks before and after the call of every module, by number."""
    return module_calls._global_forward_pre_hooks, module_calls._global_forward_hooks


def forward_kwargs(frame: FrameType) -> dict[str, Any]:
    """Keyword arguments of the module call whose hook was called from ``frame``; hooks on all modules get none."""
    return dict(frame.f_locals.get("kwargs") or {})


def version_counter(tensor: Tensor) -> int:
    """The counter of in-place changes; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory ``tensor`` lives in on this rank; unique only while something refers to that storage."""
    return int(local(tensor).untyped_storage()._cdata)


def storage_ref(tensor: Tensor) -> StorageWeakRef:
    """A reference that keeps `storage_key` from being given to another storage, without keeping the memory."""
    return StorageWeakRef(local(tensor).untyped_storage())  # type: ignore[no-untyped-call]  # torch leaves it untyped


#: What keeps a storage's key from being given to another, until `HeldStorages` frees it.
weak_ref: Callable[[Any], int] = operator.methodcaller("_weak_ref")


class HeldStorages:
    """Storages whose `storage_key` is kept from being given to another; their memory is not kept.

    What one holds that is gone is let go of when the next is made. A ``__del__`` would swallow what a signal handler of
    the user's raises in it.
    """

    def __init__(self) -> None:
        self.references: dict[int, int] = {}  #: by key, its `weak_ref`
        for key, (owner, left) in list(_holding.items()):
            if owner() is None and _holding.pop(key, None) is not None:
                _free_all(left)
        _holding[id(self.references)] = weakref.ref(self), self.references

    def hold(self, key: int, tensor: Tensor) -> None:
        """Holds the storage that ``tensor`` lives in, which has ``key``."""
        if key not in self.references:
            self.references[key] = weak_ref(local(tensor).untyped_storage())

    def sweep(self) -> list[int]:
        """Lets go of those that are gone; gives their keys."""
        expired = torch.UntypedStorage._expired
        gone = [key for key, reference in self.references.items() if expired(reference)]
        for key in gone:
            torch.UntypedStorage._free_weak_ref(self.references.pop(key))  # type: ignore[no-untyped-call]  # torch's
        return gone

    def release(self) -> None:
        """Lets go of all."""
        _free_all(self.references)


_holding: dict[int, tuple[weakref.ref[HeldStorages], dict[int, Any]]] = {}  # by ``id`` of the references


def _free_all(references: dict[int, Any]) -> None:
    free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
    while references:
        free(references.popitem()[1])


def scaler_tensors(scaler: Any) -> tuple[Tensor | None, Tensor | None]:
    """The loss scale and the growth tracker of a ``GradScaler``: device tensors, None before the first use."""
    return getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)


def scaler_initial(scaler: Any) -> dict[str, Any]:
    """The constructor's arguments of a ``GradScaler`` that matter for its history."""
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    return {name: getattr(scaler, f"_{name}", None) for name in names}


def scaler_first_tracker(scaler: Any) -> int:
    """The count of good steps with which a ``GradScaler`` begins to scale: not 0 where a saved state gave another."""
    return int(getattr(scaler, "_init_growth_tracker", 0))


#: What tells `torch.autocast` and ``GradScaler`` that CUDA is missing.
UNAVAILABLE = "amp_definitely_not_available"


def amp_common() -> Any | None:
    """The module that `UNAVAILABLE` is a function of; None where that is gone."""
    return common if hasattr(common := sys.modules.get("torch.cuda.amp.common"), UNAVAILABLE) else None


def scaler_is_fresh(scaler: Any) -> bool:
    """Whether a ``GradScaler`` has neither scaled a loss nor, as far as can be told, been given a saved state."""
    return scaler_tensors(scaler)[0] is None and not scaler_first_tracker(scaler)


def scaler_found_inf(scaler: Any, optimizer: Any) -> list[Tensor]:
    """The per-device ``found_inf`` flags that ``scaler`` holds for ``optimizer``."""
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    return list(state.get("found_inf_per_device", {}).values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether functions were attached to a parameter that may change its gradient."""
    return any(getattr(parameter, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def steps_on_device(optimizer: Any) -> bool:
    """Whether the optimizer unscales and skips by itself, on the device (``fused=True``)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
