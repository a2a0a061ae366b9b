"""Puts the parts of a step watch together."""

from __future__ import annotations

from collections.abc import Callable

from ampscope.capture.budgets import ReplayBudget, TraceBudget
from ampscope.capture.checks.hidden_overflow import HiddenOverflow
from ampscope.capture.checks.loss_spikes import SpikeEnding
from ampscope.capture.checks.lost_gradients import Progress
from ampscope.capture.checks.not_training import Liveness
from ampscope.capture.checks.second_look import SecondLook
from ampscope.capture.checks.step_audit import Audit
from ampscope.capture.checks.still_buffers import StillBuffers
from ampscope.capture.checks.still_updates import StillUpdates
from ampscope.capture.events import StepObserver
from ampscope.capture.heal.healer import Healer
from ampscope.capture.heal.healing import OF_RANKS, Healing, HealingLog
from ampscope.capture.heal.optimizer_state import Ahead, Declined
from ampscope.capture.heal.rank_healer import RankHealer
from ampscope.capture.loop_state.between_steps import CarriedState
from ampscope.capture.loop_state.held_state import StateHistory, WrittenState
from ampscope.capture.loop_state.optimizer_numbers import OptimizerNumbers
from ampscope.capture.loop_state.state_watch import StateWatch
from ampscope.capture.record.configuration import Configuration
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import MistakeReport, Terminal
from ampscope.capture.rerun.optimizer_rerun import OptimizersBefore
from ampscope.capture.rerun.step_replay import Again
from ampscope.capture.step.attempts import Attempts
from ampscope.capture.step.cycle import StepCycle
from ampscope.capture.step.endings import Endings
from ampscope.capture.step.failed_calls import FailedCalls
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.step.loop_endings import LoopEndings
from ampscope.capture.step.observers import Observers
from ampscope.capture.step.own_work import OwnWork
from ampscope.capture.step.scaler_history import ScalerHistory
from ampscope.capture.step.step_rows import StepRows, TraceEnding
from ampscope.capture.step.step_watch import StepWatch
from ampscope.capture.tape.received_values import ReceivedValues
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.torch_support import process_group
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.modes import Pause
from ampscope.capture.torch_support.readback import Readback
from ampscope.capture.usage.amp_effect import AmpEffect
from ampscope.capture.usage.usage_watch import UsageWatch
from ampscope.trace.schema import EventKind
from ampscope.trace.vocabulary import STATE_LOOK, STEP_RECORD, STEP_TAPE

#: What the parts do that share a guard, as the user would say it.
_PARTS = (STEP_RECORD, "the op tracer", STATE_LOOK, "the following of what the loop carries")


def step_watch(
    models: Models,
    recorder: Recorder,
    guard_for: Callable[[str], Guard],
    budgets: tuple[TraceBudget, ReplayBudget],
    terminal: Terminal,
    configuration: Configuration,
    healing: Healing | None = None,
) -> StepWatch:
    """The step watch of a run.

    Args:
        models: The watched models.
        recorder: Where rows go.
        guard_for: Makes the guard of a part, by what the part is called in a warning.
        budgets: Which steps are traced, which incidents replayed.
        terminal: Where the user is told.
        configuration: Changes the budget of traces, and what is written of them.
        healing: What may be changed of the training; None for nothing.
    """
    guard, trace, looking, following = map(guard_for, _PARTS)
    readback, cycle, pause, history = Readback(), StepCycle(), Pause(), StateHistory()
    optimizers = OptimizerNumbers(models, recorder.next_step, recorder.describe_parameters, guard)
    own = OwnWork(pause, lambda text: recorder.event(EventKind.WARNING, optimizers.step_of(None), text))
    report = MistakeReport(recorder, terminal, optimizers.step_of)
    usage, written = (
        UsageWatch(models, report, optimizers.step_of, guard_for("the usage check")),
        WrittenState(models, history, guard),
    )
    live, tape = LiveTrace(models, recorder, terminal, budgets[0], pause, trace), _tape(models, usage, pause, guard_for)
    healer = _healer(healing, models, recorder, tape, budgets[1], terminal, guard_for)
    incidents = Incidents(models, recorder, readback, live, budgets, guard_for, terminal, healer)
    carried = CarriedState(models, tape, recorder, incidents, live.casts, pause, following)
    spikes = SpikeEnding(Again(models, recorder, budgets[1], guard_for("the look at spikes")), incidents, tape, cycle)
    failed = FailedCalls(models, recorder, incidents, optimizers, guard_for("the look at exceptions"))
    tape.on_error(failed.function_raised)
    state = StateWatch(models, optimizers, written, carried.averages, history, readback, incidents, looking)
    alive = Liveness(models, readback, report, guard_for("the look at what trains"))
    observers = Observers(
        own,
        settings=configuration,
        tape=tape,
        live=live,
        written=written,
        still=StillBuffers(models, incidents, tape, budgets[1], cycle, looking),
        updates=StillUpdates(models, recorder, terminal, budgets[1], looking),
        carried=carried,
        usage=usage,
        rows=StepRows(models, recorder, readback, own, guard, (spikes.arrived, alive.arrived)),
        alive=alive,
        effect=AmpEffect(models, report, guard_for("the look at autocast regions")),
        spikes=spikes,
        history=ScalerHistory(recorder, optimizers, readback, guard_for("the scaler's history")),
        **_looks(Again(models, recorder, budgets[1], guard_for("the second look")), incidents, live, tape, cycle),
        failed=failed,
        audit=Audit(models, recorder, configuration.audits, tape, cycle, terminal, guard_for("the audit")),
        trace=TraceEnding(models, live, incidents, tape, budgets[0], cycle, trace),
        **_around(state, OptimizersBefore(models, looking), healer, models),
    )
    attempts = Attempts(models, optimizers, cycle, observers, incidents, tape, written, carried, own, guard, healer)
    ends = Endings(attempts, cycle, observers, incidents, tape, own, guard), LoopEndings(attempts), carried.mode
    return StepWatch(models, recorder, readback, optimizers, cycle, own, live, tape, observers, *ends, guard)


def _looks(
    again: Again, incidents: Incidents, live: LiveTrace, tape: StepTape, cycle: StepCycle
) -> dict[str, StepObserver]:
    """The looks at steps that went well."""
    progress = Progress()
    hidden = HiddenOverflow(again, incidents, live, tape, cycle, progress, again.guard)
    return {"hidden": hidden, "second": SecondLook(again, hidden, incidents, tape, cycle, progress, again.guard)}


def _around(
    state: StateWatch, before: OptimizersBefore, healer: Healer | None, models: Models
) -> dict[str, StepObserver]:
    """Makes the observers that look at optimizers, copy them, and change the training where that was asked for."""
    healing: dict[str, StepObserver] = {"heal": healer} if healer is not None else {}
    if healer is not None:
        healing["ahead"] = Ahead(models, state, healer) if type(healer) is Healer else Declined(state, healer)
    return {"state": state, "before": before, **healing}


def _healer(
    healing: Healing | None,
    models: Models,
    recorder: Recorder,
    tape: StepTape,
    budget: ReplayBudget,
    terminal: Terminal,
    guard_for: Callable[[str], Guard],
) -> Healer | None:
    if healing is None:
        return None
    log = HealingLog(recorder, terminal)
    guard = guard_for("healing")
    if terminal.world_size == 1:
        return Healer(models, recorder, tape, budget, healing, log, guard)
    ballot = process_group.ballot(f"ampscope/heal/{recorder.folder.name}/{recorder.segment}")
    if ballot is None:
        log.line("ranks", OF_RANKS)
        return None
    return RankHealer(models, recorder, tape, budget, healing, log, guard, ballot)


def _tape(models: Models, usage: UsageWatch, pause: Pause, guard_for: Callable[[str], Guard]) -> StepTape:
    """The tape of the step in progress."""
    received = ReceivedValues(lambda: models.modules, pause, guard_for("the keeping of what other ranks sent"))
    return StepTape(models, usage, guard_for(STEP_TAPE), pause, received=received)
