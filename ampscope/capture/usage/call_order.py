"""The order of calls is checked: of scalers' methods, of schedulers after a skipped step, of scalers in mid-run."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.usage.gradient_scales import ScalerNumbers
from ampscope.capture.usage.mistake import Mistake
from ampscope.trace.evidence import NO_EVIDENCE, FindingEvidence
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


@dataclass(slots=True)
class _Attempts:
    """The step attempts of one optimizer so far."""

    count: int = 0
    step: int = 0  #: number of the latest
    skipped: bool = False


class SchedulerSteps:
    """How often each scheduler steps, counted in attempts of its optimizer."""

    def __init__(self) -> None:
        self._attempts: dict[int, _Attempts] = {}  # by id of the optimizer
        self._counts: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id of each scheduler, at its latest step

    def attempted(self, optimizer: Optimizer, step: int, *, skipped: bool) -> None:
        """An attempt is over."""
        mine = self._attempts.setdefault(id(optimizer), _Attempts())
        mine.count, mine.step, mine.skipped = mine.count + 1, step, skipped

    def stepped(self, scheduler: Any) -> int | None:
        """A scheduler steps.

        Returns:
            The number of the skipped step that it takes for a step: one that follows every attempt should have waited.
            None where it does right, and for a scheduler of epochs, which steps after many attempts.
        """
        mine = self._attempts.get(id(scheduler.optimizer))
        if mine is None:
            return None
        known = self._counts.get(id(scheduler))
        since = mine.count - (known[1] if known is not None and known[0]() is scheduler else 0)
        self._counts[id(scheduler)] = weakref.ref(scheduler), mine.count
        return mine.step if mine.skipped and since == 1 else None


#: Scalers in a row that served one step each, after which they are taken to be made for each step.
_ANEW = 3


@dataclass(slots=True)
class Handover:
    """A scaler without a past that serves parameters which have one."""

    step: int
    place: Place | None
    evidence: FindingEvidence = NO_EVIDENCE
    cause: Cause = Cause.MISUSE_SCALER_STATE_NOT_RESTORED


@dataclass(slots=True)
class _Scaler:
    fresh: bool
    scale: Tensor | None = None
    served: bool = False
    anew: int = 1  #: scalers in a row up to this one that took over fresh, each after a single step
    step: int = 0  #: of the first of those
    starts: float | None = None  #: its first scale, where it took over from another
    again: bool = False  #: has served the same parameters for more than one step

    def follows(self, before: _Scaler) -> int:
        """How many fresh scalers of one first scale have served a step each, up to this one, which takes over."""
        self.starts = _number(self.scale)
        if before.fresh and not before.again and before.starts in (None, self.starts):
            self.anew, self.step = before.anew + 1, before.step
        return self.anew


class ScalerHandovers:
    """Follows which scalers serve which parameters, one after another."""

    def __init__(self) -> None:
        self._scalers: dict[int, _Scaler] = {}
        self._serving: dict[int, int] = {}  # id of an optimizer's first parameter -> number of the scaler
        self._pending: dict[int, Handover] = {}  # by the same id, until the new scaler serves a second time

    def new_scaler(self, scaler: int, *, fresh: bool) -> None:
        """The run has got a scaler; ``fresh`` when it has scaled nothing yet and no state was loaded into it."""
        self._scalers[scaler] = _Scaler(fresh)

    def scaled_by(self, scaler: int, scale: Tensor | None) -> None:
        """A scaler keeps its scale in this tensor."""
        if scaler in self._scalers:
            self._scalers[scaler].scale = scale

    def restored(self, scaler: int) -> None:
        """A scaler was given a saved state."""
        if scaler in self._scalers:
            self._scalers[scaler].fresh = False

    def unscales(
        self, scaler: int, optimizer: Optimizer, parameters: list[Tensor], step: int, place: Place | None
    ) -> Handover | None:
        """A scaler unscales the gradients of an optimizer.

        Args:
            scaler: Its number.
            optimizer: The optimizer.
            parameters: What that steps.
            step: The number of the step.
            place: The user's line.

        Returns:
            The handover, once it is certain: at once when the optimizer has steps behind it that this process did not
            see, at the second service when another scaler served its parameters before.
        """
        me = self._scalers.get(scaler)
        if me is None or not parameters:
            return None
        key = id(parameters[0])
        before, self._serving[key] = self._serving.get(key), scaler
        first, me.served = not me.served, True
        me.again = me.again or before == scaler
        me.step = step if first else me.step
        if before is None:
            steps = OptimizerView(optimizer).steps_made if first and me.fresh else None
            return Handover(step, place, FindingEvidence(optimizer_steps=steps)) if steps is not None else None
        if before != scaler:
            self._pending.pop(key, None)
            if first and me.fresh:
                if (anew := me.follows(self._scalers[before])) == _ANEW:
                    return Handover(me.step, place, cause=Cause.MISUSE_SCALER_EACH_STEP)
                if anew > _ANEW:
                    return None
                was, starts = _number(self._scalers[before].scale), _number(me.scale)
                if was != starts:
                    self._pending[key] = Handover(step, place, FindingEvidence(was=was, starts=starts))
            return None
        return self._pending.pop(key, None)


def _number(scale: Tensor | None) -> float | None:
    return float(scale) if scale is not None else None
