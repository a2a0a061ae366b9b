"""Calls of the loss code that have another form in the live training, and so in every replay of its steps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ampscope.capture.replay.cures.forms.call_form import CallForm, CallPlace
from ampscope.capture.replay.cures.forms.form_change import OtherForm, Replacing
from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.calls.backward_call import RUN_BACKWARD
from ampscope.capture.torch_support.user_line import NOWHERE, Place, user_place


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
