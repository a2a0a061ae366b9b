"""Watches one ``GradScaler``: its history, and the moments at which a step is judged."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ampscope.capture.hooks import scaler_calls
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.step.attempt import ScaleState
from ampscope.capture.step.step_watch import StepWatch
from ampscope.capture.torch_support import tensor_tree, torch_private
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.readback import Values
from ampscope.capture.torch_support.user_line import NOWHERE, Place, user_place
from ampscope.trace.schema import ScalerAction


class ScalerWatch:
    """Notes what happens to one scaler.

    Args:
        scaler: The user's scaler.
        number: Its number within the run.
        recorder: Where events go.
        steps: The step watch, which judges attempts.
        guard: Catches faults of the history.
    """

    def __init__(self, scaler: Any, number: int, recorder: Recorder, steps: StepWatch, guard: Guard) -> None:
        self.scaler = scaler
        self._number = number
        self._recorder = recorder
        self._steps = steps
        self._guard = guard
        self._stepping = False
        scaler_calls.join(scaler, self)
        initial = torch_private.scaler_initial(scaler) | {"enabled": scaler.is_enabled()}
        with self._guard:
            scale = torch_private.scaler_tensors(scaler)[0]
            now = float(scale) if scale is not None else initial["init_scale"]
            self._event(ScalerAction.INIT, after=now, detail=initial, place=user_place())
            self._steps.usage.new_scaler(number, fresh=torch_private.scaler_is_fresh(scaler))

    def take_off(self) -> None:
        """Leaves the scaler; the last to watch it gives it its own class back."""
        scaler_calls.leave(self.scaler, self)

    def scaled(self, losses: Any) -> None:
        """A loss is about to be scaled."""
        if self.scaler.is_enabled():
            with self._guard:
                self._steps.scaled(losses)

    def has_scaled(self, losses: Any, results: Any) -> None:
        """``scale`` has returned ``results``."""
        if self.scaler.is_enabled():
            self._steps.has_scaled(results)
            with self._guard:
                scale, inputs = torch_private.scaler_tensors(self.scaler)[0], list(tensor_tree.tensors(losses))
                self._steps.usage.scaled_by(self._number, inputs, results, scale)

    def asked(self, scale: float) -> None:
        """``get_scale`` was called."""
        if self.scaler.is_enabled():
            with self._guard:
                self._steps.usage.scale_read(scale)

    def before_unscale(self, optimizer: Optimizer) -> None:
        """``unscale_`` is about to run, called by the loop or by ``step``."""
        if self.scaler.is_enabled():
            with self._guard:
                self._steps.before_unscale(self._number, optimizer, by_loop=not self._stepping)

    def after_unscale(self, optimizer: Optimizer) -> None:
        """``unscale_`` has run."""
        if not self.scaler.is_enabled():
            return
        with self._guard:
            self._steps.usage.after_unscale(self._number, optimizer)
            self._steps.unscaled(optimizer)
            if not self._stepping:
                self._event(
                    ScalerAction.UNSCALE, optimizer=self._steps.optimizers.index_of(optimizer), place=user_place()
                )

    def step(self, optimizer: Optimizer, proceed: Any) -> Any:
        """Runs ``scaler.step``."""
        if not self.scaler.is_enabled() or self._guard.broken:
            return proceed()
        self._steps.end_tape()
        if self._steps.optimizers.owns(optimizer):
            self._steps.before_scaler_step(self._number, optimizer)
        scaling, place = ScaleState(self.scaler, None, None), None
        step, index = self._steps.optimizers.step_of(optimizer), self._steps.optimizers.index_of(optimizer)
        with self._guard:
            scaling, place = ScaleState.of(self.scaler), user_place()
        self._stepping = True
        try:
            result, skipped = self._steps.attempt(optimizer, scaling, proceed)
        finally:
            self._stepping = False
        self._steps.usage.after_step(self._number, optimizer)
        if skipped:
            with self._guard:
                self._event(ScalerAction.SKIP, optimizer=index, place=place, step=step, before=scaling.scale)
        return result

    def before_update(self, *, by_hand: bool) -> dict[str, Any]:
        """The scale and growth tracker before ``update``, copied on the device."""
        copies: dict[str, Any] = {}
        if self.scaler.is_enabled():
            with self._guard:
                self._steps.usage.before_update(self._number, by_hand=by_hand)
                scale, tracker = torch_private.scaler_tensors(self.scaler)
                copies = {"before": _copy(scale), "tracker_before": _copy(tracker), "place": user_place()}
        return copies

    def after_update(self, before: dict[str, Any], *, by_hand: bool) -> None:
        """``update`` has run: tells growth from backoff by the values."""
        if not before or self._guard.broken:
            return
        with self._guard:
            scale, tracker = torch_private.scaler_tensors(self.scaler)
            place, step = before.pop("place"), max(self._steps.optimizers.step_of(None) - 1, 0)
            self._steps.usage.updated(self._number, place)

            def write(values: Values) -> None:
                old, new = values["before"], values["after"]
                if old == new:
                    return
                action = ScalerAction.GROWTH if (new or 0.0) > (old or 0.0) else ScalerAction.BACKOFF
                if by_hand:
                    action = ScalerAction.UPDATE
                count = values["tracker"]
                self._event(
                    action,
                    before=old,
                    after=new,
                    tracker=int(count) if count is not None else None,
                    place=place,
                    step=step,
                )

            values = {"before": before["before"], "after": _copy(scale), "tracker": _copy(tracker)}
            self._steps.readback.fetch(values, write)

    def saved(self, state: dict[str, Any]) -> None:
        """``state_dict`` was called."""
        with self._guard:
            self._event(ScalerAction.STATE_SAVED, after=state.get("scale"), detail=state, place=user_place())

    def loaded(self, state: dict[str, Any]) -> None:
        """``load_state_dict`` was called."""
        with self._guard:
            self._steps.usage.restored(self._number)
            self._event(ScalerAction.STATE_LOADED, after=state.get("scale"), detail=dict(state), place=user_place())

    def set(self, **setting: float) -> None:
        """A setter was called."""
        with self._guard:
            self._event(ScalerAction.SETTER, detail=dict(setting), place=user_place())

    def _event(
        self,
        action: ScalerAction,
        *,
        before: Any = None,
        after: float | None = None,
        tracker: int | None = None,
        detail: dict[str, Any] | None = None,
        place: Place | None = None,
        optimizer: int | None = None,
        step: int | None = None,
    ) -> None:
        at = self._steps.optimizers.step_of(None) if step is None else step

        def write(values: Values) -> None:
            self._recorder.scaler_event(
                action,
                step=at,
                scaler=self._number,
                optimizer=optimizer,
                before=values["before"],
                after=after,
                tracker=tracker,
                detail=detail,
                place=place or NOWHERE,
            )

        self._steps.readback.fetch({"before": before}, write)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | float | None:
    """A snapshot: ``update`` will write into the original. On a device it stays there; no wait."""
    if tensor is None or tensor.device.type == "cpu":
        return float(tensor) if tensor is not None else None
    return tensor.detach().clone()


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, noticed by every open scope as soon as it scales a loss.

    Args and behaviour are those of ``torch.amp.GradScaler``; `ampscope.watch` gives it (as any other scaler) its
    instrumented form.
    """
