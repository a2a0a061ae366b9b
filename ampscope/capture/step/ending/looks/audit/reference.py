"""Keeps a sample of what each op of the step gave in the reference dtype, to be found again by where it ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.step.ending.looks.audit import widened
from ampscope.capture.step.ending.looks.audit.differences import SAMPLE
from ampscope.capture.tracing.operand_keeper import Executed
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.statistics.samples import sample
from ampscope.capture.tracing.tracer import Tracer

Key = tuple[Any, ...]


class Positions:
    """Says where in the step an op ran, in words that hold for another execution of it as well.

    Casts between floating dtypes are not counted: the other execution has none, or others.

    Args:
        tracer: Of this execution.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.seen: Counter[Key] = Counter()  #: how many ops of a kind ran at a place

    @property
    def micro_batch(self) -> int:
        """Number of the micro-batch."""
        return len(self._tracer.outputs.micro_batches) - 1

    def of(self, executed: Executed, results: Sequence[Tensor]) -> Key | None:
        """Returns where an op ran, and the how-many-th of its kind it was there; None for a cast."""
        if is_cast(executed, results):
            return None
        point = self._tracer.points.sites.point(executed.site)
        place = point.place
        key = (self.micro_batch, point.phase, point.module, place.file, place.line, point.op, point.outputs.shapes)
        self.seen[key] += 1
        return (*key, self.seen[key])


def is_cast(executed: Executed, results: Sequence[Tensor]) -> bool:
    """Whether an op does nothing but round, or widen, floating-point numbers."""
    floating = [each.dtype.is_floating_point for each in (*executed.operands, *results)]
    return executed.operator.is_cast and all(floating)


class ReferenceSamples:
    """Listens to the reference execution, and keeps a sample of each output.

    Args:
        tracer: Of that execution.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._positions = Positions(tracer)
        self._samples: dict[Key, list[Tensor | None]] = {}
        self._random: dict[Key, list[Tensor | None]] = {}

    def before(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """See `OpListener`."""

    def after(self, executed: Executed, results: Sequence[Tensor], writers: Sequence[int]) -> None:
        """See `OpListener`."""
        key = self._positions.of(executed, results)
        if key is not None:
            into = self._random if widened.draws(executed) else self._samples
            into[key] = [sampled(each) for each in results]

    def of(self, key: Key | None) -> list[Tensor | None]:
        """Returns the samples of an op's outputs, and lets go of them; nothing where no such op ran."""
        return self._samples.pop(key, []) if key is not None else []

    def ran_as_often(self, key: Key | None, there: Positions) -> bool:
        """Whether as many ops of a kind ran at a place as in another execution: else who knows which is which."""
        return key is None or self._positions.seen[key[:-1]] == there.seen[key[:-1]]

    def drawn(self, key: Key | None) -> list[Tensor | None]:
        """Returns the samples of the outputs of an op that draws random numbers, and lets go of them."""
        return self._random.pop(key, []) if key is not None else []


def sampled(tensor: Tensor) -> Tensor | None:
    """A sample of a tensor's own, as it was before anything overwrites it; None of one without values to compare."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_complex() or not tensor.numel():
        return None
    return sample(tensor.detach(), SAMPLE).clone()
