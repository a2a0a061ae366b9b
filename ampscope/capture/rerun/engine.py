"""The engine runs steps again: it refuses what must not be run, bounds memory, pays the time, restores everything."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.changes.replay_results import ChangedResult, ReplayResult, Symptom
from ampscope.capture.isolation import memory
from ampscope.capture.isolation.device_asserts import OutOfRangeError
from ampscope.capture.isolation.write_guard import AddressError
from ampscope.capture.rerun import fidelity, obstacles
from ampscope.capture.rerun.optimizer_rerun import Copied
from ampscope.capture.rerun.player import Player, call_user
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.torch_support.guard import Guard, Suppressed
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.own_collectives import CommunicationError
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.tracing.batch_rows import BatchRows
from ampscope.capture.tracing.operand_keeper import OpListener
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import ReplayStatus, Trial

#: Program points of runs that are not recorded which are remembered; a program may make its code as it runs.
MOST_SITES = 20_000
_NO_SITES = Sites(0, str)


class LookDepth(Enum):
    """How much of a run is observed."""

    NONE = auto()  #: nothing: how long it takes is asked
    RESULT = auto()  #: ops, by which a change finds its place; their records are let go
    ROWS = auto()  #: ops with their extremes, whose records are read and not written
    RECORDED = auto()  #: the same, to be written
    FULL = auto()  #: ops with every statistic, to be written


class Rerun(NamedTuple):
    """A request to run a step again."""

    step: TapedStep
    change: ReplayChange
    look: LookDepth = LookDepth.RESULT
    real: Symptom | None = None  #: what was bad in the real step, with which a faithful run is compared
    after_good_step: bool = False  #: the step before it ended with finite gradients
    is_brief: bool = False  #: backward is not observed, and not begun from a loss that is not finite
    asked_for: frozenset[str] = frozenset()  #: parameters whose gradients are marked in the trace
    keeper: Callable[[Tracer], OpListener | None] = lambda _: None  #: makes what is told of each op
    player: type[Player] = Player
    sink: Callable[[Player], object] = lambda _: None  #: is shown a run that succeeded, before it is let go
    share_of_room: int = 1  #: its forward may give one in so many of the bytes that are free
    label: tuple[int, str] = (0, "")  #: step and execution that its records are of
    is_paid: bool = True  #: its time is that of the replays' budget, and was not asked for by itself
    wants_gradients: bool = False  #: those that its calls alone give, free of the loss scale


def for_gradients(
    step: TapedStep, change: ReplayChange, look: LookDepth = LookDepth.RESULT, asked_for: frozenset[str] = frozenset()
) -> Rerun:
    """Asks for a step with finite gradients once more, as it was or changed, for the gradients themselves."""
    return Rerun(step, change, look, asked_for=asked_for, wants_gradients=True)


@dataclass
class Ran:
    """The outcome of a run; nothing of the training is different after it."""

    gradients: dict[str, Tensor] = field(default_factory=dict)  #: by parameter, unscaled; where they were asked for
    reason: str = ""  #: why it could not be run; empty where it was
    outcome: Trial = Trial.UNAVAILABLE  #: whether losses, gradients and the buffers that it found finite are so
    differences: tuple[str, ...] = ()  #: between a faithful run and the real step, in words
    loss: float | None = None  #: mean of the losses that are single numbers, scaled where the step is
    scale: float = 1.0  #: the loss scale that it ran with
    seconds: float = 0.0
    replay: ReplayResult | None = None  #: the comparison with the real step, where that was asked for
    rows: TracedRows = field(default_factory=lambda: TracedRows([], [], _NO_SITES))  #: where they are to be read

    @property
    def result(self) -> ChangedResult:
        """The outcome as that of a change."""
        return ChangedResult(self.outcome, self.reason or "; ".join(self.differences), self.loss, self.seconds)

    def result_if(self, *, cured: bool) -> ChangedResult:
        """The outcome as that of a change that is to do something else than to come out finite."""
        done = Trial.FINITE if cured else Trial.NONFINITE
        return ChangedResult(Trial.UNAVAILABLE if self.reason else done, self.reason, self.loss, self.seconds)


#: Makes an optimizer's step again, on copies: `StepAgain.made` with all but the models.
Make = Callable[[Models], Copied | None]


class _Unobserved(Tracer):
    """Sees nothing of what runs."""

    @contextlib.contextmanager
    def active(self) -> Iterator[Tracer]:
        """See `Tracer.active`; observes nothing."""
        yield self

    def name_entry(self, *_: Any) -> None:
        """See `Tracer.name_entry`."""

    def sink(self, *_: Any, **__: Any) -> None:
        """See `Tracer.sink`."""


class RerunEngine:
    """Runs steps again, one request at a time.

    Args:
        models: The watched models.
        sites: Numbers the program points of what may be recorded.
        budget: Is told of the time that runs take.
        guard: Catches faults of the tracer.
        judging: Makes the state that a step is in while it is run again.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(
        self,
        models: Models,
        sites: Sites,
        budget: ReplayBudget,
        guard: Guard,
        judging: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.models = models
        self.sites = sites
        self.budget = budget
        self.guard = guard
        self._judging = judging
        self._unrecorded = Sites(0, models.module_type)

    def under(self, guard: Guard) -> RerunEngine:
        """Makes an engine whose faults are those of another part."""
        return RerunEngine(self.models, self.sites, self.budget, guard, self._judging)

    def tracer(self, look: LookDepth) -> Tracer:
        """Makes the tracer of one run."""
        if len(self._unrecorded) > MOST_SITES:
            self._unrecorded = Sites(0, self.models.module_type)
        recorded = look in (LookDepth.RECORDED, LookDepth.FULL)
        kind = _Unobserved if look is LookDepth.NONE else Tracer
        sites = self.sites if recorded else self._unrecorded
        stops = (call_user.__code__,)
        tracer = kind(sites, self.models.names, full=look is LookDepth.FULL, guard=self.guard, stops=stops)
        tracer.outputs.sums = recorded
        return tracer

    def run(self, rerun: Rerun) -> Ran:
        """Runs a step again, or says why that must not be."""
        memory.trim(self.models)
        reason = obstacles.why_not(rerun.step, self.models)
        if rerun.real is not None:
            reason = reason or obstacles.lost_weights(rerun.step, self.models)
        if reason := reason or memory.obstacle(self.models):
            return Ran(reason=reason, replay=ReplayResult(ReplayStatus.UNAVAILABLE, reason))
        started, tracer = self.clock(), self.tracer(rerun.look)
        tracer.keeper = rerun.keeper(tracer)
        with self._judging():
            ran = self._run(rerun, tracer)
        ran.seconds = self.clock() - started
        if ran.replay is not None:
            ran.replay.seconds, ran.replay.bad_rows = ran.seconds, tracer.bad_rows
        if rerun.look not in (LookDepth.NONE, LookDepth.RESULT):
            ran.rows = TracedRows(*tracer.rows(*rerun.label), tracer.points.sites)
        tracer.release()
        if rerun.is_paid:
            self.budget.spent(ran.seconds)
        return ran

    def step(self, make: Make) -> Copied | None:
        """Makes an optimizer's step again; None where that cannot be."""
        started = self.clock()
        with self._judging():
            copied = make(self.models)
        self.budget.spent(self.clock() - started)
        return copied

    def _run(self, rerun: Rerun, tracer: Tracer) -> Ran:
        step, change, real = rerun.step, rerun.change, rerun.real
        batch = tracer.batch = BatchRows(tracer.unseen) if real is not None and not real else None
        player = rerun.player(step, self.models, tracer, change, asked_for=rerun.asked_for, is_brief=rerun.is_brief)
        failed = self._played(player, rerun)
        if failed:
            return Ran(reason=failed, replay=ReplayResult(ReplayStatus.UNAVAILABLE, failed))
        replay = None
        if real is not None:
            replay = fidelity.compared(player, tracer, real, step, after_good_step=rerun.after_good_step)
            replay.finite = player.finite
        if replay is not None and batch is not None:
            replay.few_rows, replay.standing_out = batch.few(), batch.standing_out
        rerun.sink(player)
        scale = change.scale or step.scale or 1.0
        return Ran(
            _unscaled(player, scale) if rerun.wants_gradients else {},
            outcome=Trial.FINITE if player.finite and not player.spoilt else Trial.NONFINITE,
            differences=tuple(dict.fromkeys(player.differences.found)),
            loss=_mean_loss(player),
            scale=scale,
            replay=replay,
        )

    def _played(self, player: Player, rerun: Rerun) -> str:
        """Plays; returns why it could not be done, empty when it could.

        The same calls as the training's need no bound: it has had room for them.
        """
        room = memory.room(self.models.main_device()) if rerun.real is None else None
        bounded = memory.Bounded(room // rerun.share_of_room) if room is not None else contextlib.nullcontext()
        with Suppressed() as suppressed, memory.collector_resting(), bounded:
            player.play()
        memory.trim(self.models)
        if suppressed.error is None:
            return ""
        memory.give_back(suppressed.error)
        if isinstance(suppressed.error, (CommunicationError, memory.NoRoomError, OutOfRangeError, AddressError)):
            return str(suppressed.error)
        said = (str(suppressed.error).splitlines() or [""])[0][:200]
        return f"{type(suppressed.error).__name__} while replaying: {said}"


def _unscaled(player: Player, scale: float) -> dict[str, Tensor]:
    found = {name: local(gradient).detach() for name, gradient in player.gradients().items()}
    return found if scale == 1.0 else {name: gradient.float() / scale for name, gradient in found.items()}


def _mean_loss(player: Player) -> float | None:
    scalars = [float(loss) for loss in player.losses if loss.numel() == 1]
    return sum(scalars) / len(scalars) if scalars else None
