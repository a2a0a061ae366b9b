"""Who is told of a step's events, in which order, and that one observer's fault keeps nothing from the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import ampscope
from ampscope.capture import assembly
from ampscope.capture.events import StepObserver
from ampscope.capture.step.observers import ORDER, Observers
from ampscope.capture.step.own_work import OwnWork
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.modes import Pause

EVENTS = {name for name, _ in inspect.getmembers(StepObserver, inspect.isfunction)}
NAMES = sorted({name for names in ORDER.values() for name in names.split()})


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StepObserver]:
    """The parts of a run that heals, by the names that it has for them."""
    made: dict[str, StepObserver] = {}

    class Noted(Observers):
        def __init__(self, own: OwnWork, **parts: StepObserver) -> None:
            made.update(parts)
            super().__init__(own, **parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "Observers", Noted)
        with ampscope.watch(nn.Linear(1, 1), dir=tmp_path_factory.mktemp("run"), quiet=True, heal=True):
            pass
    return made


def test_every_event_has_its_order() -> None:
    assert ORDER.keys() == EVENTS


def test_every_part_has_a_place_in_the_order(parts: dict[str, StepObserver]) -> None:
    assert sorted(parts) == NAMES, "a part of capture/assembly.py and its name in ORDER go together"


@pytest.mark.parametrize("name", NAMES)
def test_an_observer_is_told_of_what_it_answers_and_of_nothing_else(parts: dict[str, StepObserver], name: str) -> None:
    part = type(parts[name])
    answered = {event for event in EVENTS if getattr(part, event) is not getattr(StepObserver, event)}
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
    listening: dict[str, Any] = {name: Listening(name, heard, pause, faults.append) for name in NAMES}
    own = OwnWork(pause, str)
    Observers(own, **listening).tell(StepObserver.backward_ended)
    assert heard == [(name, True) for name in ORDER["backward_ended"].split()]
    assert len(faults) == 1
    assert [name for name, part in listening.items() if part.guard.broken] == ["usage"]
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
