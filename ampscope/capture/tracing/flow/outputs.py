"""The outputs of the ops of one step and what was measured of them, until the trace's rows are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.torch_support.local_shards import has_arrived
from ampscope.capture.torch_support.torch_private import storage_key
from ampscope.capture.tracing.distinct.casts_before import CastBefore, CastsBefore
from ampscope.capture.tracing.distinct.distinct_values import DistinctCounts
from ampscope.capture.tracing.executions import Made
from ampscope.capture.tracing.sampling import shapes
from ampscope.capture.tracing.sampling.flushed_zeros import Given
from ampscope.capture.tracing.sampling.shapes import Shapes
from ampscope.capture.tracing.statistics import stats
from ampscope.capture.tracing.statistics.checksums import checksum
from ampscope.capture.tracing.statistics.exponent_histogram import Histogram
from ampscope.capture.tracing.statistics.full_statistics import Census
from ampscope.capture.tracing.statistics.stats import Slots
from ampscope.capture.tracing.statistics.tensor_values import stored
from ampscope.trace.schema import Statistics


class Outputs:
    """Collects the outputs of a step's ops, in order of execution.

    An op is known by its number in that order, an output by its number among all outputs.

    Args:
        full: Take every statistic (replays) instead of min and max without a sync (the real step).
        slots: Where min and max are written; None for new ones.

    Attributes:
        ops: What each op leaves in the trace besides its numbers.
        measurements: Of each output, the number of its measurement; None where there is none.
        checksums: By output, where it is compared bit for bit with another execution's.
        micro_batches: The first output of each micro-batch.
        sums: Checksums are taken; not where nothing is compared with another execution.
    """

    def __init__(self, *, full: bool, slots: Slots | None = None) -> None:
        self.full = full
        self.distinct = DistinctCounts()
        self.casts_before = CastsBefore()
        self.shapes: Shapes | None = None  #: takes every statistic of some outputs of a real step, where asked to
        self.came_cast: dict[int, CastBefore] = {}  #: by op, what came into the step from a cast before it
        self.ops: list[Made] = []
        self.measurements: list[int | None] = []
        self.checksums: dict[int, Tensor | None] = {}
        self.micro_batches = [0]
        self.sums = True
        self.makers: list[int] = []  #: of each output, the number of the op that gave it
        self._measured: Slots | Census = Census() if full else slots or Slots()
        #: By storage, outputs that nothing has read yet, and that other ranks may still write.
        self.late: dict[int, list[tuple[int, Tensor]]] = {}

    def begin_micro_batch(self) -> None:
        """Begins the next micro-batch: all outputs that follow belong to it."""
        self.micro_batches.append(len(self.measurements))

    def entered(self, seq: int, tensor: Tensor) -> None:
        """Notes a tensor from outside the step."""
        cast = self.casts_before.of(tensor)
        self.distinct.entered(seq, cast.counts if cast is not None else None)
        if cast is not None:
            self.came_cast[seq] = cast

    def add(
        self,
        made: Made,
        tensors: Sequence[Tensor],
        *,
        all_bits: bool = False,
        chosen: bool = False,
        given: Given | int | None = None,
    ) -> int:
        """Notes the outputs of an op, as they are `stored`, and measures them.

        With ``all_bits``, also by what every bit of theirs is in. Where ``chosen``, every statistic is taken that is
        taken of any. ``given`` is the op that has just run; of what is no op, the output that it is.

        Returns:
            The number of the first.
        """
        seq, first = len(self.ops), len(self.measurements)
        summed = all_bits and self.sums
        self.ops.append(made)
        for output, tensor in enumerate(tensors, first):
            self.makers.append(seq)
            number = self._measured.measure(tensor)
            self.measurements.append(number)
            if self.shapes is not None and number is not None:
                known = self.measurements[given] if isinstance(given, int) else given
                self.shapes.offer(made.site, number, tensor, chosen=chosen, given=known)
            if summed:
                self.checksums[output] = checksum(tensor)
        return first

    def add_late(self, made: Made, tensors: Sequence[Tensor]) -> int:
        """Notes outputs that may not be there yet: each is measured when the step first reads it, or never.

        Whoever reads it has waited for it; AMPscope does not.

        Returns:
            The number of the first.
        """
        first = len(self.measurements)
        for output, tensor in enumerate(tensors, first):
            if tensor.layout is torch.strided and has_arrived(tensor):
                self.late.setdefault(storage_key(tensor), []).append((output, tensor))
        self.makers += [len(self.ops)] * len(tensors)
        self.ops.append(made)
        self.measurements += [None] * len(tensors)
        return first

    def is_awaited(self, tensor: Tensor) -> bool:
        """Whether outputs in the memory of a tensor are of that kind."""
        return tensor.layout is torch.strided and storage_key(tensor) in self.late

    def is_read(self, tensor: Tensor) -> None:
        """The step reads, or overwrites, a tensor: what was late in its memory is there."""
        if self.late and tensor.layout is torch.strided:
            for output, late in self.late.pop(storage_key(tensor), ()):
                there = late.untyped_storage().nbytes() > 0  # FSDP gives memory back that it will use again
                if there:
                    self.measurements[output] = self.measure(late)

    def measure(self, tensor: Tensor) -> int | None:
        """The number of a new measurement of a tensor; None for one that has no values to look at."""
        return self._measured.measure(stored(tensor))

    def measured(self) -> list[Statistics]:
        """Returns the statistics by number of the measurement; waits for the device."""
        seen = self._measured.read()
        for number, sampled in self.sampled().items():
            seen[number] = shapes.together(seen[number], sampled)
        return list(map(stats.recorded, seen))

    def sampled(self) -> dict[int, Histogram]:
        """By number of the measurement, what samples tell of a real step; waits for the device."""
        return self.shapes.read() if self.shapes is not None else {}

    def spans(self) -> NDArray[np.float64]:
        """Min and max of what was measured, a row for each number; waits for the device."""
        if isinstance(self._measured, Slots):
            return stats.recorded_spans(self._measured.spans())
        return np.array([(each.min, each.max) for each in self.measured()], float).reshape(-1, 2)

    def all_finite(self) -> bool:
        """Whether no op of the step gave a non-finite value; waits for the device."""
        return all(np.isfinite(self.spans()).flat)

    def sites(self) -> list[int]:
        """Numbers of the sites that gave them, each once, in order."""
        return list(dict.fromkeys(made.site for made in self.ops))

    def clear(self) -> None:
        """Lets go of everything."""
        self.ops = []
        self.measurements = []
        self.checksums = {}
        self.makers = []
        self.distinct.clear()
        self.came_cast.clear()
        self.late.clear()
        self.shapes = None
        self._measured = Slots()  # what it had may serve another step
