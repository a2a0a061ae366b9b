"""In which order the methods of each scaler are called: torch refuses some orders, others give wrong updates."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.usage.mistake import Mistake
from ampscope.capture.usage.scaled_losses import ScalerNumbers
from ampscope.trace.vocabulary import Cause, MistakeForm


@dataclass(slots=True)
class _SinceUpdate:
    """Holds what happened to one scaler since its last ``update``."""

    unscaled: set[int] = field(default_factory=set)  #: optimizers, by id
    stepped: set[int] = field(default_factory=set)
    backward: bool = False  #: since the last ``unscale_``


class CallOrder:
    """The calls of a run's scalers, each known by its number."""

    def __init__(self) -> None:
        self._since_update: dict[int, _SinceUpdate] = {}
        self._unscaled_at: Place | None = None
        self._updated_at: Place | None = None  # since the last ``unscale_``
        self._updates_since_backward: dict[int, Place | None] = {}

    def new_scaler(self, scaler: int) -> None:
        """The run has got a scaler."""
        self._since_update[scaler] = _SinceUpdate()

    @property
    def has_scaler(self) -> bool:
        """Whether the run has any."""
        return bool(self._since_update)

    @property
    def scalers(self) -> frozenset[int]:
        """The scalers of the run."""
        return frozenset(self._since_update)

    @property
    def gradients_used_at(self) -> Place | None:
        """The line that made ready for a step: the latest ``update``, or ``unscale_`` where none came after it."""
        return self._updated_at or self._unscaled_at

    def backward_began(self) -> None:
        """A backward begins."""
        self._updates_since_backward.clear()
        for calls in self._since_update.values():
            calls.backward = True

    def unscale_begins(self, scaler: int, optimizer: Optimizer) -> Mistake | None:
        """The loop calls ``unscale_``; a second one before ``update`` is a mistake, which torch refuses."""
        calls = self._of(scaler)
        if id(optimizer) in calls.stepped:
            return Mistake.here(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, MistakeForm.UPDATE_MISSING)
        if id(optimizer) not in calls.unscaled:
            return None
        if calls.backward:
            return Mistake.here(Cause.MISUSE_UPDATE_EACH_MICROBATCH, MistakeForm.UNSCALE_EACH_MICROBATCH)
        return Mistake.here(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, MistakeForm.UNSCALE_TWICE)

    def unscaled(self, scaler: int, optimizer: Optimizer, place: Place | None) -> None:
        """``unscale_`` has run, called at ``place``."""
        self._unscaled_at, self._updated_at = place, None
        calls = self._of(scaler)
        calls.unscaled.add(id(optimizer))
        calls.backward = False

    def is_unscaled(self, scaler: int, optimizer: Optimizer) -> bool:
        """Whether the gradients were unscaled since the last ``update``."""
        return id(optimizer) in self._of(scaler).unscaled

    def step_begins(self, scaler: int, optimizer: Optimizer) -> Mistake | None:
        """``scaler.step`` is called; a second one before ``update`` is a mistake, which torch refuses."""
        if id(optimizer) in self._of(scaler).stepped:
            return Mistake.here(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, MistakeForm.UPDATE_MISSING)
        return None

    def stepped(self, scaler: int, optimizer: Optimizer) -> None:
        """``scaler.step`` is over."""
        calls = self._of(scaler)
        calls.stepped.add(id(optimizer))
        calls.unscaled.add(id(optimizer))  # a fused optimizer unscales by itself

    def update_begins(self, scaler: int, *, present: int, latest: int) -> Mistake | None:
        """``update`` is called; one that follows no step is a mistake, which torch refuses.

        Args:
            scaler: The scaler.
            present: Number of the step in progress.
            latest: Number of the latest step that was attempted.
        """
        calls = self._since_update.get(scaler)
        if calls is None or calls.unscaled:
            return None
        if calls.backward:
            found = Mistake.here(Cause.MISUSE_UPDATE_EACH_MICROBATCH, MistakeForm.NOTHING_TO_UPDATE)
            return found._replace(step=present)
        return Mistake.here(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, MistakeForm.NOTHING_TO_UPDATE)._replace(step=latest)

    def updated(self, scaler: int, place: Place | None) -> None:
        """``update`` was called at ``place``."""
        self._since_update[scaler] = _SinceUpdate()
        self._updates_since_backward[scaler] = self._updated_at = place

    def update_in_between(self, scaler: int) -> Mistake | None:
        """An ``update`` between backward and ``unscale_``: the gradients hold the scale from before it."""
        if scaler not in self._updates_since_backward:
            return None
        place = self._updates_since_backward[scaler]
        return Mistake.at(place, Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, MistakeForm.UPDATE_IN_BETWEEN)

    def wrong_scale(self, scaler: int, optimizer: Optimizer, held: ScalerNumbers, *, unscaled: bool) -> Mistake | None:
        """``unscale_`` is about to divide gradients that do not hold the scale of this scaler, as it is now.

        Args:
            scaler: The scaler.
            optimizer: Whose gradients; torch counts by the object what is unscaled.
            held: The scalers that scaled their losses.
            unscaled: Whether some of them are divided already.
        """
        if not held:
            return None
        if unscaled:
            calls = self._of(scaler)
            twice = id(optimizer) not in calls.unscaled and not calls.backward
            at, form = self._unscaled_at, MistakeForm.UNSCALED_FOR_ANOTHER
            return Mistake.at(at, Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, form) if twice else None
        if (updated := self.update_in_between(scaler)) is not None:
            return updated
        if None in held:
            return Mistake.here(Cause.MISUSE_MISSING_SCALER, MistakeForm.LOSS_NOT_SCALED)
        if held != {scaler}:
            return Mistake.here(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, MistakeForm.ANOTHER_SCALER)
        return None

    def _of(self, scaler: int) -> _SinceUpdate:
        known = self._since_update.get(scaler)
        if known is None:
            known = self._since_update[scaler] = _SinceUpdate()
        return known
