"""How many different values a cast to half precision reads and gives, where its operand numbers something."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampscope.capture.torch_support.dtypes import HALF
from ampscope.capture.tracing.dataflow import Writer
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.statistics import stats
from ampscope.capture.tracing.statistics.full_statistics import SAMPLE, sample
from ampscope.provenance import FEWEST_VALUES, DistinctValues

#: Ops that give regular grids.
_GRIDS = ("aten.arange.", "aten.linspace.")
#: Casts that are counted in one step.
_MOST = 8
#: Integers that are looked at: a sample of fewer is too sparse to show that neighbours become one.
_INTEGERS = 1 << 16
#: Share of neighbours that have to fit for a tensor to be ordered, or a regular grid.
_MOSTLY = 0.9
#: Share by which the steps of a regular grid may differ, for they are rounded.
_SPREAD = 0.01


class DistinctCounts:
    """Counts on samples, without a wait: of integers, and of whole numbers and regular grids held as floats.

    Positions, time stamps and numbers of things are among these. Activations and weights are not: they come from ops
    that compute, and may be rounded.
    """

    def __init__(self) -> None:
        self._given: set[int] = set()  # what wrote numbers that no op computed: from outside, a grid, a cast of these
        self._counts: dict[int, Tensor] = {}
        self._places: set[int] = set()

    def entered(self, seq: int) -> None:
        """Notes what came from outside the step."""
        self._given.add(seq)

    def ran(
        self, op: Operator, point: tuple[int, int], operands: Sequence[Tensor], result: Tensor, writer: Writer | None
    ) -> None:
        """Looks at an op that has run.

        Args:
            op: Which.
            point: Its number in the order of execution and that of its site.
            operands: What it read.
            result: The first tensor that it gave.
            writer: Who wrote its first operand.
        """
        if op.is_cast and operands:  # a number that a transform wraps is none
            self._cast(*point, operands[0], result, given=writer is not None and writer.seq in self._given)
        elif not operands and op.name.startswith(_GRIDS):
            self._given.add(point[0])

    def _cast(self, seq: int, site: int, operand: Tensor, result: Tensor, *, given: bool) -> None:
        integers = not (operand.is_floating_point() or operand.is_complex() or operand.dtype is torch.bool)
        if not (integers or given):
            return
        if result.dtype not in HALF:
            self._given.add(seq)
            return
        many = operand.dtype not in HALF and operand.numel() >= FEWEST_VALUES and len(self._counts) < _MOST
        if many and site not in self._places and stats.measurable(operand) and stats.measurable(result):
            self._places.add(site)
            most = _INTEGERS if integers else SAMPLE
            self._counts[seq] = _counted(sample(operand.detach(), most), sample(result.detach(), most))

    def read(self) -> dict[int, DistinctValues]:
        """The counts by number of the cast; waits for the device, if there are any."""
        found = {}
        for seq, counted in self._counts.items():
            before, after, numbers, ordered = counted.tolist()
            if numbers:
                found[seq] = DistinctValues(before, after, ordered=bool(ordered))
        return found

    def clear(self) -> None:
        """Lets go of everything."""
        self._counts.clear()


def _counted(before: Tensor, after: Tensor) -> Tensor:
    """Numbers of different values before and after, and whether those before number something, and are ordered."""
    steps = before.diff()
    ordered = _mostly(steps >= 0) | _mostly(steps <= 0)
    numbers = torch.ones_like(ordered)
    if before.is_floating_point():
        usual = steps.median()
        regular = _mostly((steps - usual).abs() <= usual.abs() * _SPREAD) & (usual != 0)
        numbers = regular | (ordered & (before == before.round()).all())
    answers = (_distinct(before), _distinct(after), numbers, ordered)
    return torch.stack([answer.to(torch.int64) for answer in answers])


def _mostly(fits: Tensor) -> Tensor:
    return fits.sum() >= _MOSTLY * fits.numel()


def _distinct(values: Tensor) -> Tensor:
    values = values.float() if values.dtype in HALF else values
    return (values.sort().values.diff() != 0).sum() + 1
