"""Notices the step in which a buffer stops being finite, while that step can still be run again."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampscope.capture.events.calls import StepStart
from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel
from ampscope.capture.tracing.statistics import stats

#: Steps after which the list of buffers is drawn up anew.
REVIEW_EVERY = 50
#: Elements up to which a buffer is measured at every step; larger ones only where their change counter moved.
ALWAYS_MEASURED = 1 << 16


class BufferWatch(StepObserver):
    """Buffers that a step wrote to, and whether they are still finite.

    Running statistics and moving averages are poisoned silently: loss and gradients of that step may be fine, and the
    symptom shows when the buffer is read, perhaps much later. Buffers that are not finite from the start (a mask of
    -inf, a best score so far) are left alone.

    Args:
        models: The watched models.
        guard: Catches faults in looking.
    """

    def __init__(self, models: Models, guard: Guard) -> None:
        self.guard = guard
        self._models = models
        self._written: dict[str, tuple[int, int]] = {}  #: identity and change counter at the last look
        self._buffers: list[tuple[str, dict[str, Tensor | None], str]] = []
        self._looks = 0
        self._revision = -1  # of the models when the list was drawn up
        self._parcel = Parcel({})
        self._known: set[str] = set()  #: not finite before, or told already

    def step_began(self, start: StepStart) -> None:
        """Before the first step of all, takes down what is not finite from the start."""
        if start.number == 0:
            self.start()

    def attempt_began(self, attempt: StepAttempt) -> None:
        """Before each optimizer, measures what the step has written."""
        self.send()

    def start(self) -> None:
        """Before the first step: what is not finite now is so on purpose."""
        self.send()
        self._known.update(self._bad())

    def send(self) -> None:
        """Measures the buffers that were written to since the last look, without waiting for the device."""
        if self._looks % REVIEW_EVERY == 0 or self._revision != self._models.revision:
            self._buffers, self._revision = list(self._floating()), self._models.revision
        self._looks += 1
        changed: dict[str, Tensor] = {}
        for name, held, key in self._buffers:
            buffer = held.get(key)
            if buffer is None or type(buffer) is not Tensor or not stats.measurable(buffer):
                continue
            mark = (id(buffer), buffer._version)
            small = buffer.numel() <= ALWAYS_MEASURED  # batch normalisation writes without counting
            if small or self._written.get(name) != mark:
                self._written[name] = mark
                changed[name] = buffer
        with torch.no_grad():
            largest = torch._foreach_norm(list(changed.values()), math.inf) if changed else []
        self._parcel = Parcel(dict(zip(changed, largest, strict=True)))

    def _floating(self) -> list[tuple[str, dict[str, Tensor | None], str]]:
        found = []
        for module in self._models.modules:
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    name = ".".join(filter(None, (self._models.names[id(module)], key)))
                    found.append((name, module._buffers, key))
        return found

    def turned_bad(self) -> list[str]:
        """Names of the buffers that were finite until this step and are no more, if known by now; told once."""
        new = [name for name in self._bad() if name not in self._known] if self._parcel.arrived else []
        self._known.update(new)
        return new

    def _bad(self) -> list[str]:
        values = self._parcel.values().items()
        return [name for name, largest in values if largest is not None and not math.isfinite(largest)]
