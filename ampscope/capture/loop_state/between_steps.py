"""Tensors that a loop carries are followed between steps: who wrote them last, and since when they are not finite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ampscope.capture.changes.replay_results import ReplayResult
from ampscope.capture.events import EndedStep, RunEnd, StepAttempt, StepObserver, StepStart
from ampscope.capture.loop_state import loop_calls
from ampscope.capture.loop_state.bad_writes import IncidentReport, MovedWeights, WrittenBetween
from ampscope.capture.loop_state.loop_calls import Gap
from ampscope.capture.loop_state.loop_mode import Following, LoopMode
from ampscope.capture.loop_state.loop_tensors import Averages, Carried, Condition, Round, buffer_name, role_of
from ampscope.capture.loop_state.operand_origins import OperandOrigins
from ampscope.capture.loop_state.within_step import WithinStep
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.rerun.engine import RerunEngine
from ampscope.capture.rerun.obstacles import WEIGHTS_HAD_MOVED
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.tape.tape_entry import EarlierResult
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support import call_state, tensor_tree, torch_private
from ampscope.capture.torch_support.function_names import targets
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.modes import Pause
from ampscope.capture.tracing import light_statistics
from ampscope.capture.tracing.distinct_values import CastsBefore
from ampscope.trace.schema import ReplayStatus, Trigger


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
        heard: It was listened to before the step in progress.
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
        self.heard = False
        self._learning = True
        self._gap: Gap | None = None
        self._before: tuple[Gap, loop_calls.Position | None] | None = None  # and where the step after it began

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
        made = targets(args, kwargs) if entry.in_place else list(tensor_tree.tensors(result))
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
        self.heard = gap is not None
        self._written.arrived(wait=run_ended)
        self._moved.look(gap, wait=run_ended)
        if gap is None:
            return
        self.calls = len(gap.positions)
        self._carried.round_ended(Round.GAP)
        if self._learning:
            self._averages.learn(gap.tape)
        here = None if run_ended else loop_calls.position_here()
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
            return unknown and not light_statistics.finite(tensor)

        found = [result for result in self._results(gap) if is_bad(result[1])]
        if found:
            self._written.look(gap, found, forward)
            self._written.arrived(wait=True)

    @property
    def before(self) -> Gap | None:
        """The latest calls, as long as they are kept."""
        return self._before[0] if self._before is not None else None

    def made_of_carried(self) -> set[int]:
        """Identities of what the latest calls made of what the loop carries."""
        if self._before is None:
            return set()
        return {id(tensor) for tensor in self._before[0].made_of(lambda each: bool(self._carried.name(each)))}


class CarriedState(StepObserver):
    """The tensors that a loop carries, between its steps and within them.

    A loop that carries nothing is listened to between its first steps only.

    Args:
        engine: Runs calls again.
        tape: The tape of the step in progress.
        recorder: Where rows go.
        report: Is told of weights that the loop has left bad.
        casts: Is told of casts between the first steps.
        pause: On while AMPscope's own code computes.

    Attributes:
        mode: Listens between steps.
        averages: What the loop keeps of the models.
    """

    def __init__(
        self,
        engine: RerunEngine,
        tape: StepTape,
        recorder: Recorder,
        report: IncidentReport,
        casts: CastsBefore,
        pause: Pause,
    ) -> None:
        self.guard = guard = engine.guard
        self._models = models = engine.models
        self._carried = Carried(partial(buffer_name, models))
        self.averages = Averages(models)
        self._condition = Condition()
        self._written = WrittenBetween(engine, self._condition, recorder, self._carried.name)
        self._following = Following(models)
        self._moved = MovedWeights(engine, tape, recorder, report)
        learns = self._carried, self.averages, self._condition
        self._between = BetweenSteps(*learns, self._written, self._moved, casts, pause, guard)
        self._within = WithinStep(tape, self._carried, self._condition, self._written)
        self._origins = OperandOrigins(models)
        self.mode = self._between.mode

    @property
    def _follows(self) -> bool:
        carries = bool(self._carried)
        return self._following.is_on(carries=carries, suspects=bool(self._condition), makes=bool(self._origins.known))

    def step_ended(self, ended: EndedStep) -> None:
        """Begins to listen between two steps, where the loop is followed; the next forward ends it."""
        self._following.step_ended(ended.number + 1, bad=ended.attempt.bad)
        self._between.forget()
        self._written.after(ended.attempt)
        may_listen = (self._follows or ended.attempt.by_hand) and self._following.may_listen()
        moves = may_listen and self._moved.begin(ended.attempt)
        suspects, makes = bool(self._condition), bool(self._origins.known)
        heard = self._following.hears(self._between.calls, suspects=suspects, makes=makes)
        if may_listen and (moves or (self._follows and heard)):
            self._between.begin(learning=self._following.learning, moves=moves)

    def step_began(self, start: StepStart) -> None:
        """Looks at what was written between the steps."""
        self._within.begin()
        self._between.end()

    def attempt_began(self, attempt: StepAttempt) -> None:
        """Notes which carried tensors the step has read, and looks at those that it has made or written."""
        if not self._follows:
            self._within.look_at_attributes(attempt.step)
            return
        scale, _ = torch_private.scaler_tensors(attempt.opened.scaler)
        self._within.note_reads(but=scale)
        if self._following.learning and (gap := self._between.before) is not None:
            self._origins.learn(gap, self._within.entries(), attempt.step)
        self._following.idle = 0 if self._within.names or self._is_of_use() else self._following.idle + 1
        self._within.look_at_writes(attempt.step)

    def _is_of_use(self) -> bool:
        """Whether the step may read what was made, between the steps, of what the loop carries; asked now and then."""
        if self._following.idle % 8 != 7:
            return False
        if not self._following.hears(self._between.calls, suspects=bool(self._condition), makes=False):
            return False  # it is listened to for what it makes alone
        made = self._between.made_of_carried()
        return bool(made) and not made.isdisjoint(self._within.outside() | self._models.parameters.keys())

    def suffered(self) -> None:
        """The step in progress has gone wrong: looks at what it read of the calls before it; waits for the device."""
        self._moved.arrived(wait=True)
        self._within.arrived(wait=True)
        self._between.blame(self._within.outside())
        self._within.note_descent()

    def turned_bad(self) -> Trigger | None:
        """Returns why the carried state that the step has left, or found, is to be looked at, if it is; told once."""
        if self._within.has_left_bad():
            return Trigger.NONFINITE_CARRIED
        return Trigger.CARRIED_READ if self._within.take_read() else None

    def to_be_told(self, attempt: StepAttempt) -> Callable[[], None]:
        """The weights move before the host knows what the step has left: takes that down when it is called; waits."""
        left = self._within.to_be_told()

        def told() -> None:
            self._written.hold(attempt, left(), ReplayResult(ReplayStatus.UNAVAILABLE, WEIGHTS_HAD_MOVED))

        return told

    def completed(self, recording: TapedStep) -> TapedStep:
        """Adds to a recording of a step, from which it can be run again, what is known of the carried tensors in it."""
        within, made_before = self._within, {} if self._between.heard else self._origins.known
        return recording._replace(
            carried=within.names,
            left=within.left,
            left_in_attributes=within.left_in_attributes,
            made_before=made_before,
        )

    def judged(self, attempt: StepAttempt) -> None:
        """A step was looked at; if it went wrong, who wrote what it had read is told, too."""
        if attempt.bad:
            self._written.failed(self._within.labels)
        else:
            labels = {*dict(self._within.left), *self._within.left_in_attributes.values()}
            self._written.hold(attempt, labels, ReplayResult(ReplayStatus.EXACT))  # its replay is traced
        self._within.left, self._within.left_in_attributes = (), {}

    def abandoned(self, reason: str) -> None:
        """Stops listening."""
        self._between.stop()
        self._moved.forget()

    def run_ended(self, end: RunEnd) -> None:
        """Tells of writes that left an average of the model bad for good, though no step has read it; waits."""
        self._between.end(run_ended=True)
        bad = [held.tensor for held in self.averages.held() if not light_statistics.finite(held.tensor)]
        self._written.remained({self._condition.descent.label(tensor) for tensor in bad} - {""})
