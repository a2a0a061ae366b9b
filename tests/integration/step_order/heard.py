"""Notes what a run's parts hear of its steps, and how its cycle moves, while a loop trains.

Before each part a spy is told, and returns at once: nothing of a test stands between capture and the user's frame,
which capture looks for on the stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ampscope
from ampscope.capture import budgets
from ampscope.capture.step.cycle import Moment, State, StepCycle
from ampscope.capture.step.observers import Observers

#: Who hears of an event before the first part, or moves the cycle; torch, which says by itself that an optimizer steps.
LOOP, CYCLE, TORCH = "the loop", "the cycle", "torch"
ENTERS, LEAVES, STEPS = "enters", "leaves", "steps"


class Heard(NamedTuple):
    """One thing that happened in a run.

    Attributes:
        who: A part by its name in `ORDER`; `LOOP` as an event comes up; `CYCLE` as the step's state moves; `TORCH`
            before anybody else is told of an optimizer's step.
        what: The event, the moment, that a state is entered or left, or `STEPS`.
        state: The step's, by then.
        about: The event's first argument; of the cycle what it went inside of, or the state that a moment came in.
    """

    who: str
    what: str
    state: State
    about: Any = None


class Log(list[Heard]):
    """All that was heard in one run, in order."""

    parts: tuple[str, ...] = ()  #: those that the run has

    def events(self) -> list[Heard]:
        """Returns the events alone, each once."""
        return [heard for heard in self if heard.who == LOOP]

    def told(self) -> str:
        """Returns the events as text, a line each with the state of the step; and what it goes inside of.

        Replays in a row, of which there are as many as time allows, are told as one.
        """
        text = "\n".join(line for heard in self if (line := _line(heard)))
        again = "leaves JUDGING\nenters JUDGING\n"
        return text.replace(again, "")


def _line(heard: Heard) -> str:
    if heard.who == CYCLE:
        return f"{heard.what} {heard.about.name}" if heard.what in (ENTERS, LEAVES) else ""
    if heard.who != LOOP:
        return ""
    method = f" {heard.about.method}" if heard.what.startswith("scaler_call") else ""
    return f"{heard.state.name:16} {heard.what}{method}"


class _Spy:
    """Stands before a part, and notes whatever that is told."""

    def __init__(self, part: str, cycle: StepCycle, log: Log) -> None:
        self._part, self._cycle, self._log = part, cycle, log

    def __getattr__(self, event: str) -> Callable[..., None]:
        return partial(self._note, event)

    def _note(self, event: str, *args: Any) -> None:
        self._log.append(Heard(self._part, event, self._cycle.state, args[0] if args else None))


class _NotedCycle(StepCycle):
    """A cycle that notes its moments, and what it is inside of."""

    log: Log

    def on(self, moment: Moment) -> bool:
        before = self._state
        moved = super().on(moment)
        self.log.append(Heard(CYCLE, moment.name, self._state, before))
        return moved

    def enter(self, state: State) -> None:
        super().enter(state)
        self.log.append(Heard(CYCLE, ENTERS, self.state, state))

    def leave(self, state: State) -> None:
        if state in self._inside:
            self.log.append(Heard(CYCLE, LEAVES, self.state, state))
        super().leave(state)


@dataclass
class Trained:
    """What was heard while loops trained."""

    logs: list[Log] = field(default_factory=list)  #: one for each run
    steps: int = 0  #: of optimizers, as torch's own hook counts them from the first watch on


@contextlib.contextmanager
def heard() -> Iterator[Trained]:
    """Gives what is heard of every run that is watched while the body runs."""
    trained = Trained()
    cycles: list[_NotedCycle] = []

    def cycle() -> _NotedCycle:
        cycles.append(_NotedCycle())
        trained.logs.append(Log())
        cycles[-1].log = trained.logs[-1]
        return cycles[-1]

    def observers(own: Any, **parts: Any) -> Observers:
        log, made = trained.logs[-1], Observers(own, **parts)
        names = {id(part): name for name, part in parts.items()}
        log.parts = tuple(parts)
        spies: Any = {name: _Spy(name, cycles[-1], log) for name in (LOOP, *parts)}
        made._told = {
            event: (spies[LOOP], *(each for part in told for each in (spies[names[id(part)]], part)))
            for event, told in made._told.items()
        }
        return made

    def steps(optimizer: Any, *_: Any) -> None:
        for each in cycles:
            each.log.append(Heard(TORCH, STEPS, each.state, optimizer))

    def stepped(*_: Any) -> None:
        trained.steps += bool(trained.logs)

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr("ampscope.capture.assembly.StepCycle", cycle)
        patch.setattr("ampscope.capture.assembly.Observers", observers)
        stack.callback(register_optimizer_step_pre_hook(steps).remove)
        stack.callback(register_optimizer_step_post_hook(stepped).remove)
        yield trained


def train(loop: Callable[[Callable[..., Any]], Any], folder: Path) -> Trained:
    """Trains ``loop``, and closes what it has watched."""
    scopes: list[ampscope.Scope] = []

    def watch(*args: Any, **options: Any) -> ampscope.Scope:
        scopes.append(ampscope.watch(*args, **{"dir": folder / str(len(scopes)), "quiet": True, **options}))
        return scopes[-1]

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch, heard() as trained:
        patch.setattr(budgets.ReplayBudget, "_within_share", lambda *_: True)  # on a busy machine too
        try:
            loop(watch)
        finally:
            for scope in scopes:
                scope.close()
    return trained
