"""Trainings that take turns: blocks of steps of one and of the other, also where a framework runs the loop."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from stages import Block
from torch.utils.data import IterableDataset

#: Steps at a run's start that are not timed.
EARLY = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How many timed steps, and in which blocks."""

    steps: int
    block: int

    @property
    def rounds(self) -> int:
        return max(2, self.steps // self.block)

    @property
    def all_steps(self) -> int:
        return EARLY + self.rounds * self.block + 1  # at the last one, a training ends


class Runs(Protocol):
    """A training that can be had in pieces."""

    def run(self, steps: int) -> None: ...

    def finish(self) -> None: ...


def take_turns(trainings: dict[str, Runs], plan: Plan) -> dict[str, list[Block]]:
    """How long a step of each training took, block by block."""
    for training in trainings.values():
        training.run(EARLY)
    took: dict[str, list[Block]] = {name: [] for name in trainings}
    order = list(trainings)
    for _ in range(plan.rounds):
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            trainings[name].run(plan.block)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            took[name].append(Block(wall / plan.block, cpu / plan.block))
        order.reverse()
    for training in trainings.values():
        training.finish()
    return took


def ratios(took: dict[str, list[Block]], clock: str) -> list[float]:
    """Quartiles of the rounds' ratios, watched to unwatched; ``clock`` is ``wall`` or ``cpu``."""
    pairs = zip(took["watched"], took["unwatched"], strict=True)
    return statistics.quantiles((getattr(ours, clock) / getattr(theirs, clock) for ours, theirs in pairs), n=4)


class Turns(IterableDataset[Any]):
    """Batches for a training in a thread of its own; the next one comes when it is its turn.

    Args:
        batch: What it gets at each step.
        plan: How many there are.
    """

    def __init__(self, batch: Any, plan: Plan) -> None:
        self._batch = batch
        self._count = plan.all_steps
        self._left = 0
        self._go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            if not self._left:
                self._waits.release()
                self._go.acquire()
            self._left -= 1
            yield self._batch

    def begin(self, train: Callable[[], object]) -> None:
        """Starts the training; returns when it asks for its first batch."""

        def trains() -> None:
            try:
                train()
            except BaseException as error:
                self._failure = error
                raise
            finally:
                self._waits.release()

        self._thread = threading.Thread(target=trains, daemon=True)
        self._thread.start()
        self._waits.acquire()

    def run(self, steps: int) -> None:
        """Lets the training make some steps."""
        self._left = steps
        self._go.release()
        self._waits.acquire()
        if self._failure is not None:
            raise RuntimeError("a training failed") from self._failure

    def finish(self) -> None:
        """Lets the training make its last step and end."""
        self.run(1)
        if self._thread is not None:
            self._thread.join()
