"""A change is what a counterfactual replay does otherwise than the real step, to try the effect."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from ampscope.capture.keep_fp32 import in_float32, own_forward
from ampscope.capture.torch_support import call_state, torch_private
from ampscope.capture.torch_support.backward_call import RUN_BACKWARD, active_in_engine
from ampscope.capture.torch_support.function_names import METHODS, dtypes_asked, is_in_place
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.tensor_tree import HALF, inner_tensors, rewrapped, tensors
from ampscope.capture.torch_support.threads import PerThread
from ampscope.capture.torch_support.user_line import NOWHERE, Place
from ampscope.trace import schema
from ampscope.trace.schema import LOSS_CODE


class LiveChange(Protocol):
    """A change by which the live training, and so each replay of its steps, differs from the code as it is written."""

    def again(self) -> ReplayChange:
        """Makes the same change for one replay."""


class ReplayChange:
    """Nothing is changed: the faithful replay, and the base of every change."""

    kind = schema.Change.NONE
    modules: tuple[str, ...] = ()  #: that run in float32
    scale: float | None = None  #: the loss scale to run with; None for that of the step
    weights: Mapping[int, nn.Parameter] = MappingProxyType({})  #: that stand in the place of others, by ``id`` of those
    because: str = ""  #: what else than the failure it is tried for, as a clause
    without: LiveChange | None = None  #: what the live training's loss code does otherwise, and this does not

    def __init__(self) -> None:
        self._converted: dict[Place, None] = {}
        self._place: Callable[[], Place] = lambda: NOWHERE
        self._unseen: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def conversions(self) -> tuple[Place, ...]:
        """The lines of the code that ask for a half dtype by name and were given another, in the order they ran."""
        return tuple(place for place in self._converted if place.file)

    @contextlib.contextmanager
    def active(
        self,
        place: Callable[[], Place],
        unseen: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        in_force: Sequence[LiveChange] = (),
    ) -> Iterator[None]:
        """Makes the change, for the body.

        Args:
            place: Gives the line of the torch function that is being called.
            unseen: Keeps a body of the change's own out of what is observed.
            in_force: What the real step's loss code did otherwise than it is written, the first asked first.
        """
        self._place, self._unseen = place, unseen
        with self._applied(), contextlib.ExitStack() as stack:
            for live in reversed([each for each in in_force if each is not self.without]):
                stack.enter_context(live.again().active(place, unseen))
            yield

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        yield

    def _note_conversion(self) -> None:
        self._converted[self._place()] = None

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the replay reads what comes from outside in ``dtype``."""
        return dtype

    def leaf(self, tensor: Tensor) -> Tensor:
        """A parameter, buffer or operand from outside as the replay reads it."""
        return tensor

    def given(self, original: Tensor, read: Tensor) -> Tensor:
        """An argument of a call that came from outside, as the replay reads it.

        Args:
            original: What the real step read.
            read: What stands for it.
        """
        return read

    def function(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A torch function of the loss code as the replay calls it."""
        return call

    def change_modules(self, models: Models) -> None:
        """Changes modules; their attributes are copies at this time, and go with the replay."""


class EverythingIn(ReplayChange):
    """Every half-precision computation in another dtype: autocast, explicit conversions, half parameters and inputs.

    Args:
        dtype: ``torch.float32`` in place of both half dtypes, or ``torch.bfloat16`` in place of ``torch.float16``; or
            ``torch.float64``, also in place of float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = schema.Change.BF16 if dtype is torch.bfloat16 else schema.Change.FP32
        narrower = HALF | {torch.float32} if dtype is torch.float64 else HALF
        self._instead = dict.fromkeys(narrower - {dtype}, dtype)

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        with _autocast_in(self._instead), Conversions(self._instead, self._note_conversion):
            yield

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See `ReplayChange.dtype`."""
        return self._instead.get(dtype, dtype)

    def leaf(self, tensor: Tensor) -> Tensor:
        """See `ReplayChange.leaf`."""
        dtype = self.dtype(tensor.dtype)
        return rewrapped(tensor, self.leaf, dtype) if inner_tensors(tensor) else tensor.to(dtype)


class ConversionsInFloat32(ReplayChange):
    """Float32 wherever the code asks for a half dtype by name; autocast, parameters and inputs stay as they are."""

    kind = schema.Change.CONVERSIONS

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        with Conversions(dict.fromkeys(HALF, torch.float32), self._note_conversion):
            yield


class ModulesInFloat32(ReplayChange):
    """Some modules in float32 inside their autocast region, as `ampscope.keep_fp32` runs them.

    Args:
        modules: Qualified names; `LOSS_CODE` for the functions outside every watched module.
        conversions: Float32 also wherever the code, in any module, asks for a half dtype by name.
        because: What else than the failure they are tried for, as a clause.
    """

    kind = schema.Change.MODULES_FP32

    def __init__(self, modules: tuple[str, ...], *, conversions: bool = False, because: str = "") -> None:
        super().__init__()
        self.modules = modules
        self.because = because
        self._instead = dict.fromkeys(HALF, torch.float32) if conversions else {}

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        with Conversions(self._instead, self._note_conversion) if self._instead else contextlib.nullcontext():
            yield

    def with_modules(self, more: tuple[str, ...]) -> ModulesInFloat32:
        """A change of its own, of further modules too."""
        return ModulesInFloat32((*self.modules, *more), conversions=bool(self._instead), because=self.because)

    def function(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """See `ReplayChange.function`; what the loss code converts to half, the function after it gets wider."""
        if LOSS_CODE not in self.modules:
            return call
        wider = in_float32(call)

        def call_noted(*args: Any, **kwargs: Any) -> Any:
            if HALF & dtypes_asked(call, args, kwargs):
                self._note_conversion()
            return wider(*args, **kwargs)

        return call_noted

    def change_modules(self, models: Models) -> None:
        """See `ReplayChange.change_modules`."""
        for module in models.modules:
            if models.names[id(module)] in self.modules:
                module.__dict__["forward"] = in_float32(own_forward(module))


class OtherLossScale(ReplayChange):
    """Another loss scale.

    Args:
        scale: The scale to run with.
    """

    kind = schema.Change.SCALE

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale


class Conversions(TorchFunctionMode):
    """Gives every call that names a half dtype another one in its place, inside a backward, too.

    Args:
        instead: The dtypes to replace.
        note: Called for each such call, before it is made.
    """

    def __init__(self, instead: dict[torch.dtype, torch.dtype], note: Callable[[], None]) -> None:
        super().__init__()
        self._instead = instead
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_engine = isinstance(func, OpOverload) and torch_private.current_backward_node() is not None
        if by_engine and torch.float32 not in self._instead:
            return func(*args, **kwargs)
        if func is Tensor.float and torch.float32 in self._instead:
            return args[0].to(self._instead[torch.float32], **kwargs)
        if not by_engine and self._instead.keys() & dtypes_asked(func, args, kwargs):
            self._note()
            if func in METHODS:
                return args[0].to(self._other(METHODS[func]), **kwargs)
            args = tuple(self._other(value) for value in args)
            kwargs = {name: self._other(value) for name, value in kwargs.items()}
        with active_in_engine(self) if func in RUN_BACKWARD else contextlib.nullcontext():
            result = func(*args, **kwargs)
        return self._widened(result, args, kwargs) if torch.float32 in self._instead else result

    def _widened(self, result: Any, *given: Any) -> Any:
        """Widens a result of the default dtype that was made of no other tensor, to the dtype in float32's place."""
        made = type(result) is Tensor and result.dtype is torch.float32 and next(tensors(given), None) is None
        return result.to(self._instead[torch.float32]) if made else result

    def _other(self, value: Any) -> Any:
        return self._instead.get(value, value) if isinstance(value, torch.dtype) else value


_enabling, _choosing = PerThread(torch, "set_autocast_enabled"), PerThread(torch, "set_autocast_dtype")


@contextlib.contextmanager
def _autocast_in(instead: dict[torch.dtype, torch.dtype]) -> Iterator[None]:
    """Every autocast region entered in the body computes in another dtype; one that is not half switches it off.

    ``torch.autocast`` sets its state through two functions of the torch module, whoever enters it: the loop, a
    module's own forward, a checkpoint's recomputation. Other threads of the process keep what they ask for.
    """
    kept = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in call_state.device_types()
    ]
    off = HALF.isdisjoint(instead.values())

    def other_dtype(set_dtype: Callable[..., None]) -> Callable[..., None]:
        return lambda kind, dtype: set_dtype(kind, dtype if off else instead.get(dtype, dtype))

    def enabled_or_not(enable: Callable[..., None]) -> Callable[..., None]:
        return lambda kind, enabled: enable(kind, enabled and not off)

    try:
        for kind, _, _ in kept:
            torch.set_autocast_enabled(kind, False)
        with _enabling.replaced(enabled_or_not), _choosing.replaced(other_dtype):
            yield
    finally:
        for kind, enabled, dtype in kept:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


class Point(NamedTuple):
    """A line, as one module runs it itself."""

    module: str  #: qualified name; empty for the model itself and outside every model
    file: str
    line: int


class PointsInFloat32(ReplayChange):
    """The torch functions called at some points in float32; what other lines and other modules call stays as it was.

    Narrower than `ModulesInFloat32`, where a module holds most of the model: it tells what comes of these functions
    from what half precision rounds elsewhere. Writes in place stay in the dtype of what they write to.

    Args:
        points: The points.
    """

    kind = schema.Change.MODULES_FP32

    def __init__(self, points: frozenset[Point]) -> None:
        super().__init__()
        self._points = points
        self._running: list[str] = []

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        with _SomeInFloat32(self._is_there, self._note_conversion):
            yield

    def change_modules(self, models: Models) -> None:
        """See `ReplayChange.change_modules`; changes no module, and follows which one is running."""
        for module in models.modules:
            module.__dict__["forward"] = self._followed(module.forward, models.names[id(module)])

    def _followed(self, forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._running.append(name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._running.pop()

        return call

    def _is_there(self) -> bool:
        place = self._place()
        return Point(self._running[-1] if self._running else "", place.file, place.line) in self._points


class _SomeInFloat32(TorchFunctionMode):
    """Runs calls in float32, with float32 in place of the half dtypes that they name.

    Args:
        is_one: Whether the call that is being made is one of them.
        note: Called for each that names a half dtype.
    """

    def __init__(self, is_one: Callable[[], bool], note: Callable[[], None]) -> None:
        super().__init__()
        self._is_one = is_one
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in RUN_BACKWARD:
            with active_in_engine(self):  # a checkpoint computes what these functions gave once more
                return func(*args, **kwargs)
        left = isinstance(func, OpOverload) or is_in_place(func, kwargs)
        if left or getattr(func, "__name__", "") in ("__get__", "__set__") or not self._is_one():
            return func(*args, **kwargs)
        with Conversions(dict.fromkeys(HALF, torch.float32), self._note):
            return in_float32(func)(*args, **kwargs)
