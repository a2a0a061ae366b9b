"""Puts the parts of a step watch together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ampscope.capture.budgets import ReplayBudget, TraceBudget
from ampscope.capture.checks.check import CheckContext
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
from ampscope.capture.loop_state.saved_files import SavedFiles
from ampscope.capture.loop_state.state_watch import StateWatch
from ampscope.capture.record.configuration import Configuration
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import MistakeReport, Terminal
from ampscope.capture.rerun.engine import RerunEngine
from ampscope.capture.rerun.optimizer_rerun import OptimizersBefore
from ampscope.capture.step.attempts import Attempts
from ampscope.capture.step.cycle import State, StepCycle
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
    trace_budget, replay_budget = budgets
    # Guards that several parts share: where one of them breaks, all of these end.
    recording = guard_for(STEP_RECORD)
    tracing = guard_for("the op tracer")
    looking = guard_for(STATE_LOOK)
    following = guard_for("the following of what the loop carries")

    # What the parts stand on.
    readback = Readback()
    cycle = StepCycle()
    pause = Pause()
    history = StateHistory()
    optimizers = OptimizerNumbers(models, recorder.next_step, recorder.describe_parameters, recording)
    own = OwnWork(pause, lambda text: recorder.event(EventKind.WARNING, optimizers.step_of(None), text))
    report = MistakeReport(recorder, terminal, optimizers.step_of)

    # What is kept of a step, and runs it again.
    usage = UsageWatch(models, report, optimizers.step_of, guard_for("the usage check"))
    received = ReceivedValues(lambda: models.modules, pause, guard_for("the keeping of what other ranks sent"))
    tape = StepTape(models, usage, guard_for(STEP_TAPE), pause, received=received)
    live = LiveTrace(models, recorder, terminal, trace_budget, pause, tracing)
    engine = RerunEngine(models, recorder.sites, replay_budget, recording, partial(cycle.inside, State.JUDGING))
    healer = _healer(healing, engine, recorder, tape, terminal, guard_for)
    incidents = Incidents(engine, recorder, readback, live, trace_budget, guard_for, terminal, healer)
    failed = FailedCalls(models, recorder, incidents, optimizers, guard_for("the look at exceptions"))
    tape.on_error(failed.function_raised)

    # What outlives a step.
    written = WrittenState(models, history, recording)
    carried = CarriedState(engine.under(following), tape, recorder, incidents, live.casts, pause)
    state = StateWatch(models, optimizers, written, carried.averages, history, readback, incidents, looking)
    alive = Liveness(models, readback, report, guard_for("the look at what trains"))

    # What is asked of steps that look good.
    progress = Progress()
    context = CheckContext(engine, recorder, tape, incidents)
    second_look = context.under(guard_for("the second look"))
    hidden = HiddenOverflow(second_look, live, progress)
    second = SecondLook(second_look, hidden, progress)
    still = StillBuffers(context.under(looking))
    updates = StillUpdates(context.under(looking), terminal)
    spikes = SpikeEnding(context.under(guard_for("the look at spikes")))
    audit = Audit(context.under(guard_for("the audit")), configuration.audits, terminal)

    parts: dict[str, StepObserver] = {  # by the names that `ORDER` has for them
        "settings": configuration,
        "tape": tape,
        "live": live,
        "trace": TraceEnding(models, live, incidents, tape, trace_budget, tracing),
        "rows": StepRows(models, recorder, readback, own, recording, (spikes.arrived, alive.arrived)),
        "history": ScalerHistory(recorder, optimizers, readback, guard_for("the scaler's history")),
        "usage": usage,
        "effect": AmpEffect(models, report, guard_for("the look at autocast regions")),
        "alive": alive,
        "carried": carried,
        "written": written,
        "state": state,
        "failed": failed,
        "before": OptimizersBefore(models, looking),
        "hidden": hidden,
        "second": second,
        "still": still,
        "updates": updates,
        "spikes": spikes,
        "audit": audit,
    }
    if healer is not None:
        parts["heal"] = healer
        parts["ahead"] = Ahead(models, state, healer) if type(healer) is Healer else Declined(state, healer)
    observers = Observers(own, **parts)
    attempts = Attempts(models, optimizers, cycle, observers, incidents, tape, written, carried, own, recording, healer)
    return StepWatch(
        models,
        recorder,
        readback,
        optimizers,
        cycle,
        own,
        live,
        tape,
        observers,
        Endings(attempts, cycle, observers, incidents, tape, own, recording),
        LoopEndings(attempts),
        carried.mode,
        SavedFiles(models, optimizers, recorder, guard_for("the look at saved files")),
        recording,
    )


def _healer(
    healing: Healing | None,
    engine: RerunEngine,
    recorder: Recorder,
    tape: StepTape,
    terminal: Terminal,
    guard_for: Callable[[str], Guard],
) -> Healer | None:
    if healing is None:
        return None
    log = HealingLog(recorder, terminal)
    engine = engine.under(guard_for("healing"))
    if terminal.world_size == 1:
        return Healer(engine, recorder, tape, healing, log)
    ballot = process_group.ballot(f"ampscope/heal/{recorder.folder.name}/{recorder.segment}")
    if ballot is None:
        log.line("ranks", OF_RANKS)
        return None
    return RankHealer(engine, recorder, tape, healing, log, ballot)
