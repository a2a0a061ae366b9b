"""The schema of an ATen operator tells what it does with its arguments, and what one that communicates sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.own_collectives import communicates, only_waits
from ampscope.capture.torch_support.sharding import local

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


#: How the tensor arguments of ``c10d`` ops begin that this rank sends, and those that it receives into.
_SENT, _RECEIVED = ("input", "tensors"), ("output", "tensors")
_BARRIERS = frozenset({"barrier", "monitored_barrier_"})
_ONLY_SENDS = _BARRIERS | {"send", "isend"}
_ONLY_RECEIVES = _BARRIERS | {"recv_", "recv_any_source_", "irecv"}
#: Of these, one rank alone has the result.
_ROOT_ALONE = frozenset({"reduce_", "gather_"})
#: Torch's numbers of the reductions, in order. Source: RedOpType in torch/csrc/distributed/c10d/Types.hpp.
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


class RunningCollective:
    """One call of an op that communicates, which is about to run.

    Args:
        operator: The op.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Attributes:
        facts: By name: the group, its size, this rank's place in it, its ranks where it is not all of them; the
            reduction; the root.
    """

    def __init__(self, operator: Operator, args: Any, kwargs: Any) -> None:
        library, name, _ = operator.name.split(".", 2)
        self._name = name
        self._is_c10d = library == "c10d"
        self._given = {**dict(zip(operator.argument_names, args, strict=False)), **kwargs}
        self.facts = tuple(_facts(self._given))

    @property
    def sent(self) -> list[Tensor]:
        """The tensors that this rank sends; empty for an op that only receives."""
        if self._name in _ONLY_RECEIVES:
            return []
        names = [name for name in self._given if name.startswith(_SENT) or not (self._is_c10d or name == "out")]
        return [tensor for name in names for tensor in _tensors(self._given[name])]

    def received(self, result: Any) -> list[Tensor]:
        """The tensors that this rank gets, once the exchange is over; empty where the others alone get any.

        Args:
            result: What the op returned.
        """
        facts = dict(self.facts)
        if self._name in _ONLY_SENDS or (self._name in _ROOT_ALONE and facts.get("rank") != facts.get("root")):
            return []
        if not self._is_c10d:
            return list(_tensors(result))
        return [tensor for name in self._given if name.startswith(_RECEIVED) for tensor in _tensors(self._given[name])]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or a result, through any nesting of lists; of sharded ones, this rank's part."""
    if isinstance(value, Tensor):
        yield local(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _facts(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    with Suppressed():  # a group that this torch describes otherwise: the exchange is told without it
        yield from _of_group(given)
    if "reduce_op" in given:
        yield "reduce", _reduction(given["reduce_op"])
    root = given.get("root_rank", given.get("src"))
    if isinstance(root, int):
        yield "root", root


def _of_group(given: dict[str, Any]) -> list[tuple[str, Any]]:
    boxed, name = given.get("process_group"), given.get("group_name")
    if boxed is None and name is None:
        return []
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    group: Any = resolve(name) if boxed is None else dist.ProcessGroup.unbox(boxed)
    ranks = tuple(dist.get_process_group_ranks(group))
    size, place = int(group.size()), int(group.rank())
    some = [("ranks", ranks)] if len(ranks) < dist.get_world_size() else []
    return [("group", str(group.group_name)), ("group_size", size), ("rank", place), *some]


def _reduction(value: Any) -> str:
    """``sum``: from the name that functional collectives take, or from torch's number; empty for another."""
    if isinstance(value, str):
        return value
    number = value.op() if isinstance(value, torch.ScriptObject) else None  # type: ignore[attr-defined]  # a method of its own
    return _REDUCTIONS[number] if isinstance(number, int) and number < len(_REDUCTIONS) else ""
