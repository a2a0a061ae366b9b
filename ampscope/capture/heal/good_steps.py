"""Remembers of good steps how large gradients are, and which optimizers step together."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from ampscope.capture.events.open_step import StepAttempt

#: Gradients so many times as large as the largest of the good steps before are none of this training's.
FAR = 100.0
_KEPT = 16


class GoodSteps:
    """The good steps before a bad one; nothing of them is read before a step goes bad."""

    def __init__(self) -> None:
        self._norms: dict[int, deque[Tensor]] = {}  # of gradients as the optimizer got them, by its number
        self._together: set[int] = set()  # numbers of optimizers that have ended one step with others
        self._latest: StepAttempt | None = None

    def ended(self, attempt: StepAttempt) -> None:
        """An attempt is over."""
        latest, self._latest = self._latest, attempt
        if latest is not None and latest.opened is attempt.opened and latest.index != attempt.index:
            self._together |= {latest.index, attempt.index}
        norm = attempt.opened.edited.get(id(attempt.optimizer), attempt.norm)
        if norm is not None and attempt.stepped and not attempt.bad:
            self._norms.setdefault(attempt.index, deque(maxlen=_KEPT)).append(norm)

    def shares_step(self, attempt: StepAttempt) -> bool:
        """Whether the optimizer of an attempt has been seen to end a step with others."""
        return attempt.index in self._together

    def why_not(self, attempt: StepAttempt, norm: Tensor | None) -> str:
        """Why a bad step must not be made with gradients of this norm, in words; empty where it may."""
        if self.shares_step(attempt):
            return "several optimizers share the step, and all of them or none may make it"
        known = [float(each) for each in self._norms.get(attempt.index, ())]
        if not known or norm is None:
            return "no good step before it shows how large its gradients may be"
        size, most = float(norm), max(known)
        if size > FAR * most:
            return f"its gradients would have a norm of {size:.3g}; in good steps before it was at most {most:.3g}"
        return ""
