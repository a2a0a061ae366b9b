"""The history of the run's scalers, event by event: what each call changed, and from which line it came."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ampscope.capture.events import JoinedScaler, ScalerCall, ScalerMethod, ScaleState, StepObserver
from ampscope.capture.loop_state.optimizer_numbers import OptimizerNumbers
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.readback import Readback, Values
from ampscope.capture.torch_support.user_line import NOWHERE
from ampscope.trace.schema import ScalerAction

#: Calls before which the scaler's tensors are copied.
_COPIED = (ScalerMethod.STEP, ScalerMethod.UPDATE)
#: What each setter sets.
_SETTINGS = {
    ScalerMethod.SET_GROWTH_FACTOR: "growth_factor",
    ScalerMethod.SET_BACKOFF_FACTOR: "backoff_factor",
    ScalerMethod.SET_GROWTH_INTERVAL: "growth_interval",
}


class ScalerHistory(StepObserver):
    """Writes the events of every scaler.

    Args:
        recorder: Where events go.
        optimizers: Which step it is.
        readback: Brings values from the device.
        guard: Catches faults of the history.
    """

    def __init__(self, recorder: Recorder, optimizers: OptimizerNumbers, readback: Readback, guard: Guard) -> None:
        self.guard = guard
        self._recorder = recorder
        self._optimizers = optimizers
        self._readback = readback

    def scaler_joined(self, joined: JoinedScaler) -> None:
        """The first event: how the scaler was made, and where it stands."""
        initial = torch_private.scaler_initial(joined.scaler) | {"enabled": joined.scaler.is_enabled()}
        scale, count = torch_private.scaler_tensors(joined.scaler)
        now = float(scale) if scale is not None else initial["init_scale"]
        tracker = int(count) if count is not None else torch_private.scaler_first_tracker(joined.scaler)
        self._event(joined, ScalerAction.INIT, after=now, tracker=tracker, detail=initial)

    def scaler_call_began(self, call: ScalerCall) -> None:
        """Copies the scaler's tensors before a call that reads or writes them."""
        if call.method in _COPIED:
            call.state = ScaleState.of(call.scaler)

    def scaler_call_ended(self, call: ScalerCall) -> None:
        """An event for each call that changed something, or that people look for."""
        if call.method is ScalerMethod.UNSCALE and call.by_loop:
            self._event(call, ScalerAction.UNSCALE, optimizer=call.argument)
        elif call.method is ScalerMethod.STEP:
            self._stepped(call)
        elif call.method is ScalerMethod.UPDATE:
            self._updated(call)
        elif call.method is ScalerMethod.STATE_DICT:
            self._event(call, ScalerAction.STATE_SAVED, after=call.result.get("scale"), detail=call.result)
        elif call.method is ScalerMethod.LOAD_STATE_DICT:
            state = dict(call.argument)
            self._event(call, ScalerAction.STATE_LOADED, after=state.get("scale"), detail=state)
        elif call.method in _SETTINGS:
            self._event(call, ScalerAction.SETTER, detail={_SETTINGS[call.method]: call.argument})

    def _stepped(self, call: ScalerCall) -> None:
        attempt = call.attempt
        if attempt is not None and not attempt.stepped and call.state is not None:
            step = attempt.step
            self._event(call, ScalerAction.SKIP, optimizer=call.argument, step=step, before=call.state.scale)

    def _updated(self, call: ScalerCall) -> None:
        """Tells growth from backoff by the values."""
        if call.state is None:
            return
        step = max(self._optimizers.step_of(None) - 1, 0)
        by_hand = call.argument is not None

        def write(values: Values) -> None:
            old, new, count = values["before"], values["after"], values["tracker"]
            if old == new:
                return
            action = ScalerAction.GROWTH if (new or 0.0) > (old or 0.0) else ScalerAction.BACKOFF
            tracker = int(count) if count is not None else None
            self._event(
                call, ScalerAction.UPDATE if by_hand else action, before=old, after=new, tracker=tracker, step=step
            )

        scale, tracker = torch_private.scaler_tensors(call.scaler)
        self._readback.fetch({"before": call.state.scale, "after": _copy(scale), "tracker": _copy(tracker)}, write)

    def _event(
        self,
        call: ScalerCall | JoinedScaler,
        action: ScalerAction,
        *,
        before: Any = None,
        after: float | None = None,
        tracker: int | None = None,
        detail: dict[str, Any] | None = None,
        optimizer: Optimizer | None = None,
        step: int | None = None,
    ) -> None:
        at = self._optimizers.step_of(None) if step is None else step
        index = self._optimizers.index_of(optimizer) if optimizer is not None else None

        def write(values: Values) -> None:
            self._recorder.scaler_event(
                action,
                step=at,
                scaler=call.number,
                optimizer=index,
                before=values["before"],
                after=after,
                tracker=tracker,
                detail=detail,
                place=call.place or NOWHERE,
            )

        self._readback.fetch({"before": before}, write)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | float | None:
    """A snapshot: ``update`` will write into the original. On a device it stays there; no wait."""
    if tensor is None or tensor.device.type == "cpu":
        return float(tensor) if tensor is not None else None
    return tensor.detach().clone()
