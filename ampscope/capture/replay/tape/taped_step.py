"""Holds what it takes to run a step, or its last evaluation, again: its part of the tape, and the state before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from ampscope.capture.replay.draws import Drawn
from ampscope.capture.replay.state.state_snapshot import StateSnapshot
from ampscope.capture.replay.tape import dependencies
from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.entry import EarlierResult, Entry, EntryKind
from ampscope.capture.replay.tape.weight_writes import Update
from ampscope.capture.torch_support.communication import gradient_reduction
from ampscope.capture.torch_support.communication.gradient_reduction import GradientReduction, synchronising, wrapper_of
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.statistics.stats import finite
from ampscope.trace.evidence import CallLine

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
        written = dependencies.written_after_backward(self.tape.entries, self.tape.start, self.since)
        assigned = self.tape.results.assigned(models, self.since)
        if self.given or not (written or assigned):
            return None
        return self._replace(edits=written, given=assigned, edited=True)

    def with_updates(self, updates: Iterable[Update]) -> TapedStep:
        """The step with all that the loop has made of its gradients, to the ``updates`` of its weights."""
        written = dependencies.written_after_backward(self.tape.entries, self.tape.start, self.since)
        known = ((name, self.tape.earlier_result(tensor, overwrites=False)) for name, tensor in updates)
        return self._replace(edits=written, updates=tuple((name, source) for name, source in known if source))

    @property
    def gradients_at(self) -> int:
        """Number of the last entry that gave gradients."""
        return max(
            (number for number, entry in self.entries() if dependencies.gives_gradients(entry)), default=self.since
        )

    @property
    def losses_were_finite(self) -> bool:
        """Whether what its backward passes began from was finite."""
        backwards = (entry for _, entry in self.entries() if entry.kind is EntryKind.BACKWARD)
        return all(finite(loss) for entry in backwards for loss in entry.fingerprint)

    def entries(self) -> list[tuple[int, Entry]]:
        """The entries that make the step, each with its number, in order."""
        also = [source.entry for source in (*(each for _, each in (*self.left, *self.updates)), *self.given.values())]
        numbers = dependencies.needed(self.tape.entries, self.tape.start, self.since, [*also, *self.edits])
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
        return gradient_reduction.of_step(self._synchronised_by(), self.collectives)

    def averaged_in(self) -> Any | None:
        """The process group over which ``DistributedDataParallel`` averaged its gradients; None where not."""
        return gradient_reduction.plain_group(self._synchronised_by())

    def _synchronised_by(self) -> list[nn.Module]:
        calls = [entry for _, entry in self.entries() if entry.is_training_call]
        wrappers = [entry.synchronised_by for entry in calls]
        inside = [synchronising(wrapper_of(part)) for entry in calls for part in list(entry.module.modules())[1:]]
        return [wrapper for wrapper in (*wrappers, *inside) if wrapper is not None]
