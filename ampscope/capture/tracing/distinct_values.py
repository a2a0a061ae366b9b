"""A cast to half precision may leave few of many values that number something: in a step, or before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.torch_support.torch_private import storage_key, storage_ref
from ampscope.capture.torch_support.user_line import NOWHERE, Place, program_line, user_place
from ampscope.capture.tracing import light_statistics
from ampscope.capture.tracing.exponent_histogram import sample
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.sites import dtype_name
from ampscope.provenance import FEWEST_VALUES, DistinctValues
from ampscope.trace.evidence import EarlierCast

#: Ops that give regular grids.
_GRIDS = ("aten.arange.", "aten.linspace.")
#: Casts that are counted in one step.
_MOST = 8
#: Whether values number something; whole numbers held as floats, in no order, may be measurements.
_NUMBERS, _PERHAPS = 1, 2
#: Columns up to which each is looked at by itself: what numbers something is packed with other features.
_COLUMNS = 16
#: Numbers that are looked at: a sample of fewer is too sparse to show that neighbours become one.
_NUMBERED = 1 << 16
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

    def entered(self, seq: int, counts: Tensor | None = None) -> None:
        """Notes what came from outside the step.

        Args:
            seq: The number of its node.
            counts: What was counted at the cast before the step that it comes from.
        """
        self._given.add(seq)
        if counts is not None:
            self._counts[seq] = counts

    def ran(
        self, op: Operator, point: tuple[int, int], operands: Sequence[Tensor], result: Tensor, writer: int | None
    ) -> None:
        """Looks at an op that has run.

        Args:
            op: Which.
            point: Its number in the order of execution and that of its site.
            operands: What it read.
            result: The first tensor that it gave.
            writer: The number of the op that wrote its first operand.
        """
        if op.is_cast and operands:  # a number that a transform wraps is none
            given = writer in self._given
            if given or not operands[0].is_floating_point():
                self._cast(*point, operands[0], result, given=given)
        elif not operands and op.name.startswith(_GRIDS):
            self._given.add(point[0])
            if result.dtype in HALF and self._is_wanted(point[1], result):
                self._counts[point[0]] = counted_grid(result)

    def _cast(self, seq: int, site: int, operand: Tensor, result: Tensor, *, given: bool) -> None:
        integers = not (operand.is_floating_point() or operand.is_complex() or operand.dtype is torch.bool)
        if not (integers or given):
            return
        if result.dtype not in HALF:
            self._given.add(seq)
        elif operand.dtype not in HALF and light_statistics.measurable(operand) and self._is_wanted(site, result):
            self._counts[seq] = counted(operand, result)

    def _is_wanted(self, site: int, result: Tensor) -> bool:
        """Whether a result is counted: of each place the first, as far as there are not too many."""
        many = result.numel() >= FEWEST_VALUES and len(self._counts) < _MOST
        wanted = many and site not in self._places and light_statistics.measurable(result)
        if wanted:
            self._places.add(site)
        return wanted

    def read(self) -> dict[int, DistinctValues]:
        """The counts by number of the cast, of several columns the one that lost most; waits for the device."""
        found = {}
        for seq, columns in self._counts.items():
            numbers = [
                DistinctValues(before, after, bool(ordered), certain=kind == _NUMBERS, changed=changed, of=of)
                for before, after, kind, ordered, changed, of in columns.tolist()
                if kind
            ]
            if numbers:
                found[seq] = max(numbers, key=lambda each: each.before / each.after)
        return found

    def clear(self) -> None:
        """Lets go of everything."""
        self._counts.clear()


def counted(before: Tensor, after: Tensor) -> Tensor:
    """How many different values a cast read and gave, by column where it read a table of floats.

    Args:
        before: What it read; shape ``(..., columns)`` counts as a table with few columns.
        after: What it gave, of that shape.

    Returns:
        A row of integers for each column: the numbers of different values before and after; whether those before
        number something, or only may; whether they are in order; how many of the sample are another number after the
        cast, and how many there are.
    """
    before, after = before.detach(), after.detach()
    if not before.is_floating_point():
        return _counted(sample(before, _NUMBERED), sample(after, _NUMBERED)).unsqueeze(0)
    rows = [_counted(sample(before, _NUMBERED), sample(after, _NUMBERED))]
    columns = before.shape[-1] if before.dim() > 1 else 0
    if 0 < columns <= _COLUMNS and before.numel() >= columns * FEWEST_VALUES:
        rows += [_counted(sample(before[..., at]), sample(after[..., at])) for at in range(columns)]
    return torch.stack(rows)


def counted_grid(grid: Tensor) -> Tensor:
    """Counts the different values of a grid made in half precision, each of whose elements was meant to be another."""
    grid = sample(grid.detach(), _NUMBERED)
    after = _distinct(grid).to(torch.int64)
    one, of = torch.ones_like(after), torch.full_like(after, grid.numel())
    return torch.stack([of, after, one, one, torch.zeros_like(after), of]).unsqueeze(0)


def _counted(before: Tensor, after: Tensor) -> Tensor:
    """Returns what `counted` does, of one column."""
    steps = before.diff()
    ordered = _mostly(steps >= 0) | _mostly(steps <= 0)
    numbers = torch.full_like(ordered, _NUMBERS, dtype=torch.int64)
    if before.is_floating_point():
        usual = steps.median()
        regular = _mostly((steps - usual).abs() <= usual.abs() * _SPREAD) & (usual != 0)
        whole = (before == before.round()).all()
        numbers = torch.where(regular | (ordered & whole), _NUMBERS, torch.where(whole, _PERHAPS, 0))
        if numbers.is_cpu and numbers.item() == 0:  # measurements: nobody asks how many are different
            return numbers.new_zeros(6)
    changed, of = (after.to(before.dtype) != before).sum(), torch.full_like(numbers, before.numel())
    answers = (_distinct(before), _distinct(after), numbers, ordered, changed, of)
    return torch.stack([answer.to(torch.int64) for answer in answers])


def _mostly(fits: Tensor) -> Tensor:
    return fits.sum() >= _MOSTLY * fits.numel()


def _distinct(values: Tensor) -> Tensor:
    values = values.float() if values.dtype in HALF else values
    return (values.sort().values.diff() != 0).sum() + 1


#: Functions that give another dtype and change nothing else.
_CASTS = frozenset({"to", "half", "bfloat16", "type", "type_as"})
_GRID_FUNCTIONS = frozenset({"arange", "linspace"})
#: Places of casts that are counted.
_MOST_PLACES = 8


class CastBefore(NamedTuple):
    """A cast to half precision, or a grid made in it, that ran before the step began."""

    counts: Tensor  #: see `counted`
    read: str  #: dtype that it read
    dtype: str  #: dtype that it gave
    place: Place

    def told(self, since: int) -> EarlierCast:
        """The same for the evidence of an incident, with the first step that read what it gave."""
        return EarlierCast(since=since, read=self.read, dtype=self.dtype, source=program_line(self.place))


class CastsBefore:
    """Counts lost values at the first cast of each place, and knows a cast's results while they are alive."""

    def __init__(self) -> None:
        self._places: set[Place] = set()
        self._given: dict[int, tuple[Any, CastBefore]] = {}  # by storage: what keeps that key, the cast

    def called(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """A function has run between two steps."""
        name = getattr(func, "__name__", "")
        if type(result) is not Tensor or not (name in _CASTS or name in _GRID_FUNCTIONS or self._given):
            return
        operands = list(tensor_tree.tensors((args, kwargs)))
        if result.dtype in HALF and self._is_counted(name, operands, result):
            return
        for operand in operands if result.dtype is not torch.bool else ():
            cast = self.of(operand)
            if cast is not None and result.numel() >= operand.numel():  # it sums nothing up: each value has its own
                self._given[storage_key(result)] = storage_ref(result), cast

    def of(self, tensor: Tensor) -> CastBefore | None:
        """The cast that gave a tensor its values."""
        known = self._given.get(storage_key(tensor)) if self._given and type(tensor) is Tensor else None
        return known[1] if known is not None and not known[0].expired() else None

    def forget(self) -> None:
        """Forgets the casts of the step that has been judged."""
        self._given.clear()

    def _is_counted(self, name: str, operands: list[Tensor], result: Tensor) -> bool:
        """Counts at a place that is new, if what was called is a cast, or made a grid."""
        narrows = name in _CASTS and bool(operands) and operands[0].dtype not in HALF
        if not (narrows or (name in _GRID_FUNCTIONS and not operands)) or result.numel() < FEWEST_VALUES:
            return False
        place = user_place() or NOWHERE
        if place in self._places or len(self._places) >= _MOST_PLACES or not light_statistics.measurable(result):
            return False
        if narrows and (operands[0].dtype is torch.bool or not light_statistics.measurable(operands[0])):
            return False
        self._places.add(place)
        counts = counted(operands[0], result) if narrows else counted_grid(result)
        read = dtype_name(operands[0].dtype) if narrows else ""
        self._given[storage_key(result)] = (
            storage_ref(result),
            CastBefore(counts, read, dtype_name(result.dtype), place),
        )
        return True
