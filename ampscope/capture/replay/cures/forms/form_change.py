"""A replay in which one call of the user's code has another form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.replay.cures.forms.call_form import Call, CallForm
from ampscope.capture.replay.results import FormUsed
from ampscope.capture.torch_support.calls import call_state
from ampscope.capture.torch_support.calls.backward_call import RUN_BACKWARD, active_in_engine
from ampscope.capture.torch_support.calls.random_state import random_state_kept
from ampscope.capture.torch_support.user_line import Place
from ampscope.trace import schema


class CallPlace(NamedTuple):
    """The line at which a call is given another form."""

    file: str
    line: int

    def is_at(self, place: Place) -> bool:
        """Whether a line of the program is this one."""
        return place.line == self.line and place.file == self.file


class OtherForm(ReplayChange):
    """One call of the user's code in another form, wherever the step makes it.

    Args:
        form: The form.
        at: The line that calls it.
    """

    kind = schema.Change.FORM

    def __init__(self, form: CallForm, at: CallPlace) -> None:
        super().__init__()
        self._form = form
        self._at = at
        self._was_there: tuple[str, Place] | None = None
        self._good_change: float | None = None

    @property
    def used(self) -> FormUsed | None:
        """What was put where, and what it did to good values; None where the call was not made."""
        if self._was_there is None:
            return None
        form, (call, place) = self._form, self._was_there
        return FormUsed(form.form, call, place, form.argument, form.value, form.was, self._good_change)

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        with _Replacing(self):
            yield

    def call(self, call: Call) -> Any:
        """Makes a call of the forward, in its other form where that is asked for."""
        if call.name not in self._form.calls or not self._at.is_at(place := self._place()):
            result = call()
            self._form.saw(call, result)
            return result
        self._was_there = self._was_there or (call.name, place)
        result = self._form.instead(call)
        with self._unseen(), torch.no_grad(), random_state_kept(), call_state.no_autocast_cache():
            self._compare(call(), result)
        return result

    def _compare(self, before: Any, after: Any) -> None:
        if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.shape != after.shape:
            return
        if not before.is_floating_point() or not before.numel():
            return
        info = torch.finfo(before.dtype)
        was, now = before.detach().double(), after.detach().double()
        good = was.isfinite()
        apart = ((now - was).abs() / was.abs().clamp_min(info.tiny))[good] / info.eps
        largest = float(apart.max()) if apart.numel() else 0.0
        self._good_change = max(self._good_change or 0.0, largest)


class _Replacing(TorchFunctionMode):
    """Gives calls to the change that may make them otherwise; those of a checkpoint's second forward, too."""

    def __init__(self, change: OtherForm) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in RUN_BACKWARD:
            with active_in_engine(self):
                return func(*args, **kwargs)
        if isinstance(func, OpOverload) or getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **kwargs)
        return self._change.call(Call(func, args, kwargs))
