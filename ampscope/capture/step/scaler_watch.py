"""Passes the calls of one ``GradScaler`` on to the step watch, numbered and with the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampscope.capture.events.calls import JoinedScaler, ScalerCall, ScalerMethod
from ampscope.capture.hooks import scaler_calls
from ampscope.capture.step.step_watch import StepWatch
from ampscope.capture.torch_support.calls.threads import HomeThread
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.user_line import Place, user_place

#: Calls that matter of a scaler that is switched off, too.
_ALWAYS = (
    ScalerMethod.STATE_DICT,
    ScalerMethod.LOAD_STATE_DICT,
    ScalerMethod.SET_GROWTH_FACTOR,
    ScalerMethod.SET_BACKOFF_FACTOR,
    ScalerMethod.SET_GROWTH_INTERVAL,
)
#: Calls so frequent, and so little told of, that their line is not looked for.
_UNPLACED = (ScalerMethod.SCALE, ScalerMethod.GET_SCALE)


class ScalerWatch:
    """One scaler of the run.

    Args:
        scaler: The user's scaler.
        number: Its number within the run.
        steps: The step watch.
        guard: Catches faults of looking for the user's line.
        home: The thread of the loop.
    """

    def __init__(self, scaler: Any, number: int, steps: StepWatch, guard: Guard, home: HomeThread) -> None:
        self.scaler = scaler
        self._number = number
        self._steps = steps
        self._guard = guard
        self._stepping = False
        scaler_calls.join(scaler, self, home)
        steps.scaler_joined(JoinedScaler(scaler, number, self._place()))

    def leave(self) -> None:
        """Leaves the scaler; the last to watch it gives it its own class back."""
        scaler_calls.leave(self.scaler, self)

    def called(self, call: ScalerCall, proceed: Callable[[], Any]) -> Any:
        """See `scaler_calls.ScalerListener`."""
        if (call.method not in _ALWAYS and not self.scaler.is_enabled()) or self._steps.gives_way_to_capture():
            return proceed()
        call.scaler, call.number, call.by_loop = self.scaler, self._number, not self._stepping
        if call.method not in _UNPLACED:
            call.place = self._place()
        if call.method is not ScalerMethod.STEP:
            return self._steps.scaler_call(call, proceed)
        self._stepping = True
        try:
            return self._steps.scaler_step(call, proceed)
        finally:
            self._stepping = False

    def _place(self) -> Place | None:
        try:  # as ``with self._guard``, in fewer calls
            return user_place()
        except BaseException as error:
            if not self._guard.catches(error):
                raise
        return None
