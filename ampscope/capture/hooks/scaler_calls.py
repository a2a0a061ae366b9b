"""The instrumented form of a ``GradScaler``, and the scopes that hear of what it does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support import instrumented


class Watch(Protocol):
    """One scope's view of a scaler; see `ampscope.capture.step.scaler_watch.ScalerWatch`."""

    def scaled(self, losses: Any) -> None:
        """Losses are about to be scaled."""

    def has_scaled(self, losses: Any, results: Any) -> None:
        """Losses have been scaled."""

    def asked(self, scale: float) -> None:
        """The loop asked for the scale."""

    def before_unscale(self, optimizer: Optimizer) -> None:
        """Gradients are about to be unscaled."""

    def after_unscale(self, optimizer: Optimizer) -> None:
        """Gradients were unscaled."""

    def step(self, optimizer: Optimizer, proceed: Callable[[], Any]) -> Any:
        """Runs a step."""

    def before_update(self, *, by_hand: bool) -> dict[str, Any]:
        """The scale is about to be updated; what is returned comes back afterwards."""

    def after_update(self, before: dict[str, Any], *, by_hand: bool) -> None:
        """The scale was updated."""

    def saved(self, state: dict[str, Any]) -> None:
        """The state was taken."""

    def loaded(self, state: dict[str, Any]) -> None:
        """A state was loaded."""

    def set(self, **setting: float) -> None:
        """A setting was changed."""


class Audience:
    """The scopes that watch one scaler: usually one; several when several models are watched apart."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []

    def scaled(self, losses: Any) -> list[Watch]:
        """Tells of losses about to be scaled; returns who was told."""
        present = list(self.watches)
        for watch in present:
            watch.scaled(losses)
        return present

    def step(self, optimizer: Optimizer, proceed: Callable[[], Any]) -> Any:
        """Runs a step, each scope around the next."""
        for watch in self.watches:
            proceed = partial(watch.step, optimizer, proceed)
        return proceed()


def join(scaler: Any, watch: Watch) -> None:
    """Tells ``watch`` what ``scaler`` does from now on."""
    if not instrumented.is_coated(scaler):
        instrumented.put_on(scaler, WatchedScaler, Audience())
    scaler.ampscope_owner.watches.append(watch)


def leave(scaler: Any, watch: Watch) -> None:
    """Ends that; the last to leave gives the scaler its own class back."""
    if instrumented.is_coated(scaler):
        watches = scaler.ampscope_owner.watches
        if watch in watches:
            watches.remove(watch)
        if not watches:
            instrumented.take_off(scaler)


class WatchedScaler(instrumented.Coat):
    """Behaviour of a scaler that a scope watches: every call does what it did, and is noted."""

    ampscope_owner: Audience

    def scale(self, outputs: Any) -> Any:
        """Scales the outputs; the unscaled losses are noted."""
        present = self.ampscope_owner.scaled(outputs)
        results = super().scale(outputs)  # type: ignore[misc]  # the scaler's class comes next in the order
        for watch in present:
            watch.has_scaled(outputs, results)
        return results

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscales the gradients; a place where usage is checked."""
        for watch in self.ampscope_owner.watches:
            watch.before_unscale(optimizer)
        super().unscale_(optimizer)  # type: ignore[misc]
        for watch in self.ampscope_owner.watches:
            watch.after_unscale(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps or skips; the step is judged here."""
        forward = super().step  # type: ignore[misc]
        return self.ampscope_owner.step(optimizer, lambda: forward(optimizer, *args, **kwargs))

    def update(self, new_scale: Any = None) -> None:
        """Updates the scale; growth and backoff are noted."""
        by_hand = new_scale is not None
        before = [(watch, watch.before_update(by_hand=by_hand)) for watch in self.ampscope_owner.watches]
        super().update(new_scale)  # type: ignore[misc]
        for watch, values in before:
            watch.after_update(values, by_hand=by_hand)

    def get_scale(self) -> float:
        """Gives the scale; the loop may go on to calculate with it."""
        scale: float = super().get_scale()  # type: ignore[misc]
        for watch in self.ampscope_owner.watches:
            watch.asked(scale)
        return scale

    def state_dict(self) -> dict[str, Any]:
        """Gives the state; noted."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        for watch in self.ampscope_owner.watches:
            watch.saved(state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; noted."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        for watch in self.ampscope_owner.watches:
            watch.loaded(state_dict)

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the factor; noted."""
        super().set_growth_factor(new_factor)  # type: ignore[misc]
        for watch in self.ampscope_owner.watches:
            watch.set(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the factor; noted."""
        super().set_backoff_factor(new_factor)  # type: ignore[misc]
        for watch in self.ampscope_owner.watches:
            watch.set(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the interval; noted."""
        super().set_growth_interval(new_interval)  # type: ignore[misc]
        for watch in self.ampscope_owner.watches:
            watch.set(growth_interval=new_interval)
