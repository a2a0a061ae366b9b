"""Notices mistakes in how the scaler and autocast are used, from the order of events and version counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture import containers
from ampscope.capture.frames import Place, user_place
from ampscope.capture.models import Models
from ampscope.capture.tape import is_in_place
from ampscope.trace.vocabulary import Cause

Report = Callable[[Cause, Place | None, dict[str, Any]], None]

_BOUNDING = ("clamp", "clip")
#: A number written by hand is shorter than this; one that was computed has all its digits.
_ROUND = 10


class UsageWatch:
    """Follows one run's loop.

    Args:
        models: The watched models.
        report: Called with each mistake: its cause, the user's line, evidence.
    """

    def __init__(self, models: Models, report: Report) -> None:
        self._models = models
        self._report = report
        self._scaled = False  # gradients hold the loss scale now
        self._gradients: dict[int, Tensor] = {}  # by id; looked up when the loop first computes after a backward
        self._unscaled_now = False  # unscale_ has run and no step has followed
        self._left: dict[int, Tensor] = {}  # gradients that an update without a step left unscaled
        self._updated: Place | None = None  # by which line
        self._update_since_backward: Place | None = None
        self._scalers: set[int] = set()  # those that scaled a loss since the last step
        self._checked: set[int] = set()  # ids of optimizers whose gradients' dtype was looked at
        self._aliases: list[Tensor] = []  # views the loop took of gradients; kept so that ids stay theirs
        self._derived: list[Tensor] = []  # values the loop computed from scaled gradients
        self._edit: Place | None = None
        self._before: dict[int, tuple[int, int]] | None = None
        self._reached: set[int] = set()  # ids of parameters that a scaled backward reached in this step
        self._factors: set[float] = set()  # numbers by which scaled gradients were multiplied, in any step

    # -- backward -----------------------------------------------------------------------------------------------

    def before_backward(self, *, under_autocast: bool, scaled: bool, several: bool) -> None:
        """A backward begins.

        Args:
            under_autocast: Whether an autocast region is open.
            scaled: Whether its loss was scaled.
            several: Whether to tell apart which parameters it reaches: there may be optimizers without a scaler.
        """
        self._before = self._versions() if scaled and several else None
        if under_autocast:
            self._report(Cause.MISUSE_BACKWARD_UNDER_AUTOCAST, user_place(), {})
        self._scaled = self._scaled or scaled
        if scaled and self._left and self._adds_to_unscaled():
            self._report(Cause.MISUSE_UPDATE_EACH_MICROBATCH, self._updated, {})
        self._left = {}
        self._update_since_backward = None

    def after_backward(self) -> None:
        """A backward has added to the gradients."""
        self._gradients = {}
        if self._before is not None:
            before, self._before = self._before, None
            self._reached |= {key for key, stamp in self._versions().items() if before.get(key) != stamp}

    def _versions(self) -> dict[int, tuple[int, int]]:
        """Identity and version of each parameter's gradient, by id of the parameter."""
        found = self._models.parameters.values()
        return {id(p): (id(p.grad), p.grad._version) for _, p in found if p.grad is not None}

    def _now(self) -> dict[int, Tensor]:
        gradients = (p.grad for _, p in self._models.parameters.values())
        return {id(gradient): gradient for gradient in gradients if gradient is not None}

    def _adds_to_unscaled(self) -> bool:
        """Whether unscaled gradients are still there, uncleared, for the next backward to add scaled ones to.

        Looks at values, but only after an update without a step.
        """
        now = self._now()
        return any(bool(gradient.any()) for key, gradient in self._left.items() if key in now)

    # -- the loop's own work on gradients -----------------------------------------------------------------------

    def saw_function(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """A torch function ran outside the models after a backward."""
        if not self._scaled:
            return
        self._gradients = self._gradients or self._now()
        operands = list(containers.tensors((args, kwargs)))
        touched = [tensor for tensor in operands if self._is_gradient(tensor)]
        in_place = is_in_place(func, kwargs)
        if touched and in_place and self._depends_on_scale(func, args, operands):
            self._edit = self._edit or user_place()
        elif touched and getattr(func, "__name__", "") in ("__get__", "detach"):
            self._aliases.extend(containers.tensors(result))
        elif not in_place and (touched or any(self._is_derived(tensor) for tensor in operands)):
            self._derived.extend(containers.tensors(result))

    def _is_gradient(self, tensor: Tensor) -> bool:
        return id(tensor) in self._gradients or any(tensor is alias for alias in self._aliases)

    def _is_derived(self, tensor: Tensor) -> bool:
        return any(tensor is other for other in self._derived)

    def _depends_on_scale(self, func: Callable[..., Any], args: Any, operands: list[Tensor]) -> bool:
        """Whether an edit of scaled gradients would have been another one without the scale.

        Bounding them does, and so does a factor that the loop has computed from them (a norm). Masking and
        dividing by a constant do not: a number counts only after such a computation, and when it is not the same
        round number every time.
        """
        name = getattr(func, "__name__", "")
        if any(word in name for word in _BOUNDING) or any(self._is_derived(tensor) for tensor in operands):
            return True
        numbers = [float(v) for v in args if isinstance(v, (int, float)) and not isinstance(v, bool) and v != 1]
        if not self._derived or not numbers or not ("mul" in name or "div" in name):
            return False
        self._factors.update(numbers)
        return len(self._factors) > 1 or any(len(repr(number)) > _ROUND for number in numbers)

    # -- scaler and optimizer -----------------------------------------------------------------------------------

    def scaled_by(self, scaler: int) -> None:
        """A loss was scaled by the scaler with this number."""
        self._scalers.add(scaler)

    def before_unscale(self, scaler: int, optimizer: Optimizer) -> None:
        """``unscale_`` is about to divide the gradients (called by the loop or by ``step``)."""
        if self._edit is not None:
            self._report(Cause.MISUSE_CLIP_BEFORE_UNSCALE, self._edit, {})
        self._edit = None
        if self._update_since_backward is not None and self._scalers:
            self._report(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, self._update_since_backward, {"order": "update"})
        elif self._scalers and scaler not in self._scalers:
            self._report(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, user_place(), {"order": "other scaler"})
        self._check_half(optimizer)

    def _check_half(self, optimizer: Optimizer) -> None:
        """A scaler cannot unscale gradients that are float16 themselves: their parameters are."""
        if id(optimizer) in self._checked:
            return
        self._checked.add(id(optimizer))
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        half = [p for p in parameters if p.grad is not None and p.grad.dtype is torch.float16]
        if half:
            self._report(Cause.HALF_PARAMS, user_place(), {"parameters": len(half)})

    def after_unscale(self) -> None:
        """The gradients are unscaled now."""
        self._scaled = False
        self._unscaled_now = True

    def updated(self, place: Place | None) -> None:
        """``scaler.update`` was called at ``place``."""
        self._update_since_backward = place
        if self._unscaled_now:
            self._left, self._updated = self._now(), place

    def bypassed(self, optimizer: Optimizer, *, half_forward: bool, has_scaler: bool) -> None:
        """``optimizer.step`` was called without the scaler."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        half_parameters = any(p.dtype is torch.float16 for p in parameters)  # no scaler takes these
        if self._scaled and (not self._reached or any(id(p) in self._reached for p in parameters)):
            evidence = {"optimizer": type(optimizer).__name__}
            self._report(Cause.MISUSE_NO_UNSCALE, user_place(), evidence)
        elif half_forward and not has_scaler and not half_parameters:
            self._report(Cause.MISUSE_MISSING_SCALER, user_place(), {})

    def stepped(self) -> None:
        """A step attempt is over."""
        self._scaled = False
        self._reached = set()
        self._gradients, self._left = {}, {}
        self._unscaled_now = False
        self._aliases, self._derived = [], []
        self._edit = None

    def new_iteration(self) -> None:
        """A watched forward begins after a step."""
        self._scalers = set()
