"""Tells those who observe a step what happens in it, in a declared order, each under its own guard."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, Concatenate, ParamSpec

from ampscope.capture.events import StepObserver
from ampscope.capture.step.own_work import OwnWork

P = ParamSpec("P")

#: For each event, who is told of it, in this order. `trace` writes the live trace down or drops it before `rows` says
#: of the step whether it was traced; a call that is lost is dropped from the trace before the tape looks what is left.
ORDER: dict[str, str] = {
    "step_began": "settings heal carried usage tape written live alive effect",
    "call_began": "tape live",
    "call_ended": "tape",
    "call_lost": "live tape failed",
    "backward_began": "usage tape live failed alive",
    "backward_ended": "live usage tape second failed alive",
    "gradients_complete": "live",
    "scaler_joined": "heal history usage effect",
    "scaler_call_began": "heal history usage",
    "scaler_call_ended": "heal tape usage history rows",
    "scaler_call_lost": "usage failed",
    "attempt_began": "written carried second",
    "bare_step": "usage",
    "optimizer_steps": "hidden second still ahead heal audit updates state rows spikes before trace alive",
    "weights_cast": "usage",
    "foreign_step": "alive",
    "region_switched_off": "effect",
    "step_ended": "trace audit rows usage state ahead carried failed heal alive effect",
    "scheduler_stepped": "usage",
    "abandoned": "live tape carried failed",
    "run_ended": "carried state failed audit heal alive effect",
}


class Observers:
    """The observers of a run's steps.

    Args:
        own: Leaves their work out of what is observed, and times it.
        parts: Each by the name that `ORDER` has for it; of what a run does not have, there is none.
    """

    def __init__(self, own: OwnWork, **parts: StepObserver) -> None:
        self._own = own
        self._told = {
            event: tuple(parts[name] for name in names.split() if name in parts) for event, names in ORDER.items()
        }

    def tell(self, event: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Tells of ``event``, a method of `StepObserver`, with its arguments.

        A fault in one observer breaks its guard, which reports it, and the others hear of the event all the same.
        """
        if self._own.thread != get_ident():
            with self._own:
                self.tell(event, *args, **kwargs)
            return
        name = event.__name__
        for observer in self._told[name]:
            try:  # as ``with observer.guard``, which is two calls more for each of some fifty a step
                getattr(observer, name)(*args, **kwargs)
            except BaseException as error:
                if not observer.guard.catches(error):
                    raise
