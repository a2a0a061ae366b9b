"""Recognises a scaler that takes over in mid-run, with its scale to find all over again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.user_line import Place
from ampscope.trace.vocabulary import Cause

#: Scalers in a row that served one step each, after which they are taken to be made for each step.
_ANEW = 3


@dataclass(slots=True)
class Handover:
    """A scaler without a past that serves parameters which have one."""

    step: int
    place: Place | None
    evidence: dict[str, Any] = field(default_factory=dict)
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
            return Handover(step, place, {"optimizer_steps": steps}) if steps is not None else None
        if before != scaler:
            self._pending.pop(key, None)
            if first and me.fresh:
                if (anew := me.follows(self._scalers[before])) == _ANEW:
                    return Handover(me.step, place, cause=Cause.MISUSE_SCALER_EACH_STEP)
                if anew > _ANEW:
                    return None
                scales = {"was": _number(self._scalers[before].scale), "starts": _number(me.scale)}
                if scales["was"] != scales["starts"]:
                    self._pending[key] = Handover(step, place, scales)
            return None
        return self._pending.pop(key, None)


def _number(scale: Tensor | None) -> float | None:
    return float(scale) if scale is not None else None
