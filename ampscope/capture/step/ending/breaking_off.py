"""What is left of a step when neither the loop nor AMPscope goes on with it: an exception came in the midst of it."""

from __future__ import annotations

from ampscope.capture.events.observer import StepObserver
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.step.carried.listening.loop_mode import LoopMode
from ampscope.capture.step.cycle import StepCycle
from ampscope.capture.step.ending.endings import Endings
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.step.observers import Observers
from ampscope.capture.step.own_work import OwnWork
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
        self._own.start_afresh()
        self._cycle.start_afresh()
        self._endings.start_afresh()
        if self._cycle.is_open:
            self._observers.tell(StepObserver.abandoned, "the step was interrupted")
        ModuleStack.remove_all()

    def leave_alone(self) -> None:
        """AMPscope itself has failed: nothing of it stays between the loop and torch."""
        own = self._own
        for leave in (own.start_afresh, self._live.drop, self._between.remove, self._tape.stop, own.remove_modes):
            surely(leave)
