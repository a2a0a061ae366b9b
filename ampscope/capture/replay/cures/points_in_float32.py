"""A few functions of a step in float32: what they do to it, apart from what half precision rounds everywhere else."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from ampscope.capture.keep_fp32.keeping import in_float32
from ampscope.capture.replay.changes import Conversions, ReplayChange
from ampscope.capture.torch_support.calls.backward_call import RUN_BACKWARD, active_in_engine
from ampscope.capture.torch_support.calls.function_names import is_in_place
from ampscope.capture.torch_support.dtypes import HALF
from ampscope.capture.torch_support.models import Models
from ampscope.trace import schema


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
