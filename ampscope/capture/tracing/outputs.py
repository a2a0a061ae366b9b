"""The outputs of the ops of one step and what was measured of them, until the trace's rows are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support.local_shards import has_arrived
from ampscope.capture.torch_support.torch_private import storage_key
from ampscope.capture.tracing.distinct.casts_before import CastBefore, CastsBefore
from ampscope.capture.tracing.distinct.distinct_values import DistinctCounts
from ampscope.capture.tracing.statistics import stats
from ampscope.capture.tracing.statistics.checksums import checksum, read
from ampscope.capture.tracing.statistics.full_statistics import Census
from ampscope.capture.tracing.statistics.stats import Slots
from ampscope.capture.tracing.statistics.tensor_values import stored
from ampscope.trace.schema import UNMEASURED, OpRow, Statistics


class Output(NamedTuple):
    """One output of an executed op."""

    seq: int
    out: int
    site: int
    micro_batch: int
    numel: int
    measurement: int | None  #: number of its measurement, None where there is none
    checksum: Tensor | None = None  #: where it is compared bit for bit with another execution's


class Outputs:
    """What the ops gave, in order of execution.

    Args:
        full: Take every statistic (replays) instead of min and max without a sync (the real step).
        slots: Where min and max are written; None for new ones.
    """

    def __init__(self, *, full: bool, slots: Slots | None = None) -> None:
        self.full = full
        self.distinct = DistinctCounts()
        self.casts_before = CastsBefore()
        self.came_cast: dict[int, CastBefore] = {}  #: by number, what came into the step from a cast before it
        self._outputs: list[Output] = []
        self._measurements: Slots | Census = Census() if full else slots or Slots()
        self._late: dict[int, list[tuple[int, Tensor]]] = {}  # by storage: outputs that other ranks may still write

    def entered(self, seq: int, tensor: Tensor) -> None:
        """Notes a tensor from outside the step."""
        cast = self.casts_before.of(tensor)
        self.distinct.entered(seq, cast.counts if cast is not None else None)
        if cast is not None:
            self.came_cast[seq] = cast

    def add(self, seq: int, site: int, micro_batch: int, tensors: Sequence[Tensor], *, all_bits: bool = False) -> None:
        """Notes the outputs of an op, and measures them; with ``all_bits`` also by what every bit of theirs is in."""
        for out, tensor in enumerate(tensors):
            bits = checksum(tensor) if all_bits else None
            self._outputs.append(Output(seq, out, site, micro_batch, tensor.numel(), self.measure(tensor), bits))

    def add_late(self, seq: int, site: int, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Notes outputs that may not be there yet: each is measured when the step first reads it, or never.

        Whoever reads it has waited for it; AMPscope does not.
        """
        for out, tensor in enumerate(tensors):
            if tensor.layout is torch.strided and has_arrived(tensor):
                self._late.setdefault(storage_key(tensor), []).append((len(self._outputs), tensor))
            self._outputs.append(Output(seq, out, site, micro_batch, tensor.numel(), None))

    @property
    def awaits(self) -> bool:
        """Whether there are outputs that nothing has read yet, and that may not be there."""
        return bool(self._late)

    def is_awaited(self, tensor: Tensor) -> bool:
        """Whether outputs in the memory of a tensor are of that kind."""
        return tensor.layout is torch.strided and storage_key(tensor) in self._late

    def is_read(self, tensor: Tensor) -> None:
        """The step reads, or overwrites, a tensor: what was late in its memory is there."""
        if self._late and tensor.layout is torch.strided:
            for index, late in self._late.pop(storage_key(tensor), ()):
                there = late.untyped_storage().nbytes() > 0  # FSDP gives memory back that it will use again
                if there:
                    self._outputs[index] = self._outputs[index]._replace(measurement=self.measure(late))

    def measure(self, tensor: Tensor) -> int | None:
        """The number of a new measurement of a tensor; None for one that has no values to look at."""
        tensor = stored(tensor)
        return self._measurements.measure(tensor) if stats.measurable(tensor) else None

    def measured(self) -> list[Statistics]:
        """What was measured, by number; waits for the device."""
        return list(map(stats.recorded, self._measurements.read()))

    def rows(self, step: int, source: str, measured: Sequence[Statistics]) -> list[OpRow]:
        """The trace's rows."""
        known: dict[int | None, Statistics] = {None: UNMEASURED, **dict(enumerate(measured))}
        sums = read([output.checksum for output in self._outputs])
        pairs = zip(self._outputs, sums, strict=True)
        return [OpRow(step, source, *each[:5], bits, known[each.measurement]) for each, bits in pairs]

    def sites(self) -> list[int]:
        """Numbers of the sites that gave them, each once, in order."""
        return list(dict.fromkeys(output.site for output in self._outputs))

    def clear(self) -> None:
        """Lets go of everything."""
        self._outputs.clear()
        self.distinct.clear()
        self.came_cast.clear()
        self._late.clear()
        self._measurements = Slots()  # what it had may serve another step
