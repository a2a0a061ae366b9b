"""Who is told of a step's events, in which order, and that one observer's fault keeps nothing from the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from ampscope.capture.checks.hidden_overflow import HiddenOverflow
from ampscope.capture.checks.loss_spikes import SpikeEnding
from ampscope.capture.checks.not_training import Liveness
from ampscope.capture.checks.second_look import SecondLook
from ampscope.capture.checks.step_audit import Audit
from ampscope.capture.checks.still_buffers import StillBuffers
from ampscope.capture.checks.still_updates import StillUpdates
from ampscope.capture.events import StepObserver
from ampscope.capture.heal.healer import Healer
from ampscope.capture.loop_state.between_steps import CarriedState
from ampscope.capture.loop_state.held_state import WrittenState
from ampscope.capture.loop_state.state_watch import StateWatch
from ampscope.capture.record.configuration import Configuration
from ampscope.capture.rerun.optimizer_rerun import OptimizersBefore
from ampscope.capture.step.failed_calls import FailedCalls
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.step.observers import ORDER, Observers
from ampscope.capture.step.own_work import OwnWork
from ampscope.capture.step.scaler_history import ScalerHistory
from ampscope.capture.step.step_rows import StepRows, TraceEnding
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.modes import Pause
from ampscope.capture.usage.amp_effect import AmpEffect
from ampscope.capture.usage.usage_watch import UsageWatch

EVENTS = {name for name, _ in inspect.getmembers(StepObserver, inspect.isfunction)}
PARTS: dict[str, type[StepObserver]] = {
    "settings": Configuration,
    "tape": StepTape,
    "live": LiveTrace,
    "written": WrittenState,
    "carried": CarriedState,
    "state": StateWatch,
    "still": StillBuffers,
    "updates": StillUpdates,
    "usage": UsageWatch,
    "rows": StepRows,
    "history": ScalerHistory,
    "hidden": HiddenOverflow,
    "second": SecondLook,
    "trace": TraceEnding,
    "spikes": SpikeEnding,
    "failed": FailedCalls,
    "before": OptimizersBefore,
    "audit": Audit,
    "heal": Healer,
    "alive": Liveness,
    "effect": AmpEffect,
}


def test_every_event_has_its_order() -> None:
    assert ORDER.keys() == EVENTS


@pytest.mark.parametrize("name", PARTS)
def test_an_observer_is_told_of_what_it_answers_and_of_nothing_else(name: str) -> None:
    answered = EVENTS & vars(PARTS[name]).keys()
    assert {event for event, names in ORDER.items() if name in names.split()} == answered


class Listening(StepObserver):
    """Notes what it is told, and fails where it should."""

    def __init__(self, name: str, heard: list[tuple[str, bool]], pause: Pause, on_fault: Callable[[str], None]) -> None:
        self.guard = Guard(name, on_fault)
        self._name = name
        self._heard = heard
        self._pause = pause

    def backward_ended(self) -> None:
        self._heard.append((self._name, self._pause.on))
        if self._name == "usage":
            raise ArithmeticError("on purpose")


@pytest.mark.filterwarnings("ignore:ampscope. usage switched itself off")
def test_a_fault_breaks_one_observer_and_the_others_hear_all_the_same() -> None:
    heard: list[tuple[str, bool]] = []
    faults: list[str] = []
    pause = Pause()
    parts: dict[str, Any] = {name: Listening(name, heard, pause, faults.append) for name in PARTS}
    own = OwnWork(pause, str)
    Observers(own, **parts).tell(StepObserver.backward_ended)
    assert heard == [(name, True) for name in ORDER["backward_ended"].split()]
    assert len(faults) == 1
    assert [name for name, part in parts.items() if part.guard.broken] == ["usage"]
    assert not pause.on
    assert own.seconds > 0


def test_own_work_inside_own_work_is_one_stretch() -> None:
    pause = Pause()
    own = OwnWork(pause, str)
    on = []
    with own:
        with own:
            on.append(pause.on)
        on.append(pause.on)
    on.append(pause.on)
    assert on == [True, True, False]
    taken = own.seconds
    own.start_over()
    assert own.seconds == 0.0 < taken


def test_observers_hear_where_own_work_was_broken_off_as_it_was_entered() -> None:
    """A signal may come at its last line: it counts as entered, and whose thread it is was not taken down."""
    heard: list[tuple[str, bool]] = []
    faults: list[str] = []
    pause = Pause()
    own = OwnWork(pause, str)
    own.__enter__()
    own.thread = None
    Observers(own, usage=Listening("of usage", heard, pause, faults.append)).tell(StepObserver.backward_ended)
    own.start_afresh()
    assert heard == [("of usage", True)]
    assert not pause.on
    assert not faults
