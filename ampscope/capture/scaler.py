"""Watches one ``GradScaler``: its history, and the moments at which a step is judged."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ampscope.capture import coat, torch_private
from ampscope.capture.attempt import ScaleState
from ampscope.capture.frames import NOWHERE, Place, user_place
from ampscope.capture.guard import Guard
from ampscope.capture.readback import Values
from ampscope.capture.recorder import Recorder
from ampscope.capture.step import StepWatch
from ampscope.trace.schema import ScalerAction


class WatchedScaler(coat.Coat):
    """Behaviour of a scaler that a scope watches: every call does what it did, and is noted."""

    ampscope_owner: ScalerWatch

    def scale(self, outputs: Any) -> Any:
        """Scales the outputs; the unscaled losses are noted."""
        self.ampscope_owner.scaled(outputs)
        return super().scale(outputs)  # type: ignore[misc]  # the scaler's class comes next in the order

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscales the gradients; a place where usage is checked."""
        self.ampscope_owner.before_unscale(optimizer)
        super().unscale_(optimizer)  # type: ignore[misc]
        self.ampscope_owner.after_unscale(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps or skips; the step is judged here."""
        forward = super().step  # type: ignore[misc]
        return self.ampscope_owner.step(optimizer, lambda: forward(optimizer, *args, **kwargs))

    def update(self, new_scale: Any = None) -> None:
        """Updates the scale; growth and backoff are noted."""
        before = self.ampscope_owner.before_update()
        super().update(new_scale)  # type: ignore[misc]
        self.ampscope_owner.after_update(before, by_hand=new_scale is not None)

    def state_dict(self) -> dict[str, Any]:
        """Gives the state; noted."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        self.ampscope_owner.saved(state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; noted."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self.ampscope_owner.loaded(state_dict)

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor; noted."""
        super().set_growth_factor(new_factor)  # type: ignore[misc]
        self.ampscope_owner.set(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor; noted."""
        super().set_backoff_factor(new_factor)  # type: ignore[misc]
        self.ampscope_owner.set(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the interval; noted."""
        super().set_growth_interval(new_interval)  # type: ignore[misc]
        self.ampscope_owner.set(growth_interval=new_interval)


class ScalerWatch:
    """Notes what happens to one scaler.

    Args:
        scaler: The user's scaler; it gets a coat.
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
        coat.put_on(scaler, WatchedScaler, self)
        initial = torch_private.scaler_initial(scaler) | {"enabled": scaler.is_enabled()}
        with self._guard:
            scale = torch_private.scaler_tensors(scaler)[0]
            now = float(scale) if scale is not None else initial["init_scale"]
            self._event(ScalerAction.INIT, after=now, detail=initial)

    def take_off(self) -> None:
        """Gives the scaler its own class back."""
        coat.take_off(self.scaler)

    def scaled(self, outputs: Any) -> None:
        """A loss is about to be scaled."""
        if self.scaler.is_enabled():
            with self._guard:
                self._steps.scaled(outputs)
                self._steps.usage.scaled_by(self._number)

    def has_scaled(self, results: Any) -> None:
        """A loss was scaled."""
        if self.scaler.is_enabled():
            self._steps.has_scaled(results)

    def before_unscale(self, optimizer: Optimizer) -> None:
        """``unscale_`` is about to run, called by the loop or by ``step``."""
        if self.scaler.is_enabled():
            with self._guard:
                self._steps.before_unscale(self._number, optimizer)

    def after_unscale(self, optimizer: Optimizer) -> None:
        """``unscale_`` has run."""
        if not self.scaler.is_enabled():
            return
        with self._guard:
            self._steps.usage.after_unscale()
            self._steps.unscaled(optimizer)
            if not self._stepping:
                self._event(ScalerAction.UNSCALE, optimizer=self._steps.index_of(optimizer), place=user_place())

    def step(self, optimizer: Optimizer, proceed: Any) -> Any:
        """Runs ``scaler.step``."""
        if not self.scaler.is_enabled() or self._guard.broken:
            return proceed()
        self._steps.end_tape()
        scaling, place = ScaleState(self.scaler, None, None), None
        step, index = self._steps.step_of(optimizer), self._steps.index_of(optimizer)
        with self._guard:
            scaling, place = ScaleState.of(self.scaler), user_place()
        self._stepping = True
        try:
            result, skipped = self._steps.attempt(optimizer, scaling, proceed)
        finally:
            self._stepping = False
        if skipped:
            with self._guard:
                self._event(ScalerAction.SKIP, optimizer=index, place=place, step=step, before=scaling.scale)
        return result

    def before_update(self) -> dict[str, Any]:
        """The scale and growth tracker before ``update``, copied on the device."""
        copies: dict[str, Any] = {}
        if self.scaler.is_enabled():
            with self._guard:
                scale, tracker = torch_private.scaler_tensors(self.scaler)
                copies = {"before": _copy(scale), "tracker_before": _copy(tracker), "place": user_place()}
        return copies

    def after_update(self, before: dict[str, Any], *, by_hand: bool) -> None:
        """``update`` has run: tells growth from backoff by the values."""
        if not before or self._guard.broken:
            return
        with self._guard:
            scale, tracker = torch_private.scaler_tensors(self.scaler)
            place, step = before.pop("place"), max(self._steps.step_of(None) - 1, 0)
            self._steps.usage.updated(place)

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
        at = self._steps.step_of(None) if step is None else step

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
