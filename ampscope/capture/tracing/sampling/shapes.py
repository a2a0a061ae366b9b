"""Samples of the tensors of a step as it runs, for what its extremes do not tell; no wait until they are read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampscope.capture.tracing.sampling.flushed_zeros import FlushedZeros, Given
from ampscope.capture.tracing.sampling.rotation import MOST_OUTPUTS, MOST_PARAMETERS, Rotation
from ampscope.capture.tracing.statistics.exponent_histogram import Histogram
from ampscope.capture.tracing.statistics.samples import Samples, width
from ampscope.capture.tracing.statistics.tensor_values import numbers
from ampscope.trace.schema import Statistics

#: Tensors on the host that are sampled before their histograms are made; a device would have to be waited for.
_ON_HOST = 64
#: Tensors of a step that are sampled: outputs, and for each parameter its gradient and two moments.
_MOST = MOST_OUTPUTS + 3 * MOST_PARAMETERS


class Shapes:
    """Samples of one step.

    Args:
        rotation: Whose turn it is.
    """

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation
        self._samples: dict[tuple[torch.device, torch.dtype], Samples] = {}
        self._found: dict[int, Histogram] = {}
        self._flushed = FlushedZeros()
        self._outputs = 0

    def offer(self, site: int, number: int, tensor: Tensor, *, chosen: bool, given: Given | int | None = None) -> None:
        """Takes a sample of an output that was measured, if it is its turn; of numbers of floating point only.

        Args:
            site: Of what gave it.
            number: That of the measurement.
            tensor: The output.
            chosen: It was chosen before.
            given: The op that has just run; of what is no op, the number of the measurement of what it is.
        """
        if not tensor.is_floating_point():
            return
        if not chosen:
            if self._outputs == MOST_OUTPUTS or not self.rotation.chooses(site):
                return
            self._outputs += 1
        values = numbers(tensor.detach())
        key = (values.device, width(values))
        samples = self._samples.get(key)
        if samples is None:
            samples = self._samples[key] = Samples(*key, _ON_HOST if values.is_cpu else _MOST, for_formats=True)
        if samples.full:
            if not values.is_cpu:
                return
            self._found |= samples.empty()
        samples.add(number, values, tensor)
        if isinstance(given, Given):
            self._flushed.look(number, given, tensor)
        elif given is not None:
            self._flushed.same(number, given, tensor)

    def read(self) -> dict[int, Histogram]:
        """The histograms by number of the measurement; waits for the device."""
        for samples in self._samples.values():
            self._found |= samples.empty()
        for number, flushed in self._flushed.read().items():
            self._found[number] = self._found[number]._replace(flushed=flushed)
        return self._found


def together(seen: Statistics, sampled: Histogram) -> Statistics:
    """Merges a tensor's exact extremes with its sample; returns the extremes alone where they are not finite."""
    low, high = seen.min, seen.max
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return seen
    return seen._replace(nan=0, posinf=0, neginf=0, max_finite=max(abs(low), abs(high)), **sampled._asdict())
