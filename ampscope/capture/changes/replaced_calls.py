"""A call of the user's code has another form: in one replay, or in the live loss code and all its replays."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.changes.replay_results import FormUsed
from ampscope.capture.keep_fp32 import in_float32
from ampscope.capture.torch_support import call_state, torch_private, transforms
from ampscope.capture.torch_support.backward_call import RUN_BACKWARD, active_in_engine
from ampscope.capture.torch_support.call_state import random_state_kept
from ampscope.capture.torch_support.function_names import is_in_place
from ampscope.capture.torch_support.user_line import NOWHERE, Place, user_place
from ampscope.cures.call_form import ROUNDING, Call, CallForm, CallPlace, ComparedValues, Lent
from ampscope.trace import schema
from ampscope.trace.vocabulary import TOGETHER

#: What forms compute with.
_LENT = Lent(torch_private.version_counter, in_float32)


def made(form: CallForm, call: Call) -> Any:
    """Makes a call in another form; writes into the tensor that it is to write (``out``), too.

    Where the call writes over its own operand, what code reads may be that operand, which only the same function with
    other arguments writes.

    Returns:
        The result; ``NotImplemented`` where the form does not apply.
    """
    out = call.kwargs.get("out")
    if out is None:
        overwrites = is_in_place(call.function, {}) or call.kwargs.get("inplace") is True
        return NotImplemented if overwrites and not form.same_function else form.instead(call)
    others = {name: value for name, value in call.kwargs.items() if name != "out"}
    result = form.instead(call._replace(kwargs=others))
    if not (isinstance(out, Tensor) and isinstance(result, Tensor) and out.shape == result.shape):
        return NotImplemented
    with torch.no_grad():  # no function differentiates what it writes there
        return out.copy_(result)


class OtherForm(ReplayChange):
    """One call of the user's code in another form, wherever the step makes it.

    Args:
        form: The form.
        at: The line that calls it.
        scale: The loss scale to run with, where that of the step does not fit the form; None for that of the step.
        beside: Another call's form, which only moves the failure to this one.
    """

    kind = schema.Change.FORM

    def __init__(
        self, form: CallForm, at: CallPlace, scale: float | None = None, beside: OtherForm | None = None
    ) -> None:
        super().__init__()
        self.scale = scale
        self.because = TOGETHER if beside is not None else ""
        self._beside = beside
        self._given = form
        self._form = form.for_replay(_LENT)
        self._at = at
        self._compares = True
        self._was_there: tuple[str, Place] | None = None
        self._good_change: float | None = None

    @property
    def used(self) -> FormUsed | None:
        """The form that was put in a call's place, and its effect on good values; None where the call was not made."""
        if self._was_there is None:
            return None
        form, (call, place) = self._form, self._was_there
        return FormUsed(form.form, call, place, form.argument, form.value, form.was, self._given, self._good_change)

    @property
    def called(self) -> tuple[CallPlace, frozenset[str]]:
        """The place of the calls that may be replaced, and their names."""
        return self._at, self._form.calls

    @property
    def milder(self) -> OtherForm | None:
        """The same change with a number that keeps gradients smaller; None if good values leave no room for one."""
        return None if self._given.milder is None else OtherForm(self._given.milder, self._at, beside=self._beside)

    @property
    def changes_good_values(self) -> bool:
        """Whether values that were finite before are others by more than rounding."""
        return (self._good_change or 0.0) > ROUNDING

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        beside = (
            self._beside.active(self._place, self._unseen) if self._beside is not None else contextlib.nullcontext()
        )
        try:
            with beside, self._mode():
                yield
        finally:
            self._form.release()

    def _mode(self) -> TorchFunctionMode:
        return Replacing(self)

    def at_scale(self, scale: float | None) -> OtherForm:
        """A change of its own with the same form, at another loss scale."""
        return OtherForm(self._given, self._at, scale, self._beside)

    def together(self, other: OtherForm) -> OtherForm:
        """A change of its own with the form of another call, too, which is the one that is told."""
        return OtherForm(other._given, other._at, self.scale, self.at_scale(self.scale))

    def to_time(self, *, applied: bool) -> OtherForm:
        """A change of its own that compares nothing; without the form, only what looks for the call is left."""
        beside = self._beside.to_time(applied=applied) if self._beside is not None else None
        timed = OtherForm(self._given, self._at if applied else CallPlace("", -1), self.scale, beside)
        timed._compares = False
        return timed

    def call(self, call: Call) -> Any:
        """Makes a call of the forward, in its other form where that is asked for."""
        form = self._form
        if form.belongs(call):
            return made(form, call)
        named = not form.calls or call.name in form.calls
        if named and self._at.is_at(place := self._place()) and form.fits(call):
            result = made(form, call)
            if result is not NotImplemented:
                self._was_there = self._was_there or (call.name, place)
                spoils = is_in_place(call.function, dict(call.kwargs))  # what it was given is gone when it is done
                if self._compares and not spoils:
                    with self._aside():
                        self._compare(form.compared(call, result))
                return result
        result = call()
        if form.follows(call, self._place):
            with self._aside():
                self._compare(form.saw(call, result))
        return result

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        with self._unseen(), torch.no_grad(), random_state_kept(), call_state.no_autocast_cache():
            yield

    def _compare(self, pairs: Iterable[ComparedValues]) -> None:
        changes = [_change(pair, self._form.good) for pair in pairs]
        known = [each for each in (self._good_change, *changes) if each is not None]
        self._good_change = max(known, default=None)


def relative_change(before: Tensor, after: Tensor) -> float | None:
    """The largest relative change of what was finite before, in units of the dtype's eps; see `FormUsed`."""
    return _change(ComparedValues(before, after), torch.isfinite)


def _change(pair: ComparedValues, good: Callable[[Tensor], Tensor]) -> float | None:
    """The largest relative change of good values, in units of the dtype's eps; None where nothing can be compared.

    Where it is known what the code means, a value that lies as near to that has not changed by more.
    """
    before, after, exact, condition = map(_whole, (pair.before, pair.after, pair.exact, pair.condition))
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.shape != after.shape:
        return None
    if not (before.is_floating_point() or before.is_complex()) or not before.numel():
        return None
    info = torch.finfo(before.dtype)
    least = max(pair.least, info.tiny)
    apart = _apart(after, before, least)
    if isinstance(exact, Tensor) and exact.shape == before.shape:
        apart = torch.minimum(apart, _apart(after, exact, least))
    found = apart[good(_real(before))] / info.eps
    condition = condition.max() if isinstance(condition, Tensor) else condition  # one for each row of a batch
    return float((found / condition).max()) if found.numel() else 0.0


def _whole(value: Any) -> Any:
    """A value, outside of the transforms in which it was calculated."""
    return transforms.whole_batch(value) if isinstance(value, Tensor) else value


def _apart(after: Tensor, before: Tensor, least: float) -> Tensor:
    """How far each number is from what it was, relative to that; infinitely where one of them is NaN."""
    was = _parts(before)
    return ((_parts(after) - was).abs() / was.abs().clamp_min(least)).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _real(tensor: Tensor) -> Tensor:
    """Splits complex numbers into their parts; leaves others as they are."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _parts(tensor: Tensor) -> Tensor:
    """The numbers in float64."""
    return _real(tensor).double()


class Replacing(TorchFunctionMode):
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


class FormInLoss(OtherForm):
    """A call of the loss code in another form, made the same way in the live training and in a replay.

    What autograd's engine runs, or torch.func, is left alone. So is a call within a checkpoint, which the engine would
    make once more as it is written.

    Args:
        form: The form; one that compares nothing while it follows what calls return.
        at: The line that calls it.

    Attributes:
        in_checkpoint: The call was made within one, and was left alone.
    """

    def __init__(self, form: CallForm, at: CallPlace) -> None:
        super().__init__(form, at)
        self._compares = False
        self.in_checkpoint = False

    def again(self) -> FormInLoss:
        """A change of its own with the same form, which has seen nothing."""
        return FormInLoss(self._given, self._at)

    def live(self) -> AbstractContextManager[None]:
        """Makes the call in its other form, for the body: a function of the loop's."""
        self._place = self._live_place
        return self._mode()

    def release(self) -> None:
        """Lets go of what it has kept of a step."""
        self._form.release()

    def _live_place(self) -> Place:
        place = user_place() or NOWHERE
        if not self._at.is_at(place) or not _runs_checkpoint(sys._getframe(1)):
            return place
        self.in_checkpoint = True
        return NOWHERE

    def _mode(self) -> TorchFunctionMode:
        return _ReplacingInLoss(self)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        yield  # it computes nothing where it follows


class _ReplacingInLoss(Replacing):
    """Gives it the calls that a function mode of the live training sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RUN_BACKWARD or torch_private.in_functorch():
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _runs_checkpoint(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


class LossForms:
    """The forms in force; what is added or taken away holds from the next step on.

    Attributes:
        of_step: Those of the step in progress.
    """

    def __init__(self) -> None:
        self._asked: list[FormInLoss] = []
        self.of_step: tuple[FormInLoss, ...] = ()

    @property
    def to_repeat(self) -> tuple[FormInLoss, ...]:
        """The forms that calls of the step really had, which a replay makes again."""
        return tuple(form for form in self.of_step if not form.in_checkpoint)

    def add(self, form: FormInLoss) -> None:
        """Has a call made in another form."""
        self._asked.append(form)

    def remove(self, form: FormInLoss) -> None:
        """Has it made as it is written; safe to call twice."""
        self._asked = [each for each in self._asked if each is not form]

    def step_began(self) -> None:
        """Lets go of what was kept of the step before."""
        if self.of_step:
            self.release()
        self.of_step = tuple(self._asked)

    def release(self) -> None:
        """The loss code has run."""
        for form in self.of_step:
            form.release()

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call of the loss code; where it fails, it is the loop's own that has failed."""
        with contextlib.ExitStack() as modes:
            for form in reversed(self.of_step):  # the first is asked first, as in a replay that tries another beside it
                modes.enter_context(form.live())
            return function(*args, **kwargs)
