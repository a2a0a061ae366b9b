"""Samples of a step's tensors tell what extremes do not: the spread of exponents, and zeros that float32 has not."""

from __future__ import annotations

import math
from collections import defaultdict
from enum import Enum, auto
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support.sharding import PLAIN
from ampscope.capture.torch_support.tensor_tree import torch_dtype
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.exponent_histogram import SAMPLE, ExponentHistogram, Samples, sample, width
from ampscope.capture.tracing.light_statistics import numbers
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.selection import MOST_OUTPUTS, MOST_PARAMETERS, Rotation
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Statistics

_HALF = frozenset(torch_dtype(name) for name, info in FINFO.items() if info.is_half)
#: Ops that give numbers of their operands, or zeros and ones, by their definition: in float32 they give the same.
_HAND_ON = frozenset(
    {
        *("clone", "cat", "stack", "index", "index_select", "gather", "embedding", "repeat", "roll", "flip", "sort"),
        *("topk", "amax", "amin", "max", "min", "tril", "triu", "masked_select", "neg", "abs", "relu", "relu_"),
        *("slice_backward", "select_backward", "threshold_backward", "max_pool2d_with_indices"),
        *("zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "new_ones"),
        "native_dropout",  # what it keeps, it makes larger
    }
)
#: Sums: of numbers of one dtype, a multiple of its smallest, which is never rounded to zero.
_SUMS = frozenset({"sum", "add", "sub", "add_", "sub_"})
_CASTS = frozenset({"_to_copy", "copy_"})
#: Ops that work row by row, with the position of the argument that says along which dimension.
_BY_ROW = {"_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2}
#: Elements of a row that is looked at alone.
_LONGEST_ROW = 16 * SAMPLE


class _Count(NamedTuple):
    """How many there are in a sample."""

    found: Tensor | None  #: None where there are none
    weight: float  #: elements that one of the sample stands for
    numel: int


class _Rule(Enum):
    """The ways in which an op's result gets zeros, by which those are counted that float32 would not have."""

    HANDS_ON = auto()
    SUM = auto()
    BY_ROW = auto()
    CAST = auto()
    BY_ELEMENT = auto()


class Given(NamedTuple):
    """A call of an op that has just run."""

    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    alone: bool  #: its result is the only one

    @property
    def tensors(self) -> list[Tensor]:
        """The tensor operands of the call."""
        return operators.flat_tensors([*self.args, *self.kwargs.values()])


class FlushedZeros:
    """Counts flushed zeros in one result after the other, and tells all counts at once.

    An op is run once more, in float32, on a sample of its operands. Not known is what an op gives that adds up
    products, normalises, draws or overwrites its operand, and what comes from outside.
    """

    def __init__(self) -> None:
        self._counts: dict[int, _Count] = {}

    def look(self, number: int, given: Given, result: Tensor) -> None:
        """Looks at a result of an op; waits for no device.

        Args:
            number: That of the measurement.
            given: The op, and what it was given.
            result: What it gave.
        """
        rule = _rule(given.operator.name, by_element=given.operator.is_pointwise)
        if rule is None or result.dtype not in _HALF or result.__class__ not in PLAIN:
            return
        tensors = given.tensors
        if not all(_is_plain(each, result) for each in tensors):
            return
        own = all(each.dtype is result.dtype for each in tensors if each.is_floating_point())
        if own and (rule is _Rule.HANDS_ON or (rule is _Rule.SUM and _adds_tensors(given, result))):
            self._none(number, result)
        elif rule is _Rule.BY_ROW:
            self._look_at_rows(number, given, result)
        elif rule is _Rule.CAST or (
            given.operator.is_pointwise and given.alone and not given.operator.writes and not given.operator.is_random
        ):
            self._look_at_elements(number, given, result, is_cast=rule is _Rule.CAST)

    def same(self, number: int, known: int, tensor: Tensor) -> None:
        """Notes for a tensor what was found in a result, if it is all of that.

        Args:
            number: That of the tensor's measurement.
            known: That of the result's.
            tensor: The tensor.
        """
        count = self._counts.get(known)
        if count is not None and count.numel == tensor.numel() and tensor.dtype in _HALF:
            self._counts[number] = count

    def read(self) -> dict[int, int]:
        """How many there are, by number of the measurement; waits for the device."""
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        told = dict.fromkeys(self._counts, 0)
        for number, count in self._counts.items():
            if count.found is not None:
                by_device[count.found.device].append(number)
        for here in by_device.values():
            found = torch.stack([each for each in (self._counts[one].found for one in here) if each is not None])
            for number, value in zip(here, found.tolist(), strict=True):
                told[number] = round(value * self._counts[number].weight)
        return told

    def _look_at_elements(self, number: int, given: Given, result: Tensor, *, is_cast: bool) -> None:
        taken = sample(result)
        if _has_no_zero(taken):
            self._none(number, result)
        elif is_cast:
            self._some(number, taken, _sampled(given.args[1 if given.operator.writes else 0], result), result)
        else:
            args = [_sampled(each, result) for each in given.args]
            named = {name: _sampled(each, result) for name, each in given.kwargs.items()}
            self._some(number, taken, given.operator.overload(*args, **named), result)

    def _look_at_rows(self, number: int, given: Given, result: Tensor) -> None:
        place, size = _BY_ROW[_short(given.operator.name)], result.shape[-1] if result.dim() else 0
        is_last = size and given.args[place] % result.dim() == result.dim() - 1
        if not is_last or size > _LONGEST_ROW or not all(each.is_contiguous() for each in (result, *given.tensors)):
            return
        rows = result.numel() // size
        step = -(-rows // max(1, SAMPLE // size)) | 1
        taken = result.view(rows, size)[::step]
        if _has_no_zero(taken):
            self._none(number, result)
            return
        args = [each.view(rows, size)[::step] if isinstance(each, Tensor) else each for each in given.args]
        args[place] = 1
        self._some(number, taken, given.operator.overload(*map(_widened, args)), result)

    def _none(self, number: int, result: Tensor) -> None:
        self._counts[number] = _Count(None, 1.0, result.numel())

    def _some(self, number: int, taken: Tensor, wide: Tensor, result: Tensor) -> None:
        """Compares a sample with what it is in float32."""
        found = ((taken == 0) & (wide.to(torch.float32) != 0)).sum()
        self._counts[number] = _Count(found, result.numel() / taken.numel(), result.numel())


@cache
def _rule(name: str, *, by_element: bool) -> _Rule | None:
    """Returns the rule for an op of torch's by its name; None for other ops, and where none applies."""
    if not name.startswith("aten."):
        return None
    rules = (_HAND_ON, _Rule.HANDS_ON), (_SUMS, _Rule.SUM), (_BY_ROW, _Rule.BY_ROW), (_CASTS, _Rule.CAST)
    found = next((rule for names, rule in rules if _short(name) in names), None)
    return found or (_Rule.BY_ELEMENT if by_element else None)


def _short(name: str) -> str:
    """An op's name without its library and its overload."""
    return name.split(".")[1]


def _is_plain(operand: Tensor, result: Tensor) -> bool:
    """Whether a sample of an operand can be set beside one of the result; a single number may lie on the host."""
    if operand.__class__ not in PLAIN or operand.layout is not torch.strided or operand.is_nested:
        return False
    if operand.is_complex() or (operand.is_floating_point() and operand.itemsize < result.itemsize):
        return False
    return (operand.device == result.device or operand.dim() == 0) and not operand._is_zerotensor()


def _adds_tensors(given: Given, result: Tensor) -> bool:
    """Whether a sum is one of tensors alone, neither of which is multiplied, in their own dtype."""
    others = [each for each in given.args[1:] if isinstance(each, (int, float)) and not isinstance(each, bool)]
    plain = given.kwargs.get("alpha", 1) in {1, -1} and given.kwargs.get("dtype") in {None, result.dtype}
    return plain and not others


def _has_no_zero(taken: Tensor) -> bool:
    """Whether there is nothing to look for; not asked of a device, which would have to be waited for."""
    return taken.is_cpu and int(taken.count_nonzero()) == taken.numel()


def _sampled(argument: Any, result: Tensor) -> Any:
    """The elements of an operand that a sample of the result was made of, `_widened`; any other argument, as it is."""
    if not isinstance(argument, Tensor):
        return argument
    if argument.dim() and argument.shape == result.shape:
        return _widened(sample(argument))
    if argument.dim():
        size = result.numel()
        step = -(-size // SAMPLE) | 1
        argument = argument.expand(result.shape).take(torch.arange(0, size, step, device=argument.device))
    return _widened(argument)


def _widened(argument: Any) -> Any:
    """Widens an argument from half precision to float32; returns any other as it is."""
    if isinstance(argument, Tensor):
        return argument.float() if argument.dtype in _HALF else argument
    return torch.float32 if isinstance(argument, torch.dtype) and argument in _HALF else argument


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
        self._found: dict[int, ExponentHistogram] = {}
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

    def read(self) -> dict[int, ExponentHistogram]:
        """The histograms by number of the measurement; waits for the device."""
        for samples in self._samples.values():
            self._found |= samples.empty()
        for number, flushed in self._flushed.read().items():
            self._found[number] = self._found[number]._replace(flushed=flushed)
        return self._found


def together(seen: Statistics, sampled: ExponentHistogram) -> Statistics:
    """Merges a tensor's exact extremes with its sample; returns the extremes alone where they are not finite."""
    low, high = seen.min, seen.max
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return seen
    return seen._replace(nan=0, posinf=0, neginf=0, max_finite=max(abs(low), abs(high)), **sampled._asdict())
