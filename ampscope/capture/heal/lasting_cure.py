"""A lasting cure is one small object that a replay can try, that is done to the live training, and lifted."""

from __future__ import annotations

from typing import Any

import torch

from ampscope.capture.changes.replay_change import OtherLossScale, ReplayChange
from ampscope.capture.torch_support import torch_private
from ampscope.trace.schema import CureKind


class LastingCure:
    """A change of the live training, from the next step on.

    Attributes:
        kind: What it is.
        modules: Qualified names of the modules that it changes.
        by_finiteness: Whether a step that comes out finite without it needs it no more.
        fitting_scale: The loss scale with which it was proved, where that of the step was too large for it.
    """

    kind: CureKind
    modules: tuple[str, ...] = ()
    by_finiteness = True
    fitting_scale: float | None = None

    @property
    def why_lifted(self) -> str:
        """Why it cannot stay, as its first steps have shown; empty where it can."""
        return ""

    @property
    def text(self) -> str:
        """The change in words, as a clause."""
        raise NotImplementedError

    @property
    def code(self) -> str:
        """The user's code that makes it permanent."""
        raise NotImplementedError

    @property
    def detail(self) -> dict[str, Any]:
        """The data that it takes to make the change again, as JSON."""
        raise NotImplementedError

    def change(self) -> ReplayChange:
        """Makes the same change for a replay."""
        raise NotImplementedError

    def without(self) -> ReplayChange:
        """Makes the change by which a replay goes without this cure, while it is applied."""
        raise NotImplementedError

    def apply(self) -> None:
        """Makes the change to the live model.

        Raises:
            AmpscopeError: It cannot be done; nothing was changed.
        """
        raise NotImplementedError

    def lift(self) -> None:
        """Takes the change back; safe to call twice."""
        raise NotImplementedError


#: A bound stays so far below the largest scale that fits one step: another step's gradients may be larger.
HEADROOM = 4.0


class ScaleBound(LastingCure):
    """The loss scale never near the largest at which the gradients of a bad step fit.

    Args:
        scaler: Whose scale it is.
        bound: That scale.
    """

    kind = CureKind.LOSS_SCALE

    def __init__(self, scaler: Any, bound: float) -> None:
        self._scaler = scaler
        self._bound = bound
        self._applied = False

    @property
    def text(self) -> str:
        """See `LastingCure.text`."""
        return f"the loss scale at most {self._bound:,g}"

    @property
    def code(self) -> str:
        """See `LastingCure.code`."""
        return f"torch.amp.GradScaler(init_scale={self._bound:g}, growth_interval=10**9)"

    @property
    def detail(self) -> dict[str, Any]:
        """See `LastingCure.detail`."""
        return {"bound": self._bound}

    def change(self) -> ReplayChange:
        """See `LastingCure.change`."""
        return OtherLossScale(self._bound)

    def without(self) -> ReplayChange:
        """See `LastingCure.without`: where the scale would go."""
        return OtherLossScale(2 * HEADROOM * self._bound)

    def apply(self) -> None:
        """See `LastingCure.apply`."""
        self._applied = True
        self.hold()

    def lift(self) -> None:
        """See `LastingCure.lift`."""
        self._applied = False

    def hold(self, scaler: Any = None) -> None:
        """The scaler may have grown: brings the scale back, on its device, without a wait."""
        scale, _ = torch_private.scaler_tensors(self._scaler)
        if self._applied and scale is not None and (scaler is None or scaler is self._scaler):
            with torch.no_grad():
                scale.clamp_(max=self._bound)


class ScaleRaised(LastingCure):
    """The loss scale raised once, to where the gradients no longer vanish; from there on the scaler has it.

    Args:
        scaler: Whose scale it is.
        scale: The new one.
    """

    kind = CureKind.LOSS_SCALE
    by_finiteness = False

    def __init__(self, scaler: Any, scale: float) -> None:
        self._scaler = scaler
        self._scale = scale

    @property
    def text(self) -> str:
        """See `LastingCure.text`."""
        return f"the loss scale raised to {self._scale:,g}"

    @property
    def code(self) -> str:
        """See `LastingCure.code`."""
        return f"torch.amp.GradScaler(init_scale={self._scale:g})"

    @property
    def detail(self) -> dict[str, Any]:
        """See `LastingCure.detail`."""
        return {}

    def change(self) -> ReplayChange:
        """See `LastingCure.change`."""
        return OtherLossScale(self._scale)

    def without(self) -> ReplayChange:
        """See `LastingCure.without`."""
        return ReplayChange()

    def apply(self) -> None:
        """See `LastingCure.apply`."""
        scale, _ = torch_private.scaler_tensors(self._scaler)
        if scale is not None:
            with torch.no_grad():
                scale.clamp_(min=self._scale)

    def lift(self) -> None:
        """See `LastingCure.lift`; there is nothing to take back."""
