"""Takes down the calls that a loop makes between two steps, and looks at what they have written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ampscope.capture.replay.tape.entry import EarlierResult
from ampscope.capture.step.carried.carried_tensors import Averages, Carried, Round, role_of
from ampscope.capture.step.carried.condition import Condition
from ampscope.capture.step.carried.listening import loop_position
from ampscope.capture.step.carried.listening.gap import Gap
from ampscope.capture.step.carried.listening.loop_mode import LoopMode
from ampscope.capture.step.carried.moved_weights import MovedWeights
from ampscope.capture.step.carried.written_between import WrittenBetween
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.calls import call_state
from ampscope.capture.torch_support.calls.pause import Pause
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.tracing.distinct.casts_before import CastsBefore
from ampscope.capture.tracing.statistics import stats


class BetweenSteps:
    """Listens between steps; see `loop_mode.CallKeeper`.

    Args:
        carried: Learns what the loop carries.
        averages: Learns what of that follows the watched models.
        condition: Learns what of that is finite.
        written: Finds out which call left something bad.
        moved: Finds out which call left a weight bad, where the loop moves these by itself.
        casts: Is told of casts between the first steps.
        pause: On while AMPscope's own code computes.
        guard: Catches faults of following the loop.

    Attributes:
        mode: Listens.
        calls: The loop made so many when it was listened to last.
    """

    def __init__(
        self,
        carried: Carried,
        averages: Averages,
        condition: Condition,
        written: WrittenBetween,
        moved: MovedWeights,
        casts: CastsBefore,
        pause: Pause,
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._casts = casts
        self._carried = carried
        self._averages = averages
        self._condition = condition
        self._written = written
        self._moved = moved
        self.mode = LoopMode(self, pause)
        self.calls = 0
        self._learning = True
        self._gap: Gap | None = None
        self._before: tuple[Gap, loop_position.Position | None] | None = None  # and where the step after it began

    def begin(self, *, learning: bool, moves: bool) -> None:
        """A step has ended: what follows until the next forward is between two steps.

        Args:
            learning: The loop is followed to learn what it carries.
            moves: It is about to move weights by itself.
        """
        self._learning = learning
        if self._gap is None:
            self._gap = Gap(call_state.device_types(), moves=moves, weights=self._averages.weights)
            if moves:
                self._gap.begin_with(self._moved.taken_over(), self._moved.before)
            self.mode.insert()

    def stop(self) -> Gap | None:
        """Stops listening; returns the calls that came."""
        self.mode.remove()
        gap, self._gap = self._gap, None
        return gap

    def before_write(self, func: Callable[..., Any], args: Any, kwargs: Any) -> dict[int, Tensor]:
        """See `loop_mode.CallKeeper`."""
        return self._gap.before_write(func, args, kwargs) if self._gap is not None else {}

    def called(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, originals: dict[int, Tensor]
    ) -> bool:
        """See `loop_mode.CallKeeper`."""
        gap = self._gap
        if self._learning:
            self._casts.called(func, args, kwargs, result)
        entry = gap.called(func, args, kwargs, result, originals) if gap is not None else None
        if gap is None or entry is None:
            return gap is not None
        for tensor in tensor_tree.tensors((args, kwargs)):
            self._carried.read(Round.GAP, tensor)
            name = self._condition.descent.label(tensor) or self._carried.name(tensor)
            if name:
                gap.names[id(tensor)] = name
        made = list(tensor_tree.tensors(kwargs.get("out", args[0] if args else None) if entry.in_place else result))
        for leaf, tensor in enumerate(made):
            if entry.in_place:
                self._carried.wrote(tensor)
            self._carried.made(Round.GAP, tensor, role_of(entry, leaf))
        self._condition.descent.called(func, args, kwargs, made, in_place=entry.in_place)
        return not gap.full

    # -- what came of it ----------------------------------------------------------------------------------------

    def end(self, *, run_ended: bool = False) -> None:
        """A step begins, or none will come: looks at what was written since the one before."""
        gap = self.stop()
        self._written.arrived(wait=run_ended)
        self._moved.look(gap, wait=run_ended)
        if gap is None:
            return
        self.calls = len(gap.positions)
        self._carried.round_ended(Round.GAP)
        if self._learning:
            self._averages.learn(gap.tape)
        here = None if run_ended else loop_position.here()
        self._written.look(gap, self._results(gap), here)
        self._written.look_for_stillness(gap)
        self._before = None if gap.holds_too_much() else (gap, here)
        self._written.arrived(wait=run_ended)
        self._condition.descent.sweep()

    def _results(self, gap: Gap) -> list[tuple[str, Tensor, EarlierResult]]:
        """Returns the named results that are still alive: a cache may be read for the first time much later."""
        found = []
        for tensor, source in gap.results():
            if source.entry < gap.taken_over:
                continue  # the step has looked at it
            name = self._carried.name(tensor) if tensor.requires_grad else self._carried.called(tensor)
            if name:
                found.append((name, tensor, source))
        return found

    def forget(self) -> None:
        """Forgets the latest calls: the step that came after them is over."""
        self._before = None

    def blame(self, read: set[int]) -> None:
        """Looks at what a step that has gone wrong read of the calls before it; waits for the device.

        Args:
            read: Identities of what it read.
        """
        if self._before is None:
            return
        gap, forward = self._before
        self._before = None

        self._written.arrived(wait=True)

        def is_bad(tensor: Tensor) -> bool:
            unknown = id(tensor) in read and not self._condition.descent.label(tensor)
            return unknown and not stats.finite(tensor)

        found = [result for result in self._results(gap) if is_bad(result[1])]
        if found:
            self._written.look(gap, found, forward)
            self._written.arrived(wait=True)

    def made_of_carried(self) -> set[int]:
        """Identities of what the latest calls made of what the loop carries."""
        if self._before is None:
            return set()
        return {id(tensor) for tensor in self._before[0].made_of(lambda each: bool(self._carried.name(each)))}
