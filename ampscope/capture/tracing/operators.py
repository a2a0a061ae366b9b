"""Reads from an ATen operator's schema how it uses its arguments, once for each operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.communication.refusal import communicates, only_waits

_UNINITIALISED = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::lift")
#: Views whose schema does not say so: nobody else is to hold their operand any more (the gates of a GRU are made so).
_UNSAFE_VIEWS = ("aten::_unsafe_view", "aten::unsafe_split", "aten::unsafe_chunk")

#: Ops that fill their first argument with random numbers: what was in that memory is nobody's value.
_DRAWS = frozenset(
    f"aten::{name}_" for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform")
)

#: Ops whose backward asks ATen's isTensorSubclassLike, which a dispatch mode makes true. Source: FunctionsManual.cpp.
_VARYING = frozenset({("aten::masked_fill", "Tensor"), ("aten::masked_fill_", "Tensor")})
_VARYING_NAMES = frozenset({"aten::prod", "aten::cumprod", "aten::masked_scatter", "aten::linalg_det"})
#: Ops that write to arguments of which their schema does not say so.
_WRITES_SILENTLY = frozenset(
    f"aten::{name}"
    for name in (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"),
        *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    )
)
_RUNNING = ("running_mean", "running_var")
#: The positions that an op writes to which changes its first argument alone.
_FIRST = (0,)


@dataclass(frozen=True, slots=True)
class Operator:
    """The facts of an op overload that a tracer needs."""

    name: str
    overload: Any  #: what torch calls
    call: Any  #: the same with a Python call less
    passes_through: bool  #: a view, or memory without values yet: not an op on numbers
    writes: bool  #: into any of its arguments
    written: tuple[int, ...]  #: positions of arguments that are overwritten
    written_by_name: tuple[str, ...]
    argument_names: tuple[str, ...]
    is_cast: bool
    draws: bool  #: random numbers, into its first argument
    is_random: bool  #: its result depends on a random generator
    varies: bool  #: its gradient is computed by another formula while a dispatch mode is active
    communicates: bool  #: with other ranks
    is_pointwise: bool  #: each element of its result is made of those of its operands in the same place


#: What is known of overloads, by ``id``: the hash of one is a function of torch's.
described: dict[int, Operator] = {}


def describe(func: Any) -> Operator:
    """Returns the facts of an op overload, read from its schema at the first call."""
    known = described.get(id(func))
    if known is None:
        known = described[id(func)] = _read(func)
    return known


def _read(func: Any) -> Operator:
    """Reads the schema of an op overload."""
    schema = func._schema
    written = [i for i, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    if schema.name in _WRITES_SILENTLY:
        written += [i for i, arg in enumerate(schema.arguments) if arg.name in _RUNNING]
    shares = schema.name.startswith(_UNSAFE_VIEWS) or any(ret.alias_info is not None for ret in schema.returns)
    is_view = shares and not written
    return Operator(
        name=str(func),
        overload=func,
        call=torch_private.called_by(func),
        passes_through=is_view or schema.name.startswith(_UNINITIALISED) or only_waits(func),
        writes=bool(written),
        written=tuple(i for i in written if not schema.arguments[i].kwarg_only),
        written_by_name=tuple(schema.arguments[i].name for i in written if schema.arguments[i].kwarg_only),
        argument_names=tuple(arg.name for arg in schema.arguments),
        is_cast=schema.name == "aten::_to_copy",
        draws=schema.name in _DRAWS,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        varies=(schema.name, schema.overload_name) in _VARYING or schema.name in _VARYING_NAMES,
        communicates=communicates(func),
        is_pointwise=torch.Tag.pointwise in func.tags,
    )


def written_tensors(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that this call of ``operator`` overwrites."""
    values = [args[i] for i in operator.written if i < len(args)]
    values += [kwargs[name] for name in operator.written_by_name if name in kwargs]
    return flat_tensors(values)


def operands(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that this call reads: its arguments, but for those given for ``out=`` and to draw numbers into."""
    args = args[1:] if operator.draws else args
    return flat_tensors([*args, *(value for name, value in kwargs.items() if name not in operator.written_by_name)])


def results(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that this call gave, and those of its arguments that it overwrote, which are among them."""
    if type(result) is Tensor:
        found = [result]
        if operator.written == _FIRST and args[0] is result and not operator.written_by_name:
            return found, [result]
    else:
        found = flat_tensors(result if isinstance(result, (tuple, list)) else (result,))
    if not operator.writes:
        return found, []
    written = written_tensors(operator, args, kwargs)
    return [*found, *not_among(found, written)], written


def among(operands: list[Tensor], written: list[Tensor]) -> tuple[int, ...]:
    """Positions of the operands that are overwritten."""
    places = {id(each) for each in written}
    return tuple([arg for arg, operand in enumerate(operands) if id(operand) in places])


def flat_tensors(values: Any) -> list[Tensor]:
    """The tensors among op arguments or results, through at most one level of lists."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def not_among(results: list[Tensor], written: list[Tensor]) -> list[Tensor]:
    """The tensors that a call overwrote without returning them."""
    known = {torch_private.storage_key(tensor) for tensor in results if tensor.layout is torch.strided}
    return [tensor for tensor in written if not results or torch_private.storage_key(tensor) not in known]


def scalar_arguments(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The non-tensor arguments by name, as a hashable tuple: an ``eps``, a fill value, a dimension, a dtype."""
    named = [*zip(operator.argument_names, args, strict=False), *kwargs.items()]
    return tuple([(name, _hashable(value)) for name, value in named if _is_scalar(value)])


def _is_scalar(value: Any) -> bool:
    if isinstance(value, (bool, int, float, str, torch.dtype)):
        return True
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(v, (int, float)) for v in value)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
