"""What a loop does between two steps: takes its calls down, and looks at what they have written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ampscope.capture.step.carried import loop_position
from ampscope.capture.step.carried.carried_tensors import Carried, Round, role_of
from ampscope.capture.step.carried.condition import Condition
from ampscope.capture.step.carried.gap import Gap
from ampscope.capture.step.carried.loop_mode import LoopMode
from ampscope.capture.step.carried.passing import Passing
from ampscope.capture.step.carried.written_between import WrittenBetween
from ampscope.capture.step.measures.state.held import largest_within
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
        condition: Learns what of that is finite.
        written: Finds out which call left something bad.
        casts: Is told of casts between the first steps.
        pause: On while AMPscope's own code computes.
        guard: Catches faults of following the loop.

    Attributes:
        mode: Listens.
    """

    def __init__(
        self,
        carried: Carried,
        condition: Condition,
        written: WrittenBetween,
        casts: CastsBefore,
        pause: Pause,
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._casts = casts
        self._carried = carried
        self._condition = condition
        self._written = written
        self._passing = Passing()
        self.mode = LoopMode(self, pause)
        self._learning = True
        self._gap: Gap | None = None
        self._before: tuple[Gap, loop_position.Position] | None = None  # and where the step after it began

    def begin(self, *, learning: bool) -> None:
        """A step has ended: what follows until the next forward is between two steps.

        Args:
            learning: The loop is followed to learn what it carries.
        """
        self._learning = learning
        if self._gap is None:
            self._gap = Gap(call_state.device_types())
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
            name = self._carried.name(tensor)
            if name:
                gap.names[id(tensor)] = name
        if entry.in_place:
            for tensor in tensor_tree.tensors(kwargs.get("out", args[0] if args else None)):
                self._carried.wrote(tensor)
            return not gap.full
        for leaf, tensor in enumerate(tensor_tree.tensors(result)):
            self._carried.made(Round.GAP, tensor, role_of(entry, leaf))
        return not gap.full

    # -- what came of it ----------------------------------------------------------------------------------------

    def end(self) -> None:
        """A step begins: looks at what was written since the one before."""
        gap = self.stop()
        self._arrived()
        self._condition.forget_derived()
        if gap is None:
            return
        self._carried.round_ended(Round.GAP)
        found = {name: (tensor, source) for tensor, source in gap.results() if (name := self._carried.name(tensor))}
        if self._learning:  # a cache may be read for the first time much later
            found |= self._passing.name_those(gap, self._is_passing, self._written.is_born)
        here = loop_position.here()
        self._written.look(gap, found, largest_within([tensor for tensor, _ in found.values()]), here)
        self._before = gap, here
        self._arrived()
        self._condition.follow(gap)

    def _arrived(self) -> None:
        looks = self._written.arrived()
        carried = {name: finite for name, finite in looks.items() if name not in self._passing}
        self._condition.turned(carried, self._written.is_born)

    def _is_passing(self, tensor: Tensor) -> bool:
        return not tensor.requires_grad and not self._carried.name(tensor)

    def forget(self) -> None:
        """The step that came after the latest calls is over."""
        self._before = None

    def blame(self, read: set[int]) -> dict[int, str]:
        """Looks at what a step that has gone wrong read of the calls before it; waits for the device.

        Args:
            read: Identities of what it read.

        Returns:
            Of those that the calls made bad, the names.
        """
        if self._before is None:
            return {}
        gap, forward = self._before
        self._before = None

        def is_bad(tensor: Tensor) -> bool:
            return id(tensor) in read and self._is_passing(tensor) and not stats.finite(tensor)

        found = self._passing.name_those(gap, is_bad, self._written.is_born)
        if found:
            self._written.look(gap, found, largest_within([tensor for tensor, _ in found.values()]), forward)
            self._written.arrived(wait=True)
        return {id(tensor): name for name, (tensor, _) in found.items() if self._written.is_born(name)}

    def passed_on(self, identity: int) -> str:
        """The name of a tensor that the calls made bad, though nothing is known to carry it."""
        name = self._passing.name_by_id(identity)
        return name if self._written.is_born(name) else ""

    def made_of_carried(self) -> set[int]:
        """Identities of what the latest calls made of what the loop carries."""
        if self._before is None:
            return set()
        return {id(tensor) for tensor in self._before[0].made_of(lambda each: bool(self._carried.name(each)))}
