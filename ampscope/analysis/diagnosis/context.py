"""The rest of a run tells of an incident: how a call ended with an error, a loss ran away, a step did not repeat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ampscope.analysis.arrays import FloatArray
from ampscope.analysis.causes.cause_entry import NOTHING_MORE, Match, Occurrence
from ampscope.analysis.causes.outside import ChangedSince, Raised
from ampscope.analysis.causes.overflow import Literal, LossGrew, ScaleInLoop
from ampscope.analysis.causes.recognition import Recognised
from ampscope.analysis.causes.unknown import Observed
from ampscope.analysis.diagnosis.examined import Examined
from ampscope.analysis.diagnosis.incident_at import incident_at
from ampscope.analysis.results import Operand, SourceLine, Tried
from ampscope.analysis.scale.scaler_course import SkipRun, Skips
from ampscope.analysis.step_graph import SecondRun
from ampscope.analysis.tables.step_history import History
from ampscope.provenance import How
from ampscope.trace.evidence import Evidence, RaisedError
from ampscope.trace.schema import Change, IncidentRow, ReplayStatus, Trial, Trigger
from ampscope.trace.vocabulary import NOT_DETERMINISTIC, Cause


def raised(row: IncidentRow, rank: int) -> Examined:
    """The incident of a step that an exception ended.

    Args:
        row: Its row, with `Trigger.EXCEPTION`.
        rank: The rank that recorded it.
    """
    call = Evidence.of(row).exception or RaisedError()
    cause, reason = _cause(call)
    told = Occurrence(op=call.op, module=call.module, reason=reason)
    incident = replace(
        incident_at(cause, row.step, call.phase, told=told, row=row, rank=rank),
        module_type=call.module_type,
        source=SourceLine.of(call),
        inputs=(Operand(role="input 0", dtype=call.dtype, shape=""),) if call.dtype else (),
    )
    return Examined(incident, reason)


def led_to_error(examined: Examined, row: IncidentRow) -> Examined:
    """The origin of the values that an error spoke of, with what it said."""
    call = Evidence.of(row).exception or RaisedError()
    said = f"{examined.incident.explanation} The error that it led to: {call.error}: {call.message}"
    return examined._replace(incident=replace(examined.incident, explanation=f"{said.rstrip(':. ')}."))


def _cause(call: RaisedError) -> Match:
    if call.does_not_fit and call.value is not None:
        return Match(Cause.LITERAL_OVERFLOW, Literal(value=call.value, dtype=call.dtype, refused=True))
    return Match(Cause.LITERAL_OVERFLOW if call.does_not_fit else Cause.EXCEPTION, Raised(call=call))


#: A loss that rose at each of the last steps, by this factor in all, is running away.
RUNAWAY_STEPS = 3
RUNAWAY_FACTOR = 100.0
#: Together with the loss of the step itself, those before have risen by this factor at least.
RISING_FACTOR = 10.0
#: Steps over which a loss is compared with what it was.
GROWTH_STEPS = 50


_ONCE = "The step failed once and came out finite when it was run again"
NOT_THE_SAME_TWICE = Observed(
    sentence=f"{_ONCE}, but two further runs of it differ: it is not deterministic, so that the failure cannot be told "
    "from chance."
)
#: Of executions that part so, the second says nothing of the first.
_ANOTHER = frozenset({How.GIVEN, How.DRAWN, How.CALLS})


class Context:
    """The steps around the incidents of one rank."""

    def __init__(self, history: Mapping[int, History]) -> None:
        self._history = history
        self._skips = {optimizer: Skips(each) for optimizer, each in history.items()}

    def judged(
        self, row: IncidentRow, found: Recognised, tried: Sequence[Tried] = (), twice: SecondRun | None = None
    ) -> Recognised:
        """The cause in the light of what else is known of the run.

        An overflow at the end of a runaway loss is divergence; what an identical second run did not do is transient, or
        the compiler's, for that run is eager; without a scaler, no loss scale is to blame.

        Args:
            row: The incident.
            found: What was recognised in the best trace of its step.
            tried: What else was tried on it.
            twice: Where the second run, which came out finite, parts from the first; None where that was not traced.
        """
        another = twice is not None and twice.how in _ANOTHER
        if row.replay == ReplayStatus.NOT_REPRODUCED and not another:
            return _of_one_time(row, found, tried, twice)
        if isinstance(found.reason, ChangedSince) and row.replay != ReplayStatus.EXACT:
            told = f"{found.reason.in_words}; whether code or the device changed it, no second run of the step shows."
            return replace(found, cause=Cause.UNKNOWN, reason=Observed(sentence=told), masked=False)
        if isinstance(found.reason, Literal) and found.reason.value == row.scale and found.reason.dtype == "float16":
            return replace(found, cause=Cause.SCALE_OVERFLOW, reason=ScaleInLoop(scale=found.reason.value))
        overflow = found.cause in (Cause.FP16_OVERFLOW, Cause.SCALE_OVERFLOW)
        own = _own_loss(row, tried)
        grew = self._loss_grew(row, own) if overflow or found.cause is Cause.DIVERGENCE else None
        grew = grew if found.cause is Cause.DIVERGENCE or self._ran_away(row, own) else None
        grew = grew or (self._stays_away(row) if found.cause is Cause.SCALE_OVERFLOW else None)
        if grew is not None:
            return replace(found, cause=Cause.DIVERGENCE, reason=grew, masked=False)
        if found.cause is Cause.SCALE_OVERFLOW and row.scale is None:
            return replace(found, cause=Cause.FP16_OVERFLOW)
        return found

    def _ran_away(self, row: IncidentRow, own: float) -> bool:
        """Whether the loss rose with each of the last updates, this step's own included.

        One that jumped once, and rises no more, is what the batches have become rather than the weights.
        """
        losses = self._losses(row, RUNAWAY_STEPS)
        if losses.size and row.loss is not None and row.loss <= losses[-1]:
            return False
        if losses.size < 2 or not (np.diff(losses) > 0).all():
            return False
        last = max(own, losses[-1]) if losses[-1] >= RISING_FACTOR * losses[0] else losses[-1]
        return bool(last >= RUNAWAY_FACTOR * losses[0])

    def _loss_grew(self, row: IncidentRow, own: float) -> LossGrew | None:
        """How far the loss had grown before a step; None where it had not, or not by much."""
        if self._ran_away(row, own):
            first, *_, last = map(float, self._losses(row, RUNAWAY_STEPS))
            return LossGrew(usual=first, last=last)
        losses = self._losses(row, GROWTH_STEPS)
        if losses.size < 2:
            return None
        usual, last = float(np.median(losses[:-1])), float(losses[-1])
        return LossGrew(usual=usual, last=last) if last >= RUNAWAY_FACTOR * usual else None

    def _stays_away(self, row: IncidentRow) -> LossGrew | None:
        """How far the loss has jumped since the last good step, where one after the other is skipped and none follows.

        A scale that finds its place finds it at the loss that there was.
        """
        skips, history = self._skips.get(row.optimizer), self._history.get(row.optimizer)
        run = skips.of_step(row.step) if skips is not None else None
        if run is None or history is None or run.recovered or run.count < RUNAWAY_STEPS:
            return None
        if row.loss is None or not math.isfinite(row.loss):
            return None
        losses = history.before(run.first, GROWTH_STEPS)
        if losses.size < RUNAWAY_STEPS:
            return None
        usual = float(np.median(losses))
        return LossGrew(usual=usual, last=row.loss) if row.loss >= RUNAWAY_FACTOR * usual > 0 else None

    def _losses(self, row: IncidentRow, steps: int) -> FloatArray:
        history = self._history.get(row.optimizer)
        return history.before(row.step, steps) if history is not None else np.empty(0)

    def calibration(self, row: IncidentRow) -> SkipRun | None:
        """The skips among which a step with non-finite gradients is, where the scale was only finding its place."""
        if row.trigger != Trigger.NONFINITE_GRADIENT:
            return None
        skips = self._skips.get(row.optimizer)
        run = skips.of_step(row.step) if skips is not None else None
        calibrates = run is not None and run.calibrates and self._stays_away(row) is None
        return run if calibrates else None

    def cause_without_origin(self, row: IncidentRow, tried: Sequence[Tried] = ()) -> Cause:
        """Returns the cause of a bad step of which no trace shows an origin, as far as one can be told.

        Skips that could not be run again are harmless where a smaller scale was all that the next steps took. One by
        itself tells too little of the scale to name it: any bad batch looks the same.
        """
        if row.replay == ReplayStatus.NOT_REPRODUCED:
            return Cause.COMPILED_ONLY if Evidence.of(row).compiled and not _varies(tried) else Cause.UNKNOWN
        if row.replay == ReplayStatus.UNAVAILABLE and row.scale is not None:
            run = self.calibration(row)
            if run is None or not run.recovered:
                return Cause.UNKNOWN
            outgrown = run.benign_cause is Cause.BENIGN_SCALE_ADJUSTMENT
            return Cause.BENIGN_SINGLE_SKIP if outgrown and run.is_single else run.benign_cause
        return Cause.UNKNOWN


def _own_loss(row: IncidentRow, tried: Sequence[Tried]) -> float:
    """The loss of a step itself, in float32 where its own dtype could not hold it; 0 where neither is known."""
    in_float32 = (each.loss for each in tried if each.change == Change.FP32)
    known = (loss for loss in (row.loss, *in_float32) if loss is not None and math.isfinite(loss))
    return next(known, 0.0)


def why_unknown(row: IncidentRow) -> str:
    """Why nothing can be said of where a value was born, in words."""
    if row.replay == ReplayStatus.NOT_REPRODUCED:
        again = row.replay_reason or "it came out finite when it was run again"
        return f"{again}; and no trace of how it first ran shows where the value was born"
    return row.replay_reason or "no trace of this step shows where the value was born"


def _of_one_time(row: IncidentRow, found: Recognised, tried: Sequence[Tried], twice: SecondRun | None) -> Recognised:
    """Judges a failure that did not come again; replays run compiled code eagerly.

    The device is at fault only where all was the same to the last bit but what became of one op's result.
    """
    if _varies(tried):
        return replace(found, cause=Cause.UNKNOWN, reason=NOT_THE_SAME_TWICE, masked=False)
    if Evidence.of(row).compiled:
        return replace(found, cause=Cause.COMPILED_ONLY, reason=NOTHING_MORE, masked=False)
    if twice is None or twice.how is not How.RESULT:
        missing = twice.missing if twice is not None else "how it first ran was not traced"
        reason = Observed(sentence=f"{_ONCE}, and why cannot be told: {missing}.")
        return replace(found, cause=Cause.UNKNOWN, reason=reason, masked=False)
    seq, phase = (twice.seq, twice.phase) if twice.seq < found.seq else (found.seq, found.phase)
    return replace(found, cause=Cause.HARDWARE_TRANSIENT, reason=NOTHING_MORE, masked=False, seq=seq, phase=phase)


def _varies(tried: Sequence[Tried]) -> bool:
    """Whether the step does not come out the same twice when it is run again: then nothing proves anything."""
    again = [each for each in tried if each.change == Change.NONE]
    return any(each.reason == NOT_DETERMINISTIC or each.outcome == Trial.NONFINITE for each in again)
