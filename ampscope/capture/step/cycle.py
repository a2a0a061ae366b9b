"""Tracks where in its life a step is: one table of states, and what runs inside them for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import IntEnum, auto

from ampscope.capture.events import OpenStep

#: Attempts until which another optimizer is expected to show up.
FIRST_TURNS = 4
#: Steps in which is learned what forward does besides computing: change weights, draw from Python's generators.
LEARNED_STEPS = 2


class State(IntEnum):  # whose members are hashed in C
    """The states of a step."""

    IDLE = auto()  #: no watched forward has run since the last step ended
    FORWARD = auto()  #: forwards, loss code and backwards of the step; what the loop calls goes onto the tape
    GRADIENTS_READY = auto()  #: unscaling, clipping: nothing from here on is ever replayed
    BACKWARD = auto()  #: inside a backward
    STEPPING = auto()  #: inside an optimizer
    JUDGING = auto()  #: inside a replay of AMPscope's own


class Moment(IntEnum):
    """The moments that move a step from one state to the next."""

    BEGINS = auto()  #: the first watched forward
    CALLS = auto()  #: a watched forward, the first or a later one
    RUNS_BACKWARD = auto()
    IS_EMPTY = auto()  #: its only call was left by an exception
    HAS_GRADIENTS = auto()  #: ``unscale_`` or a step says that no more gradients will come
    ENDS = auto()  #: an optimizer has stepped, or was skipped


#: Every way from one state to another. A moment that a state does not list leaves it as it is: an optimizer of several
#: may step when another has ended the step already, and gradients are complete more than once.
TRANSITIONS: dict[State, dict[Moment, State]] = {
    State.IDLE: {Moment.BEGINS: State.FORWARD},
    State.FORWARD: {
        Moment.HAS_GRADIENTS: State.GRADIENTS_READY,
        Moment.IS_EMPTY: State.IDLE,
        Moment.ENDS: State.IDLE,
    },
    State.GRADIENTS_READY: {
        Moment.CALLS: State.FORWARD,
        Moment.RUNS_BACKWARD: State.FORWARD,
        Moment.IS_EMPTY: State.IDLE,
        Moment.ENDS: State.IDLE,
    },
}


class StepCycle:
    """The state of the step in progress."""

    def __init__(self) -> None:
        self.opened = OpenStep(0.0)  #: the step itself, the latest where none is open
        self.attempts = 0  #: of steps, in this process
        self._state = State.IDLE
        self.is_open = False  #: a watched forward has begun a step that no optimizer has ended
        self._inside: list[State] = []  # BACKWARD, STEPPING and JUDGING, the innermost last

    @property
    def state(self) -> State:
        """The state that the step is in now."""
        return self._inside[-1] if self._inside else self._state

    @property
    def is_learning(self) -> bool:
        """Whether this is one of the first steps, in which is learned what forward does besides computing."""
        return self.attempts < LEARNED_STEPS

    @property
    def is_early(self) -> bool:
        """Whether another optimizer is still expected to show up."""
        return self.attempts < FIRST_TURNS

    @property
    def is_busy(self) -> bool:
        """Whether calls belong to a backward, an optimizer or a replay, and not to the loop."""
        return bool(self._inside)

    def on(self, moment: Moment) -> bool:
        """Goes where `TRANSITIONS` leads; returns whether that is another state."""
        before, self._state = self._state, TRANSITIONS[self._state].get(moment, self._state)
        self.is_open = self._state is not State.IDLE
        self.attempts += moment is Moment.ENDS
        return self._state is not before

    @contextlib.contextmanager
    def inside(self, state: State) -> Iterator[None]:
        """Runs the body inside ``state``, and what lies around it goes on afterwards."""
        self.enter(state)
        try:
            yield
        finally:
            self.leave(state)

    def enter(self, state: State) -> None:
        """Marks what follows, until `leave`, as inside ``state``; as `inside`, where begin and end are two hooks."""
        self._inside.append(state)

    def leave(self, state: State) -> None:
        """Marks ``state`` as left; it may never have begun, or `start_afresh` has cleared it. Safe to call twice."""
        if state in self._inside:
            self._inside.remove(state)

    def start_afresh(self) -> None:
        """Forgets all that the step was inside of: an exception from outside has broken it off."""
        self._inside.clear()
