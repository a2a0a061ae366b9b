"""Tidies up a step that neither the loop nor AMPscope goes on with: an exception came in the midst of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ampscope.capture.events.observer import StepObserver
from ampscope.capture.hooks import left_behind
from ampscope.capture.replay.memory import collector
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.step.carried.listening.loop_mode import LoopMode
from ampscope.capture.step.cycle import StepCycle
from ampscope.capture.step.ending.endings import Endings
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.step.observers import Observers
from ampscope.capture.step.own_work import OwnWork
from ampscope.capture.torch_support.calls.threads import HomeThread
from ampscope.capture.torch_support.guard import surely
from ampscope.capture.tracing.program.module_stack import ModuleStack


class BreakingOff:
    """Gives the loop back what AMPscope's own work had put aside, wherever that was broken off.

    Args:
        own: The work.
        cycle: Where the step is.
        endings: How it ends.
        observers: Are told that it does not.
        live: The trace of the step in progress.
        tape: Listens to the loop within a step.
        between: Listens to it between two steps.
    """

    def __init__(
        self,
        own: OwnWork,
        cycle: StepCycle,
        endings: Endings,
        observers: Observers,
        live: LiveTrace,
        tape: StepTape,
        between: LoopMode,
    ) -> None:
        self._own = own
        self._cycle = cycle
        self._endings = endings
        self._observers = observers
        self._live = live
        self._tape = tape
        self._between = between

    def interrupted(self) -> None:
        """The loop's own exception came in between: the step in progress is given up."""
        collector.go_on()
        self._own.start_afresh()
        self._cycle.start_afresh()
        self._endings.start_afresh()
        if self._cycle.is_open:
            self._observers.tell(StepObserver.abandoned, "the step was interrupted")
        self._tape.mode.remove()
        self._between.remove()
        ModuleStack.remove_all()

    def leave_alone(self) -> None:
        """AMPscope itself has failed: nothing of it stays between the loop and torch."""
        own = self._own
        put_aside = (own.start_afresh, self._live.drop, self._between.remove, self._tape.stop, own.remove_modes)
        for leave in (collector.go_on, *put_aside):
            surely(leave)

    def leave_ended_loop(self) -> None:
        """Does as `leave_alone`, for a loop whose thread has ended, with its stacks."""
        self._between.let_go()
        self.leave_alone()

    def leaving(self, home: HomeThread) -> Callable[[], None]:
        """Chooses the function that takes AMPscope off the stacks of the loop's thread."""
        if home.goes_on_elsewhere:
            return partial(self.sweep_later, home)
        return self.leave_ended_loop if home.is_elsewhere else self.leave_alone

    def close_here(self) -> None:
        """The run is closed in this thread, while the loop may be in the midst of a step in its own."""
        self._own.leave_to_this_thread()
        self._tape.guard.broken = self._live.guard.broken = True  # what listens there passes on what it hears
        self._between.leave_off()

    def sweep_later(self, home: HomeThread) -> None:
        """Has what is on the stacks of the loop's thread taken away there, once it comes by after `close_here`."""
        if self._live.active or self._between.inserted or self._tape.mode.inserted or not self._live.sweep():
            left_behind.leave(self._is_swept, self._loop_ended, home)

    def _is_swept(self) -> bool:
        """Takes away what listens, in the loop's thread; returns whether all of it is gone."""
        self._live.drop()
        self._between.remove()
        self._tape.stop()
        return self._live.sweep() and not self._between.inserted and not self._tape.mode.inserted

    def _loop_ended(self) -> None:
        """The loop's thread has ended, with its stacks."""
        self._between.let_go()
        self._is_swept()
