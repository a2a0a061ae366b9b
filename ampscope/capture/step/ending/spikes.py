"""Takes down steps whose loss or gradient norm is finite, but far out of its band: which rows and weights made it."""

from __future__ import annotations

import json
from typing import Any

from ampscope.capture.events.observer import StepObserver
from ampscope.capture.events.open_step import StepAttempt
from ampscope.capture.replay.results import ReplayResult
from ampscope.capture.replay.step_tape import StepTape
from ampscope.capture.step.cycle import State, StepCycle
from ampscope.capture.step.ending.incidents import Incidents
from ampscope.capture.step.ending.looks.again import Again
from ampscope.capture.step.ending.looks.overshoot import Overshoot
from ampscope.capture.step.measures import gradients
from ampscope.capture.step.measures.spikes import Band, Spike
from ampscope.capture.torch_support.models import Models
from ampscope.trace.schema import EventKind, ReplayStatus, StepRow

#: Spikes that are taken down; a run with more is a noisy one.
MOST = 32
#: Parameters that are named, those with the largest gradients.
MOST_PARAMETERS = 3
_TOO_LATE = "its numbers reached the host only after the optimizer had moved the weights"

Bands = dict[str, Band]


class SpikeEnding(StepObserver):
    """Compares each step with the good ones before it, and runs one that is far out again before the weights move.

    Args:
        again: Runs steps again with a smaller step of the optimizer; the models, and where a spike is taken down.
        incidents: Runs steps again.
        tape: What that needs.
        cycle: Where the step is.
    """

    def __init__(self, again: Again, incidents: Incidents, tape: StepTape, cycle: StepCycle) -> None:
        self.guard = again.guard
        self._models = again.models
        self._recorder = again.recorder
        self._incidents = incidents
        self._tape = tape
        self._cycle = cycle
        self._overshoot = Overshoot(again)
        self._bands: dict[int, Bands] = {}  # of each optimizer: its loss and its gradient norm
        self._told = 0

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """The optimizer is about to move the weights: the last moment at which the step can be run again."""
        if attempt.bad or attempt.on_device:
            return
        loss = attempt.opened.known_loss()
        self._look_at_growth(attempt, loss)
        norm = attempt.norm_before_clipping
        if norm is None:
            norm = attempt.opened.norms.get(id(attempt.optimizer))
        # Whoever decided that the optimizer may step has waited for the gradients, and so for their norm.
        size = None if norm is None else attempt.opened.number(norm)
        found = self._far_out(attempt.index, loss, size)
        if found:
            with self._cycle.inside(State.JUDGING):
                outcome = self._incidents.look(attempt, None if self._tape.guard.broken else self._tape.recording())
            self._take_down(attempt.step, attempt.index, found, outcome, *_shares(attempt, self._models))

    def _look_at_growth(self, attempt: StepAttempt, loss: float | None) -> None:
        """Tries a smaller step where the loss has just grown by far; no wait, see `optimizer_steps`."""
        if self._overshoot.has_grown(attempt.index, loss) and loss is not None and not self._tape.guard.broken:
            with self._cycle.inside(State.JUDGING):
                self._overshoot.look(attempt, self._tape.recording()._replace(scale=attempt.scale), loss)

    def arrived(self, attempt: StepAttempt, row: StepRow) -> None:
        """The numbers of a step that its optimizer decided on the device have reached the host."""
        if attempt.on_device and not attempt.bad and not row.skipped:
            found = self._far_out(row.optimizer, row.loss, row.grad_norm)
            if found:
                self._take_down(row.step, row.optimizer, found, ReplayResult(ReplayStatus.UNAVAILABLE, _TOO_LATE), [])

    def _far_out(self, optimizer: int, loss: float | None, norm: float | None) -> dict[str, Spike]:
        bands = self._bands.get(optimizer)
        if bands is None:
            bands = self._bands[optimizer] = {"grad_norm": Band(), "loss": Band()}
        by_norm = bands["grad_norm"].take(norm) if norm is not None else None
        by_loss = bands["loss"].take(loss) if loss is not None else None
        if by_norm is None and by_loss is None:
            return {}
        self._told += 1
        found = {"grad_norm": by_norm, "loss": by_loss} if self._told <= MOST else {}
        return {name: spike for name, spike in found.items() if spike is not None}

    def _take_down(
        self,
        step: int,
        optimizer: int,
        found: dict[str, Spike],
        outcome: ReplayResult,
        largest: list[Any],
        stepped: float | None = None,
    ) -> None:
        evidence = {
            "optimizer": optimizer,
            "out": {name: spike._asdict() for name, spike in found.items()},
            "parameters": largest,
            "stepped": stepped,
            "rows": outcome.few_rows._asdict() if outcome.few_rows is not None else None,
            "inputs": outcome.standing_out,
            "replay": outcome.status,
            "replay_reason": outcome.reason,
        }
        self._recorder.event(EventKind.SPIKE, step, json.dumps(evidence))


def _shares(attempt: StepAttempt, models: Models) -> tuple[list[tuple[str, float]], float]:
    """The parameters with the largest gradients, each with its share of the squared norm; waits for the device.

    With the norm of what the optimizer is given: the loop may have clipped it.
    """
    norms = {name: float(norm) for name, norm in gradients.norms_by_name(attempt.optimizer, models).items()}
    total = sum(norm**2 for norm in norms.values()) or 1.0
    largest = sorted(norms, key=lambda name: -norms[name])[:MOST_PARAMETERS]
    return [(name, norms[name] ** 2 / total) for name in largest], float(total**0.5)
