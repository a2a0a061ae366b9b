"""Keeps a sample of what each op of the step gave in the reference dtype, to be found again by where it ran."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.exponent_histogram import sample
from ampscope.capture.tracing.light_statistics import stored
from ampscope.capture.tracing.operand_keeper import ExecutedCall
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.tracer import Tracer

#: Of an output, so many elements at most are compared with another execution's.
SAMPLE = 1 << 10
#: Scalars that lie end to end.
_BLOCK = 1 << 12


class Numbers:
    """Scalars on their devices, by number, until they are read.

    They lie end to end: thousands of small tensors among the large ones that come and go would keep the host's
    allocator from giving anything back.
    """

    def __init__(self) -> None:
        self._devices: list[torch.device] = []  # of each
        self._blocks: dict[torch.device, list[Tensor]] = {}
        self._used: Counter[torch.device] = Counter()

    def put(self, scalar: Tensor) -> int:
        """Takes a scalar; no wait. Returns its number."""
        device = scalar.device
        blocks, place = self._blocks.setdefault(device, []), self._used[device] % _BLOCK
        if not place:
            blocks.append(torch.empty(_BLOCK, dtype=precise(device), device=device))
        blocks[-1][place].copy_(scalar)
        self._used[device] += 1
        self._devices.append(device)
        return len(self._devices) - 1

    def read(self) -> list[float]:
        """All of them; waits for the device."""
        of_device = {device: iter(torch.cat(blocks).tolist()) for device, blocks in self._blocks.items()}
        return [next(of_device[device]) for device in self._devices]


def precise(device: torch.device) -> torch.dtype:
    """The dtype in which squares are added up: float64, where there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


def norm(values: Tensor) -> Tensor:
    """The L2 norm, as a scalar on the device."""
    found: Tensor = torch.linalg.vector_norm(values, dtype=precise(values.device))
    return found


def difference(values: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """``values - wide``, and ``wide``, in its dtype: both zero where either stands for a mask, or is not finite.

    Args:
        values: What an op gave.
        wide: What it would have given, of the same shape.
    """
    ours = values.to(wide.dtype)
    kept = (ours.abs() < _most(values.dtype)) & (wide.abs() < _most(wide.dtype))
    known = torch.where(kept, wide, 0.0)
    return torch.where(kept, ours, 0.0) - known, known


def _most(dtype: torch.dtype) -> float:
    """Magnitudes from here on are not finite, or from the outer half of the dtype's range, and stand for a mask."""
    return torch.finfo(dtype).max / 2 if dtype.itemsize > 1 else math.inf


#: Attention kernels that take half precision alone; what they compute, other code does in any dtype.
HALF_ATTENTION = frozenset(
    {"aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_cudnn_attention.default"}
)
#: Arguments that hold what a kernel keeps for itself or for its backward, laid out for the dtype in which it ran: the
#: kernel for another one reads and writes past their end.
_OPAQUE = frozenset(
    {"workspace", "reserve", "reserveSpace", "reservedSpace", "weight_buf", "z_state", "cell_state_fwd"}
)
_BYTES = (torch.uint8, torch.int8)
#: Arguments that say what an op does for operands in half precision, and what they are for wider ones.
_OF_HALF = {"half_to_float": False}


def is_narrow(tensor: Tensor, reference: torch.dtype) -> bool:
    """Whether a tensor's values are rounded to fewer bits than those of the reference."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize < reference.itemsize


def concerns(executed: ExecutedCall, results: Sequence[Tensor], reference: torch.dtype) -> bool:
    """Whether an op reads or gives anything narrower than the reference: another computes in it anyway."""
    return any(is_narrow(each, reference) for each in (*executed.operands, *results))


def draws_numbers(executed: ExecutedCall) -> bool:
    """Whether a call draws random numbers: once more, it would draw others."""
    operator = executed.operator
    if operator.is_random and "dropout_p" in operator.argument_names:  # attention, which drops nothing by default
        given = dict(zip(operator.argument_names, executed.args, strict=False)) | executed.kwargs
        return bool(given.get("dropout_p", 0.0))
    return operator.is_random or operator.draws


def only_reshapes(executed: ExecutedCall) -> bool:
    """Whether an op makes a view of a tensor in place, as ``transpose_`` does: it rounds nothing."""
    return torch.Tag.inplace_view in executed.operator.overload.tags


def _takes_opaque(executed: ExecutedCall) -> bool:
    """Whether an op is given what only a kernel for its own dtype can read.

    PyTorch's own ops name it; of ops from elsewhere nothing is known, and any bytes may be such.
    """
    given = dict(zip(executed.operator.argument_names, executed.args, strict=False)) | executed.kwargs
    if any(name in _OPAQUE and isinstance(value, Tensor) for name, value in given.items()):
        return True
    return executed.operator.overload.namespace != "aten" and any(each.dtype in _BYTES for each in executed.operands)


def run_widened(executed: ExecutedCall, before: Mapping[int, Tensor], reference: torch.dtype) -> list[Tensor] | None:
    """The outputs of an op on its own operands in the reference dtype; None where it cannot be run so.

    Args:
        executed: The op, which has run.
        before: What the tensors that it overwrote held before it, by ``id``; copies that this may write into.
        reference: The wider dtype.

    Returns:
        In the order of its own outputs, of some ops the first alone. Nothing that the step has is different afterwards.
    """
    if _takes_opaque(executed):
        return None
    widening = _Widening(before, reference)
    with Suppressed() as suppressed:
        operator, names = executed.operator, executed.operator.argument_names
        args = tuple(
            widening.of(value, names[place] if place < len(names) else "") for place, value in enumerate(executed.args)
        )
        kwargs = {name: widening.of(value, name) for name, value in executed.kwargs.items()}
        if operator.name in HALF_ATTENTION:
            return [_attention(dict(zip(names, args, strict=False)) | kwargs)]
        result = operator.overload(*args, **kwargs)
        results, _ = operators.results(operator, args, kwargs, result)
        return list(map(stored, results))
    return None if suppressed.error is not None else []


def _attention(given: Mapping[str, Any]) -> Tensor:
    """Computes what an attention kernel that drops nothing gives, from its arguments by name."""
    query, key = given["query"], given["key"]
    mixed, _ = torch.ops.aten._scaled_dot_product_attention_math.default(
        query,
        key,
        given["value"],
        given.get("attn_bias", given.get("attn_mask")),
        0.0,
        given.get("is_causal", False),
        scale=given.get("scale"),
        enable_gqa=query.size(-3) != key.size(-3),
    )
    found: Tensor = mixed
    return found


class _Widening:
    """The arguments of one call, in the reference dtype."""

    def __init__(self, before: Mapping[int, Tensor], reference: torch.dtype) -> None:
        self._before = before
        self._reference = reference
        self._made: dict[int, Tensor] = {}  # the same tensor twice is the same twice

    def of(self, value: Any, name: str = "") -> Any:
        """Widens one argument."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)) and _has_tensors(value):
            return [self.of(each) for each in value]
        if isinstance(value, torch.dtype):
            narrow = value.is_floating_point and value.itemsize < self._reference.itemsize
            return self._reference if narrow else value
        return _OF_HALF.get(name, value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        known = self._made.get(id(tensor))
        if known is None:
            value = self._before.get(id(tensor), tensor).detach()
            known = self._made[id(tensor)] = value.to(self._reference) if is_narrow(value, self._reference) else value
        return known


def _has_tensors(values: Iterable[Any]) -> bool:
    return any(isinstance(each, Tensor) for each in values)


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

    def of(self, executed: ExecutedCall, results: Sequence[Tensor]) -> Key | None:
        """Returns where an op ran, and the how-many-th of its kind it was there; None for a cast."""
        if is_cast(executed, results):
            return None
        point = self._tracer.points.sites.point(executed.site)
        place = point.place
        key = (self.micro_batch, point.phase, point.module, place.file, place.line, point.op, point.outputs.shapes)
        self.seen[key] += 1
        return (*key, self.seen[key])


def is_cast(executed: ExecutedCall, results: Sequence[Tensor]) -> bool:
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

    def after(self, executed: ExecutedCall, results: Sequence[Tensor], writers: Sequence[int]) -> None:
        """See `OpListener`."""
        key = self._positions.of(executed, results)
        if key is not None:
            into = self._random if draws_numbers(executed) else self._samples
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
