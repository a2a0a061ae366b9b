"""Holds the operands of the ops at which a replayed step went wrong, so that these calls can be made again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.tracing import light_statistics, operators
from ampscope.capture.tracing.light_statistics import stored
from ampscope.capture.tracing.operators import Operator

#: Bytes of operands kept from one incident.
MOST_BYTES = 64 << 20
#: Births are common (masks); a replay holds the operands of the first at each program point, in so many bytes.
_HELD_BYTES = 4 * MOST_BYTES


class ExecutedCall(NamedTuple):
    """A call of an op in the step."""

    seq: int
    site: int
    operator: Operator
    args: Any
    kwargs: Any

    @property
    def operands(self) -> list[Tensor]:
        """The call's tensor arguments."""
        return operators.flat_tensors([*self.args, *self.kwargs.values()])

    @property
    def asks_for_infinity(self) -> bool:
        """Whether it was told to write infinities, as a mask's fill is."""
        scalars = [value for _, value in operators.scalar_arguments(self.operator, self.args, self.kwargs)]
        return any(isinstance(value, float) and math.isinf(value) for value in scalars)


class OpListener(Protocol):
    """Is told of every op of a replay, with its operands as they are."""

    def before(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """An op that writes into its operands is about to run."""

    def after(self, executed: ExecutedCall, results: Sequence[Tensor], writers: Sequence[int]) -> None:
        """An op has run.

        Args:
            executed: The op.
            results: Its outputs.
            writers: Sequence numbers of the ops that wrote its operands.
        """


class HeldCall(NamedTuple):
    """A call whose operands are held on the host, as they were before it; arguments as in a `SavedCall`."""

    site: int
    args: list[Any]
    kwargs: dict[str, Any]
    tensors: dict[str, Tensor]
    device: str

    @property
    def bytes(self) -> int:
        """Memory that the held operands take, in bytes."""
        return sum(map(_bytes, self.tensors.values()))


class OperandKeeper:
    """Looks at every op of one replay and holds the operands of those that make a bad value of good ones.

    These are births: an output holds a NaN though no operand does, or an infinity though every operand is finite; and
    ops that read a bad value which came from outside the step. Which of them mattered is known after the replay.

    Args:
        guard: Catches faults of the keeping.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.calls: dict[int, HeldCall] = {}  #: by sequence number
        self._left = _HELD_BYTES
        self._sites: set[int] = set()
        self._bad: set[int] = set()  # ops with a bad output
        self._written: list[Tensor] = []  # by the present op; kept, so that an id stays that of its tensor
        self._before: dict[int, Tensor] = {}  # what they held before it

    def before(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """See `OpListener`."""
        with self._guard:
            self._written = operators.written_tensors(operator, args, kwargs)
            small = [tensor for tensor in self._written if _bytes(tensor) <= MOST_BYTES]
            self._before = {id(tensor): tensor.detach().clone() for tensor in small}

    def after(self, executed: ExecutedCall, results: Sequence[Tensor], writers: Sequence[int]) -> None:
        """See `OpListener`."""
        if not self._guard.broken:
            with self._guard:
                self._look(executed, results, writers)

    def _look(self, executed: ExecutedCall, results: Sequence[Tensor], writers: Sequence[int]) -> None:
        before, self._before, self._written = self._before, {}, []
        made = _Badness.of(results)
        if not made:
            return
        from_outside = self._bad.isdisjoint(writers)
        self._bad.add(executed.seq)
        if executed.site not in self._sites and (made.nan or not executed.asks_for_infinity):
            given = _Badness.of([before.get(id(each), each) for each in executed.operands])
            if (made.nan and not given.nan) or not given or from_outside:
                self._hold(executed, before)

    def _hold(self, executed: ExecutedCall, before: dict[int, Tensor]) -> None:
        packing = _Packing(before, min(self._left, MOST_BYTES))
        try:
            args = [packing.of(value) for value in executed.args]
            kwargs = {name: packing.of(value) for name, value in executed.kwargs.items()}
        except _CannotKeep:
            return
        call = HeldCall(executed.site, args, kwargs, packing.tensors, packing.device)
        self._left -= call.bytes
        self._sites.add(executed.site)
        self.calls[executed.seq] = call


class _Badness(NamedTuple):
    """Whether a NaN or an infinity is among some values; false where all are finite."""

    nan: bool
    inf: bool

    def __bool__(self) -> bool:
        return self.nan or self.inf

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> _Badness:
        looked_at = [each for each in map(stored, tensors) if light_statistics.may_turn_bad(each)]
        ends = [end for tensor in looked_at for end in light_statistics.extremes(tensor)]
        values = [float(end) for end in ends]
        return _Badness(any(map(math.isnan, values)), any(map(math.isinf, values)))


class _CannotKeep(Exception):
    """An argument is of an unknown kind, or does not fit."""


class _Packing:
    """Copies the arguments of one call: tensors to the host, everything else into JSON (see `SavedCall`)."""

    def __init__(self, before: dict[int, Tensor], room: int) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.device = "cpu"
        self._before = before
        self._room = room
        self._names: dict[int, str] = {}

    def of(self, value: Any) -> Any:
        """The argument as JSON.

        Raises:
            _CannotKeep: There is no way to.
        """
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, (list, tuple)):
            return [self.of(item) for item in value]
        return _plain(value)

    def _tensor(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            self._room -= _bytes(tensor)
            if self._room < 0 or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
                raise _CannotKeep
            self._names[id(tensor)] = name = f"t{len(self._names)}"
            self.device = tensor.device.type if tensor.device.type != "cpu" else self.device
            kept = self._before.get(id(tensor), tensor).detach()
            self.tensors[name] = torch.empty_like(kept, device="cpu", memory_format=torch.contiguous_format).copy_(kept)
        return self._names[id(tensor)]


_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, _NAMED):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise _CannotKeep


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
