"""Runs one op again on its own operands, in a wider dtype: what it would have given had it not rounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.operand_keeper import Executed
from ampscope.capture.tracing.statistics.tensor_values import stored

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


def concerns(executed: Executed, results: Sequence[Tensor], reference: torch.dtype) -> bool:
    """Whether an op reads or gives anything narrower than the reference: another computes in it anyway."""
    return any(is_narrow(each, reference) for each in (*executed.operands, *results))


def draws(executed: Executed) -> bool:
    """Whether a call draws random numbers: once more, it would draw others."""
    operator = executed.operator
    if operator.is_random and "dropout_p" in operator.argument_names:  # attention, which drops nothing by default
        given = dict(zip(operator.argument_names, executed.args, strict=False)) | executed.kwargs
        return bool(given.get("dropout_p", 0.0))
    return operator.is_random or operator.draws


def only_reshapes(executed: Executed) -> bool:
    """Whether an op makes a view of a tensor in place, as ``transpose_`` does: it rounds nothing."""
    return torch.Tag.inplace_view in executed.operator.overload.tags


def _takes_opaque(executed: Executed) -> bool:
    """Whether an op is given what only a kernel for its own dtype can read.

    PyTorch's own ops name it; of ops from elsewhere nothing is known, and any bytes may be such.
    """
    given = dict(zip(executed.operator.argument_names, executed.args, strict=False)) | executed.kwargs
    if any(name in _OPAQUE and isinstance(value, Tensor) for name, value in given.items()):
        return True
    return executed.operator.overload.namespace != "aten" and any(each.dtype in _BYTES for each in executed.operands)


def run(executed: Executed, before: Mapping[int, Tensor], reference: torch.dtype) -> list[Tensor] | None:
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
