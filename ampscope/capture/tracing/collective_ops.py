"""Reads from a collective op's arguments what this rank sends and receives, and through which process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.local_shards import local
from ampscope.capture.tracing.operators import Operator

#: How the tensor arguments of ``c10d`` ops begin that this rank sends, and those that it receives into.
_SENT, _RECEIVED = ("input", "tensors"), ("output", "tensors")
_BARRIERS = frozenset({"barrier", "monitored_barrier_"})
_ONLY_SENDS = _BARRIERS | {"send", "isend"}
_ONLY_RECEIVES = _BARRIERS | {"recv_", "recv_any_source_", "irecv"}
#: Of these, one rank alone has the result.
_ROOT_ALONE = frozenset({"reduce_", "gather_"})
#: Torch's numbers of the reductions, in order. Source: RedOpType in torch/csrc/distributed/c10d/Types.hpp.
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


class Exchange:
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
