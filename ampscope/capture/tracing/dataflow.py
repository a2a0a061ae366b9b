"""The outputs of a step's ops are followed: who wrote each storage, which op reads it, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.torch_support.sharding import PLAIN, has_arrived, local
from ampscope.capture.torch_support.torch_private import HeldStorages, storage_key, weak_ref
from ampscope.capture.tracing import light_statistics, sampled_shapes
from ampscope.capture.tracing.distinct_values import CastBefore, CastsBefore, DistinctCounts
from ampscope.capture.tracing.executions import Made
from ampscope.capture.tracing.exponent_histogram import ExponentHistogram
from ampscope.capture.tracing.full_statistics import Census
from ampscope.capture.tracing.light_statistics import Slots, checksum, stored
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.sampled_shapes import Given, Shapes
from ampscope.trace.schema import Node, Statistics

#: Bytes that ops give between two looks at what is gone: each small thing kept between large ones is a hole in memory
#: that the training finds no use for.
SWEPT_EVERY = 64 << 20


class Dataflow:
    """The edges between the ops of one step; keeps no tensor, but the identity of each storage it has seen.

    An output is known by its number among all outputs of the step.

    Args:
        measure: Measures a part of what an op wrote that another reads, and numbers the measurement; None for no such.

    Attributes:
        read_from: Of each operand of each op, in order, the output that it was.
        parts: By place in ``read_from``, the measurement of an operand that is a part of what was written.
    """

    def __init__(self, measure: Callable[[Tensor], int | None] | None) -> None:
        self.read_from: list[int] = []
        self.parts: dict[int, int | None] = {}
        self.written: dict[int, int] = {}  #: by storage, the output that was last written to it
        self._measure = measure
        self._regions: dict[int, tuple[int, int]] = {}  # elements of an output, and where in the storage it begins
        self._entries: dict[int, tuple[Node, str]] = {}
        self._held = HeldStorages()  # so that no key is given to another storage
        self._unswept = 0  # bytes

    def name_entry(self, tensor: Tensor, node: Node, name: str) -> None:
        """Says where a tensor that no op of the step wrote comes from, unless that was said."""
        storage = _storage(tensor)
        key = storage._cdata
        if key not in self._entries:
            if key not in self._held.references:
                self._held.references[key] = weak_ref(storage)
            self._entries[key] = node, name

    def entry(self, tensor: Tensor) -> tuple[Node, str] | None:
        """Returns from where a tensor came that no op of the step wrote; None where that is unknown."""
        return self._entries.get(_storage(tensor)._cdata)

    def writer(self, tensor: Tensor) -> int | None:
        """The output that was last written to the storage of a strided tensor; None where no op of the step wrote."""
        return self.written.get(_storage(tensor)._cdata)

    def wrote(self, first: int, results: Sequence[Tensor]) -> None:
        """Notes that an op has written ``results``.

        Args:
            first: The number of the first.
            results: Its outputs.
        """
        held = self._held.references
        for output, tensor in enumerate(results, first):
            self._unswept += tensor.nbytes
            if tensor.layout is not torch.strided:
                continue
            storage = (tensor if tensor.__class__ in PLAIN else local(tensor)).untyped_storage()  # as `_storage`
            key = storage._cdata
            if key not in held:
                held[key] = weak_ref(storage)
            self.written[key] = output
            if self._measure is not None:
                self._regions[output] = (tensor.numel(), int(tensor.storage_offset()))
        if self._unswept > SWEPT_EVERY:
            self._sweep()

    def look_at_parts(self, operands: Sequence[Tensor], writers: Sequence[int], overwritten: Sequence[int]) -> None:
        """An op has read its operands: those that are parts of what was written are measured, where that is asked.

        Args:
            operands: All of them.
            writers: The outputs that they were.
            overwritten: Positions of those that it overwrites.
        """
        if self._measure is not None:
            place = len(self.read_from)
            for arg, (operand, writer) in enumerate(zip(operands, writers, strict=True)):
                if arg not in overwritten and operand.layout is torch.strided:
                    region = (operand.numel(), operand.storage_offset())
                    if region != self._regions.get(writer, (operand.numel(), 0)):
                        self.parts[place + arg] = self._measure(operand)

    def sent(self, writer: int, measurement: int | None) -> None:
        """An op that communicates has sent an operand, which was measured before it: the op may overwrite it."""
        self.parts[len(self.read_from)] = measurement
        self.read_from.append(writer)

    def clear(self) -> None:
        """Lets go of everything."""
        self.read_from = []
        self.parts.clear()
        self.written.clear()
        self._regions.clear()
        self._entries.clear()
        self._held.release()

    def _sweep(self) -> None:
        """Forgets the storages that are gone."""
        self._unswept = 0
        for key in self._held.sweep():
            self.written.pop(key, None)
            self._entries.pop(key, None)


def _storage(tensor: Tensor) -> Any:
    """The memory of a tensor; its `torch_private.storage_key` is what torch calls it by."""
    return (tensor if tensor.__class__ in PLAIN else local(tensor)).untyped_storage()


class StepOutputs:
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
            seen[number] = sampled_shapes.together(seen[number], sampled)
        return list(map(light_statistics.recorded, seen))

    def sampled(self) -> dict[int, ExponentHistogram]:
        """By number of the measurement, what samples tell of a real step; waits for the device."""
        return self.shapes.read() if self.shapes is not None else {}

    def spans(self) -> NDArray[np.float64]:
        """Min and max of what was measured, a row for each number; waits for the device."""
        if isinstance(self._measured, Slots):
            return light_statistics.recorded_spans(self._measured.spans())
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


class Reading:
    """Follows the operands of ops; what comes from outside the step becomes one of its outputs when first read.

    Args:
        outputs: The outputs of the step.
        dataflow: Who wrote what.
        number: Numbers the site of a value from outside.
    """

    def __init__(self, outputs: StepOutputs, dataflow: Dataflow, number: Callable[[Node, str, Tensor], int]) -> None:
        self._outputs = outputs
        self._dataflow = dataflow
        self._number = number

    def writers(self, operator: Operator, operands: list[Tensor]) -> list[int]:
        """The outputs that an op's operands are."""
        known, late, found = self._dataflow.written, self._outputs.late, []
        writer: int | None
        for operand in operands:
            if late or operand.layout is not torch.strided:
                writer = self.writer(operand, operator)
            else:
                writer = known.get(operand.untyped_storage()._cdata)
                if writer is None:
                    writer = self._from_outside(operand, operator)
            found.append(writer)
        return found

    def writer(self, operand: Tensor, operator: Operator) -> int:
        """The output that an operand is."""
        if operand.layout is not torch.strided:  # opaque: nobody knows who wrote it, nor what is in it
            return self._enter(Node.INPUT, f"an operand of {operator.name}", operand, all_bits=False)
        self._outputs.is_read(operand)
        writer = self._dataflow.writer(operand)
        return self._from_outside(operand, operator) if writer is None else writer

    def _from_outside(self, operand: Tensor, operator: Operator) -> int:
        """The output that an operand becomes which is there for the first time."""
        node, name = self._dataflow.entry(operand) or (Node.INPUT, f"an operand of {operator.name}")
        writer = self._enter(node, name, operand, all_bits=True)
        self._dataflow.wrote(writer, [operand])
        if node is not Node.PARAMETER:
            self._outputs.entered(len(self._outputs.ops) - 1, operand)
        return writer

    def sink(self, tensor: Tensor, number: Callable[[], int], *, always: bool) -> None:
        """The step leaves a value that matters.

        Args:
            tensor: The value, as it is `stored`.
            number: Numbers its site.
            always: Note it, with every statistic, also where no op of the step wrote it.
        """
        writer = self._dataflow.writer(tensor) if tensor.layout is torch.strided else None
        if writer is None and not always:
            return
        self._outputs.is_read(tensor)
        edges = ((0, False),) if writer is not None else ()
        self._outputs.add(Made(number(), (tensor.numel(),), edges), [tensor], chosen=always, given=writer)
        if writer is not None:
            self._dataflow.look_at_parts([tensor], [writer], ())
            self._dataflow.read_from.append(writer)

    def _enter(self, node: Node, name: str, operand: Tensor, *, all_bits: bool) -> int:
        """Notes a value from outside; returns its number among the outputs."""
        made = Made(self._number(node, name, operand), (operand.numel(),))
        return self._outputs.add(made, [operand], all_bits=all_bits)
