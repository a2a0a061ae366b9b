"""The rows that a finished attempt leaves: the step's, and from time to time its gradients'."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable

from torch import Tensor

from ampscope.capture.budgets import TraceBudget
from ampscope.capture.events import EndedStep, ScalerCall, ScalerMethod, StepAttempt, StepObserver
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.step import gradients
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.step.own_work import OwnWork
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.readback import Readback, Values
from ampscope.trace.schema import StepRow

#: Values of a step besides the learning rates of its groups, and what is put before a group's number.
_OTHERS, _RATE = 7, "lr "


class StepRows(StepObserver):
    """Writes the rows of finished attempts, when their values have reached the host.

    Args:
        models: The watched models.
        recorder: Where rows go.
        readback: Brings the values.
        own: What AMPscope itself took.
        guard: Catches faults of the record.
        arrived: Each is called with each attempt and its row.
    """

    def __init__(
        self,
        models: Models,
        recorder: Recorder,
        readback: Readback,
        own: OwnWork,
        guard: Guard,
        arrived: Iterable[Callable[[StepAttempt, StepRow], None]] = (),
    ) -> None:
        self._arrived = arrived
        self.guard = guard
        self._models = models
        self._recorder = recorder
        self._readback = readback
        self._own = own
        self._kept: dict[str, gradients.KeptValues] = {}  # half parameters before the optimizer stepped
        self._earlier: dict[str, Tensor] = {}  # what was kept of them at the look before

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Keeps what shows afterwards whether the update was lost."""
        if gradients.is_recorded(attempt.step):
            self._kept = gradients.keep_values(attempt.optimizer, self._models)

    def step_ended(self, ended: EndedStep) -> None:
        """Writes the attempt's rows."""
        self.write(ended)
        if self._kept:
            self._earlier |= {name: each.before for name, each in self._kept.items()}
            self._kept = {}
        if ended.attempt.scaling is None:
            self._recorder.step_over()

    def scaler_call_ended(self, call: ScalerCall) -> None:
        """With a scaler, ``update`` ends the step: from here on the process may be killed without loss."""
        if call.method is ScalerMethod.UPDATE:
            self._readback.poll()
            self._recorder.step_over()

    def write(self, ended: EndedStep) -> None:
        """Writes the step's row, and its gradients' where they are due (every so often, and when it went bad)."""
        attempt = ended.attempt
        if (attempt.bad or gradients.is_recorded(attempt.step)) and not attempt.on_device:
            self._write_gradients(attempt)
        scaling, now, observing = attempt.scaling, time.time(), self._own.seconds
        view = OptimizerView(attempt.optimizer)
        fetched: dict[str, Tensor | float | None] = {
            "loss": attempt.opened.mean_loss(),
            "norm": attempt.norm_before_clipping,
            "clipped": attempt.opened.edited.get(id(attempt.optimizer)) if attempt.unclipped is None else attempt.norm,
            "scale": scaling.scale if scaling else None,
            "tracker": scaling.tracker if scaling else None,
            "found_inf": attempt.found_inf[0] if attempt.found_inf else None,
            "lr": view.learning_rate,
        }
        if len(view.groups) > 1:
            fetched |= {_RATE + group: rate for group, rate in view.learning_rates.items()}

        def put(values: Values) -> None:
            row = self._row(ended, values, now, observing)
            self._recorder.step(row)
            for told in self._arrived:
                told(attempt, row)

        self._readback.fetch(fetched, put)

    def _row(self, ended: EndedStep, values: Values, now: float, observing: float) -> StepRow:
        attempt, found, tracker = ended.attempt, values["found_inf"], values["tracker"]
        skipped = bool(found) if found is not None else attempt.left_out or not attempt.stepped
        return StepRow(
            step=attempt.step,
            optimizer=attempt.index,
            segment=self._recorder.segment,
            time=now,
            loss=values["loss"],
            scale=values["scale"],
            growth_tracker=int(tracker) if tracker is not None else None,
            found_inf=skipped if attempt.scaling is not None else None,
            skipped=skipped,
            grad_norm=values["norm"],
            lr=values["lr"],
            micro_batches=attempt.opened.micro_batches,
            duration_s=ended.seconds,
            observing_s=observing,
            traced=attempt.traced,
            clipped_grad_norm=values["clipped"] if values["clipped"] != values["norm"] else None,
            lrs=_as_json(values) if len(values) > _OTHERS else None,
        )

    def _write_gradients(self, attempt: StepAttempt) -> None:
        found = gradients.magnitudes(attempt.optimizer, self._models)
        params, step, index = self._recorder.params, attempt.step, attempt.index
        self._readback.fetch(
            {**found.values, **gradients.lost_counts(self._kept, self._earlier)},
            lambda known: self._recorder.grads(found.rows(known, params, step=step, index=index)),
        )


def _as_json(values: Values) -> str | None:
    """The learning rates of the groups, None where all are the same; each takes as much room as any other."""
    rates = {name.removeprefix(_RATE): rate for name, rate in values.items() if name.startswith(_RATE)}
    if len(set(rates.values())) == 1:
        return None
    return "{" + ", ".join(f"{json.dumps(group)}: {_number(rate)}" for group, rate in rates.items()) + "}"


def _number(rate: float | None) -> str:
    return f"{rate:.16e}" if rate is not None and math.isfinite(rate) else json.dumps(rate)


class TraceEnding(StepObserver):
    """Settles the trace of each step.

    Args:
        models: The watched models.
        live: The trace of the step in progress.
        incidents: Takes an overflow that only the trace shows, and replays compiled steps.
        tape: What such a replay needs.
        budget: Which steps are traced.
        guard: Catches faults of the tracer.
    """

    def __init__(
        self,
        models: Models,
        live: LiveTrace,
        incidents: Incidents,
        tape: StepTape,
        budget: TraceBudget,
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._models = models
        self._live = live
        self._incidents = incidents
        self._tape = tape
        self._budget = budget

        self._replayed = False  # the step in progress

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Replays a compiled step that is to be recorded, as long as its weights are those that it ran with."""
        if not attempt.bad and not self._live.active and self._models.compiled:
            self._trace_by_replay(attempt, self._live.number)

    def step_ended(self, ended: EndedStep) -> None:
        """Keeps what is worth keeping of the step's trace."""
        attempt, number = ended.attempt, ended.number
        if attempt.bad:
            self._live.drop()
        elif self._live.active:
            absorbed = self._live.settle(attempt, number)
            if absorbed:
                self._incidents.absorbed(attempt, absorbed)
            elif self._live.collapsed:
                self._incidents.collapsed(attempt, self._live.collapsed)
        elif self._models.compiled:
            if attempt.by_hand:  # no optimizer has said that it would move the weights
                self._trace_by_replay(attempt, number)
            if self._replayed:
                self._budget.kept()
        self._replayed = False

    def _trace_by_replay(self, attempt: StepAttempt, number: int) -> None:
        if not self._replayed and self._budget.keeps_replay(number):
            self._replayed = True
            self._incidents.trace_by_replay(attempt, self._tape.recording())
