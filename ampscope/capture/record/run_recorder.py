"""Turns what capture observed into rows of the trace, stamped with segment and time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ampscope.capture.changes.replay_results import FormUsed, ReplayResult, TrialResult
from ampscope.capture.record.operand_files import OperandFiles
from ampscope.capture.record.signals import FigureKeeper, Signals
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.user_line import NOWHERE, Place
from ampscope.capture.tracing.selection import Selection
from ampscope.capture.tracing.sites import Sites, dtype_name, shape_name
from ampscope.trace.evidence import Evidence, FindingEvidence
from ampscope.trace.files.arrow_arrays import ColumnBlock
from ampscope.trace.redaction import redacted
from ampscope.trace.schema import (
    AuditOpRow,
    AuditRow,
    EdgeRow,
    EventKind,
    EventRow,
    FindingRow,
    GradRow,
    IncidentRow,
    OpRow,
    ParamRow,
    ReplayRow,
    ScalerAction,
    ScalerEventRow,
    StepRow,
    Table,
    Trigger,
)
from ampscope.trace.vocabulary import Cause, MistakeForm
from ampscope.trace.write.writer import TraceWriter

#: Seconds that a step waits for the rows of the one before; they take a tenth of that unless its ops were traced.
_MOMENT_S = 0.005
#: What is to be there when a step is over; the rows of its ops may follow.
_OF_A_STEP = (Table.STEPS, Table.SCALER_EVENTS, Table.INCIDENTS)


class Recorder:
    """Hands rows to the writer.

    Args:
        writer: The open trace.
        models: The watched models.
        operands: Where operands of failed ops go.
        signals: Told of each step; None where nobody is to be told.

    Attributes:
        figures: What the steps written so far add up to.
        selection: What is written of healthy steps.
    """

    def __init__(
        self, writer: TraceWriter, models: Models, operands: OperandFiles, signals: Signals | None = None
    ) -> None:
        self.folder, self.operands = writer.home, operands
        self.figures = FigureKeeper(signals)
        self._writer = writer
        self._models = models
        self._written_findings: set[tuple[str, Place]] = set()
        resume = writer.resume
        self.tried: list[tuple[int, int, TrialResult]] = []  #: of the latest step on which something was tried
        self.cures = resume.cures  #: that healing had in force when the run ended before
        self.segment = resume.segment
        self.next_step = dict(resume.next_step)
        self.next_scaler = resume.next_scaler
        self.sites = Sites(resume.next_site, models.module_type)
        self.selection = Selection(self.sites)
        self.params = dict(resume.params)  #: number of each parameter and buffer by name
        self._next_param = resume.next_param
        self.describe_parameters()

    def written_to(self) -> Path:
        """The folder that the run is written to: of one that goes to an object store not where readers find it."""
        return self._writer.folder

    def describe_parameters(self) -> None:
        """Gives every parameter and buffer that has none yet a number and a row."""
        first = self._next_param
        rows: list[ParamRow] = []
        leaves: list[tuple[str, str, Tensor]]
        leaves = [("parameter", name, p) for name, p in self._models.parameters.values()]
        leaves += [("buffer", ".".join(filter(None, (m, n))), b) for m, n, b in self._models.buffers()]
        for kind, name, tensor in leaves:
            if name not in self.params:
                self.params[name] = first + len(rows)
                module, shape = name.rpartition(".")[0], shape_name(tuple(tensor.shape))
                trains = isinstance(tensor, nn.Parameter) and tensor.requires_grad
                rows.append(
                    ParamRow(
                        self.params[name], kind, name, module, shape, dtype_name(tensor.dtype), tensor.numel(), trains
                    )
                )
        self._next_param += len(rows)
        self._writer.put(Table.PARAMS, rows)

    def catch_up(self) -> None:
        """Have what the step before left written before another begins: a kill then loses that other one alone."""
        self._writer.catch_up(_MOMENT_S)

    def step_over(self) -> None:
        """Have what tells of the step that is over written before the loop goes on: a kill then loses none of it."""
        if self._writer.waits(*_OF_A_STEP):
            self.catch_up()

    def step(self, row: StepRow) -> None:
        """A step attempt is over and its values are known."""
        self._writer.put(Table.STEPS, [row])
        self.figures.step(row)

    def grads(self, rows: list[GradRow]) -> None:
        """Gradients of one step."""
        self._writer.put(Table.GRADS, rows)

    def scaler_event(
        self,
        action: ScalerAction,
        *,
        step: int,
        scaler: int,
        optimizer: int | None = None,
        before: float | None = None,
        after: float | None = None,
        tracker: int | None = None,
        detail: dict[str, Any] | None = None,
        place: Place = NOWHERE,
    ) -> None:
        """Something happened to a scaler."""
        row = ScalerEventRow(
            step,
            self.segment,
            time.time(),
            scaler,
            optimizer,
            action,
            before,
            after,
            tracker,
            json.dumps(detail, default=str) if detail else "{}",
            place.file,
            place.line,
            place.function,
            place.text,
        )
        self._writer.put(Table.SCALER_EVENTS, [row])

    def trace(self, ops: list[OpRow] | ColumnBlock, edges: list[EdgeRow] | ColumnBlock, step: int, source: str) -> None:
        """A step was traced."""
        self._writer.put(Table.SITES, self.sites.new_rows())
        self._writer.put(Table.OPS, ops)
        self._writer.put(Table.EDGES, edges)
        self.event(EventKind.TRACED, step, source)

    def incident(
        self,
        trigger: Trigger,
        *,
        step: int,
        optimizer: int,
        loss: float | None,
        scale: float | None,
        outcome: ReplayResult,
        evidence: Evidence,
    ) -> None:
        """A step went wrong."""
        row = IncidentRow(
            step,
            optimizer,
            self.segment,
            time.time(),
            trigger,
            loss,
            scale,
            outcome.status,
            redacted(outcome.reason),
            outcome.seconds,
            evidence.bad_params,
            evidence.over_budget,
            evidence.as_json(),
        )
        self._writer.put(Table.INCIDENTS, [row])

    def trial(self, trial: TrialResult, *, step: int, optimizer: int) -> None:
        """A change was tried on a step that went wrong."""
        result, conversions = trial.result, trial.conversions
        same = self.tried[-1:] and self.tried[-1][:2] == (step, optimizer)
        self.tried = [*(self.tried if same else []), (step, optimizer, trial)]
        loss = result.loss / (trial.scale or 1.0) if result.loss is not None else None
        row = ReplayRow(
            step,
            optimizer,
            self.segment,
            time.time(),
            trial.change,
            trial.modules,
            trial.scale,
            result.outcome,
            redacted(result.reason),
            loss,
            result.seconds,
            trial.low,
            trial.high,
            tuple(place.file for place in conversions),
            tuple(place.line for place in conversions),
            tuple(place.text for place in conversions),
            extra_time=trial.extra_time,
            extra_bytes=trial.extra_bytes,
            followed=trial.followed,
            **_form_columns(trial.form),
        )
        self._writer.put(Table.REPLAYS, [row])

    def audit(self, row: AuditRow, ops: list[AuditOpRow]) -> None:
        """A step was audited, or could not be."""
        self._writer.put(Table.AUDIT_OPS, ops)
        self._writer.put(Table.AUDITS, [row])

    def finding(
        self, cause: Cause, step: int, where: Place, *, form: MistakeForm | None, evidence: FindingEvidence
    ) -> None:
        """A usage mistake was seen; the same one at the same line is written once."""
        if (cause, where) in self._written_findings:
            return
        self._written_findings.add((cause, where))
        row = FindingRow(
            step,
            self.segment,
            time.time(),
            cause,
            form or "",
            where.file,
            where.line,
            where.function,
            where.text,
            evidence.as_json(),
        )
        self._writer.put(Table.FINDINGS, [row])

    def event(self, kind: EventKind, step: int, text: str) -> None:
        """Writes an annotation of a step."""
        self._writer.put(Table.EVENTS, [EventRow(step, self.segment, time.time(), kind, redacted(text))])


def _form_columns(form: FormUsed | None) -> dict[str, Any]:
    """The columns of another form of one call; none for other changes."""
    if form is None:
        return {}
    return {
        "form": form.form,
        "form_call": form.call,
        "form_file": form.place.file,
        "form_line": form.place.line,
        "form_function": form.place.function,
        "form_code": form.place.text,
        "form_argument": form.argument,
        "form_value": form.value,
        "form_was": form.was,
        "good_change": form.good_change,
    }
