"""A taped step is what it takes to run a step again: its calls, what they depend on, the state, the draws."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ampscope.capture.isolation.memory import collector
from ampscope.capture.isolation.state_snapshot import StateSnapshot
from ampscope.capture.tape.call_tape import Tape
from ampscope.capture.tape.tape_entry import EarlierResult, Entry, EntryKind, GradientOf, TensorReference
from ampscope.capture.tape.weight_writes import Update
from ampscope.capture.torch_support import process_group
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.process_group import GradientReduction, synchronising, wrapper_of
from ampscope.capture.tracing.light_statistics import finite
from ampscope.capture.tracing.operators import Operator
from ampscope.trace.evidence import CallLine, MadeBefore


def entries_needed(entries: Sequence[Entry], start: int, since: int, also: Iterable[int] = ()) -> list[int]:
    """Numbers of the entries that make the step which begins at ``since``.

    These are its backward passes, its differentiable module calls (they may change buffers), and whatever those
    depend on, before ``since`` too.

    Args:
        entries: The entries of the tape.
        start: Number of the first of them.
        since: Number of the first entry of the step.
        also: Further entries that are asked for.
    """
    writers: dict[int, list[int]] = {}  # entry -> the in-place entries that change its results later
    front = list(also)
    for number, entry in enumerate(entries, start):
        if number >= since and (entry.kind is EntryKind.BACKWARD or entry.is_training_call) and number not in front:
            front.append(number)
        for result in entry.also_writes:
            writers.setdefault(result.entry, []).append(number)
    wanted = set(front)
    while front:
        number = front.pop()
        read = [result.entry for result in entries[number - start].earlier]
        for other in (*read, *writers.get(number, ())):
            if other not in wanted and other >= start:
                wanted.add(other)
                front.append(other)
    return sorted(wanted)


def written_after_backward(entries: Sequence[Entry], start: int, since: int) -> tuple[int, ...]:
    """Numbers of the entries that write in place after the last backward of a step.

    Args:
        entries: The entries of the tape.
        start: Number of the first of them.
        since: Number of the first entry of the step.
    """
    numbered = list(enumerate(entries, start))
    backwards = [number for number, entry in numbered if number >= since and entry.kind is EntryKind.BACKWARD]
    return tuple(number for number, entry in numbered if entry.in_place and backwards and number > backwards[-1])


def made_of_gradients(tape: Tape, values: Iterable[Tensor]) -> bool:
    """Whether any of ``values`` is a gradient, or was computed from such ones."""
    derived: set[int] = set()
    for number, entry in enumerate(tape.entries, tape.start):
        reads = entry.arguments.tensors
        if gives_gradients(entry) or any(isinstance(each, GradientOf) or _is_of(each, derived) for each in reads):
            derived.add(number)
    found = ((tape.gradients.find(each), tape.results.find(each)) for each in values)
    return any(left is not None or (made is not None and made.source.entry in derived) for left, made in found)


def gives_gradients(entry: Entry) -> bool:
    """Whether an entry gives gradients, to parameters or to the loop."""
    asked = entry.call is torch.autograd.grad or (entry.through is not None and bool(entry.through.leaves))
    return asked or entry.kind is EntryKind.BACKWARD


def _is_of(reference: TensorReference, entries: set[int]) -> bool:
    return isinstance(reference, EarlierResult) and reference.entry in entries


class HeldResults:
    """Holds the results of a replay's calls as long as they are read: micro-batches need not be there together.

    Args:
        entries: Those that are run, each with its number.
        read_last: What is read when all have run.
    """

    def __init__(self, entries: Iterable[tuple[int, Entry]], read_last: Iterable[EarlierResult]) -> None:
        self._last_readers = {result.entry: number for number, entry in entries for result in entry.earlier}
        self._read_last = {result.entry for result in read_last}
        self._held: dict[int, list[Tensor]] = {}

    def put(self, number: int, results: list[Tensor]) -> None:
        """An entry has returned."""
        self._held[number] = results

    def of(self, reference: EarlierResult) -> Tensor:
        """Returns the result of an entry."""
        return self._held[reference.entry][reference.leaf]

    def was_run(self, number: int, entry: Entry) -> None:
        """Lets go of what no later entry reads, and of what has become garbage meanwhile."""
        for read in {number, *(result.entry for result in entry.earlier)} - self._read_last:
            if self._last_readers.get(read, number) <= number:
                self._held.pop(read, None)
        collector.collect()

    def clear(self) -> None:
        """Lets go of everything."""
        self._held.clear()


class _Holder(Protocol):
    def clear(self) -> None: ...


@contextlib.contextmanager
def cleared_on_failure(*holders: _Holder) -> Iterator[None]:
    """Lets go of what a replay that fails has held: the allocator can give back only what nobody holds."""
    try:
        yield
    except BaseException:
        for each in holders:
            each.clear()
        raise


Drawn = dict[str, list[torch.dtype]]  #: by op, the dtypes of what it drew, in the order in which it ran


class Draws:
    """Has each op draw what it drew in the real step: the same bits give other numbers in another dtype.

    Args:
        known: Of the step; empty until it has been run as it was.
        notes: This replay runs it so, and notes it there.
    """

    def __init__(self, known: Drawn, *, notes: bool) -> None:
        self._known, self._notes = known, notes
        self._ran: Counter[str] = Counter()
        self.missed = False  #: it has drawn something of which nothing was known
        if notes:
            known.clear()

    def run(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Runs an op that draws random numbers, and gives them in the dtype that is asked for now."""
        call, name = operator.overload, operator.name
        drops = name == "aten.native_dropout.default" and args[2] is not False
        values = operator.draws or "_like." in name or not any(isinstance(each, Tensor) for each in args)
        if not (values or drops) or name.startswith("aten.bernoulli_"):  # depends on values that are others, or on none
            return call(*args, **kwargs)
        if self._notes:
            result = call(*args, **kwargs)
            self._known.setdefault(name, []).append((result[0] if drops else result).dtype)
            return result
        self._ran[name] += 1
        was, first = self._known.get(name, ())[self._ran[name] - 1 : self._ran[name]], args[0] if args else None
        now = kwargs.get("dtype") or (first.dtype if isinstance(first, Tensor) else torch.get_default_dtype())
        self.missed |= not was
        if not was or not was[0].is_floating_point or was[0] is now:
            return call(*args, **kwargs)
        if operator.draws:
            return args[0].copy_(call(args[0].to(was[0]), *args[1:], **kwargs))
        if drops:
            _, kept = call(torch.ones_like(args[0], dtype=was[0]), *args[1:], **kwargs)
            return args[0] * kept / (1 - args[1] or 1.0), kept
        return call(*args, **{**kwargs, "dtype": was[0]}).to(now)


#: Lines that call the models which are told.
MOST_LINES = 8


class TapedStep(NamedTuple):
    """A step that can be run again."""

    tape: Tape
    state: StateSnapshot  #: what forward may change, as it was when the step began
    draws: Drawn  #: what it has drawn, as far as a replay has noted that
    since: int  #: position on the tape where it begins; of what lies before, only what it depends on is run
    had_gradients: frozenset[str] = frozenset()  #: parameters that had one before its first backward
    after_unjudged: bool = False  #: weights were moved within the step before, by what nobody looked at
    scale: float | None = None  #: its loss scale; None without a scaler
    late: bool = False  #: judged when the loop has gone on, and may have written into what the step computed with
    moved: bool = False  #: its optimizer has moved the weights, too
    broken: frozenset[str] = frozenset()  #: buffers that a cure has to leave finite, though it find them otherwise
    collectives: int | None = 0  #: that ran since its first backward began; None: not known
    carried: Mapping[int, str] = MappingProxyType({})  #: what it reads of what the loop carries: ``id`` -> name
    made_before: Mapping[str, MadeBefore] = MappingProxyType({})  #: its inputs that the loop made, unheard, by name
    left: tuple[tuple[str, EarlierResult], ...] = ()  #: what it has left of that, not finite, by name
    left_in_attributes: Mapping[str, str] = MappingProxyType({})  #: likewise in plain attributes of modules: -> name
    given: Mapping[str, EarlierResult] = MappingProxyType({})  #: gradients that no backward has left, by name
    edits: tuple[int, ...] = ()  #: entries that write after the last backward, where they are part of it
    updates: tuple[tuple[str, EarlierResult], ...] = ()  #: by which the loop moves weights, by names of these
    edits_weights: Callable[[], bool] = bool  #: whether forward does, behind their change counters; waits
    in_force: tuple[Any, ...] = ()  #: what its loss code did otherwise than it is written, see `LiveChange`
    recalled: bool = False  #: nobody heard what the loop did to its gradients: it is taken from another step
    edited: bool = False  #: it ends with what the loop did to the gradients, not with the last backward

    def with_edits(self, models: Models) -> TapedStep | None:
        """The step with what the loop did to the gradients after the last backward; None where it did nothing."""
        written = written_after_backward(self.tape.entries, self.tape.start, self.since)
        assigned = self.tape.results.assigned(models, self.since)
        if self.given or not (written or assigned):
            return None
        return self._replace(edits=written, given=assigned, edited=True)

    def with_updates(self, updates: Iterable[Update]) -> TapedStep:
        """The step with all that the loop has made of its gradients, to the ``updates`` of its weights."""
        written = written_after_backward(self.tape.entries, self.tape.start, self.since)
        known = ((name, self.tape.earlier_result(tensor, overwrites=False)) for name, tensor in updates)
        return self._replace(edits=written, updates=tuple((name, source) for name, source in known if source))

    @property
    def gradients_at(self) -> int:
        """Number of the last entry that gave gradients."""
        return max((number for number, entry in self.entries() if gives_gradients(entry)), default=self.since)

    @property
    def losses_were_finite(self) -> bool:
        """Whether what its backward passes began from was finite."""
        backwards = (entry for _, entry in self.entries() if entry.kind is EntryKind.BACKWARD)
        return all(finite(loss) for entry in backwards for loss in entry.fingerprint)

    def entries(self) -> list[tuple[int, Entry]]:
        """The entries that make the step, each with its number, in order."""
        also = [source.entry for source in (*(each for _, each in (*self.left, *self.updates)), *self.given.values())]
        numbers = entries_needed(self.tape.entries, self.tape.start, self.since, [*also, *self.edits])
        return [(number, self.tape[number]) for number in numbers]

    def called_from(self) -> tuple[CallLine, ...]:
        """The user's lines that call a watched model, each once."""
        calls = [entry for _, entry in self.entries() if entry.kind is EntryKind.MODULE and entry.place.code]
        regions = {entry.place: (entry.state.ambient.autocast_dtype, entry.gives) for entry in calls}
        return tuple(
            CallLine(
                file=place.file,
                line=place.line,
                function=place.function,
                code=place.text,
                autocast=str(dtype).removeprefix("torch.") if dtype is not None else "",
                tensors=gives,
            )
            for place, (dtype, gives) in list(regions.items())[:MOST_LINES]
        )

    def devices(self) -> set[torch.device]:
        """Returns the devices from whose generators the step's calls may draw."""
        states = (entry.state.random for _, entry in self.entries())
        return {device for state in states if state is not None for device in state.devices}

    def read_last(self) -> list[EarlierResult]:
        """Returns the results that are looked at when all of the step has run."""
        return [*(source for _, source in (*self.left, *self.updates)), *self.given.values()]

    def ran_through(self) -> bool:
        """Whether torch.func called a model in the loop's place, whose function may have read what no tape holds."""
        return any(entry.through is not None for _, entry in self.entries())

    def has_received(self) -> bool:
        """Whether what other ranks sent takes part in it, which a replay has only as it was."""
        return any(entry.received for _, entry in self.entries())

    def reduction(self) -> GradientReduction | None:
        """Returns what put the step's gradients together with those of other ranks; None where nothing did."""
        return process_group.reduction_of_step(self._synchronised_by(), self.collectives)

    def averaged_in(self) -> Any | None:
        """The process group over which ``DistributedDataParallel`` averaged its gradients; None where not."""
        return process_group.plain_group(self._synchronised_by())

    def _synchronised_by(self) -> list[nn.Module]:
        calls = [entry for _, entry in self.entries() if entry.is_training_call]
        wrappers = [entry.synchronised_by for entry in calls]
        inside = [synchronising(wrapper_of(part)) for entry in calls for part in list(entry.module.modules())[1:]]
        return [wrapper for wrapper in (*wrappers, *inside) if wrapper is not None]
