"""Runs a bad step again: faithfully, with a verdict on how far that can be trusted, or with one thing changed."""

from __future__ import annotations

import contextlib
import itertools
import time

from ampscope.capture.replay import comparison, memory
from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.replay.player import Player
from ampscope.capture.replay.results import ChangedResult, Regained, ReplayResult, Symptom
from ampscope.capture.replay.state import unrepeatable
from ampscope.capture.replay.state.device_asserts import OutOfRangeError
from ampscope.capture.replay.state.write_guard import AddressError
from ampscope.capture.replay.tape.call_tape import MAX_ENTRIES
from ampscope.capture.replay.tape.entry import EarlierResult, Entry, EntryKind, OutsideTensor
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.replay.tape.weight_writes import IN_FORWARD
from ampscope.capture.torch_support import dynamo
from ampscope.capture.torch_support.communication.refusal import CommunicationError
from ampscope.capture.torch_support.communication.sharded_models import obstacle_to_replay
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.local_shards import local
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.statistics.batch_rows import BatchRows
from ampscope.capture.tracing.statistics.stats import finite
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import ReplayStatus, Trial

#: What hides calls from the tape, and what to do.
COMPILED = (
    "what runs inside a function that torch.compile compiled is not seen: compile the model alone, model.compile(), "
    "and call it and the loss outside compiled functions"
)

#: Why a step is not run again that an optimizer decided on the device, and whose gradients were finite.
WEIGHTS_HAD_MOVED = "what it left reached the host only after the optimizer had moved the weights"


def run(
    step: TapedStep, models: Models, tracer: Tracer, real: Symptom, *, after_good_step: bool = False
) -> ReplayResult:
    """Replays ``step`` under ``tracer`` and compares it with the real step.

    Args:
        step: The step.
        models: The watched models.
        tracer: Observes every op; its sinks are set here.
        real: What was bad in the real step; where nothing was, the rows of its batch are compared.
        after_good_step: The step before ended with finite gradients.

    Returns:
        What it came to. Nothing of the model, the generators or the gradients is different afterwards.
    """
    started = time.perf_counter()
    memory.trim(models)
    obstacle = why_not(step, models) or _lost_weights(step, models) or memory.obstacle(models)
    if obstacle:
        return ReplayResult(ReplayStatus.UNAVAILABLE, obstacle)
    rows = tracer.batch = None if real else BatchRows(tracer.unseen)
    player = Player(step, models, tracer, ReplayChange())
    failed = play(player)
    if failed:
        result = ReplayResult(ReplayStatus.UNAVAILABLE, failed)
    else:
        result = comparison.compared(player, tracer, real, step, after_good_step=after_good_step)
        result.finite = player.finite
        if rows is not None:
            result.few_rows, result.standing_out = rows.few(), rows.standing_out
    result.seconds = time.perf_counter() - started
    return result


def retry(
    step: TapedStep, models: Models, tracer: Tracer, change: ReplayChange, *, is_brief: bool = False
) -> ChangedResult:
    """Runs ``step`` once more with one thing changed.

    Args:
        step: A step whose faithful replay was possible.
        models: The watched models.
        tracer: Observes every op.
        change: What is done otherwise.
        is_brief: Backward is not observed, and not begun from a loss that is not finite.

    Returns:
        Whether the step came out finite, and so did the buffers that it found finite: a loss that no longer shows what
        is kept for the next steps is not cured. Nothing of the training is different afterwards.
    """
    started = time.perf_counter()
    player = Player(step, models, tracer, change, is_brief=is_brief)
    failed = play(player, memory.room(models.main_device()))
    seconds = time.perf_counter() - started
    if failed:
        return ChangedResult(Trial.UNAVAILABLE, failed, None, seconds)
    outcome = Trial.FINITE if player.finite and not player.spoilt else Trial.NONFINITE
    return ChangedResult(outcome, "; ".join(player.differences.found), _mean_loss(player), seconds)


def regained(
    step: TapedStep,
    models: Models,
    tracer: Tracer,
    change: ReplayChange,
    *,
    asked_for: frozenset[str] = frozenset(),
) -> Regained:
    """Runs a step with finite gradients once more, as it was or changed, for the gradients themselves.

    Args:
        step: The step.
        models: The watched models.
        tracer: Observes every op.
        change: What is done otherwise.
        asked_for: Parameters whose gradients are marked in the trace.

    Returns:
        The gradients that its calls alone gave. Nothing of the training is different afterwards.
    """
    started = time.perf_counter()
    obstacle = why_not(step, models)
    if obstacle:
        return Regained(reason=obstacle)
    player = Player(step, models, tracer, change, asked_for=asked_for)
    failed = play(player, memory.room(models.main_device()))
    if failed:
        return Regained(reason=failed, seconds=time.perf_counter() - started)
    scale = change.scale or step.scale or 1.0
    found = {name: local(gradient).detach() for name, gradient in player.gradients().items()}
    if scale != 1.0:
        found = {name: gradient.float() / scale for name, gradient in found.items()}
    return Regained(
        found, "", tuple(dict.fromkeys(player.differences.found)), _mean_loss(player), time.perf_counter() - started
    )


def _mean_loss(player: Player) -> float | None:
    scalars = [float(loss) for loss in player.losses if loss.numel() == 1]
    return sum(scalars) / len(scalars) if scalars else None


def play(player: Player, most: int | None = None) -> str:
    """Plays, as long as what its forward gives takes at ``most`` so many bytes; returns why it could not be done.

    Empty when it could. The same calls as the training's need no bound: it has had room for them.
    """
    bounded = memory.Bounded(most) if most is not None else contextlib.nullcontext()
    with Suppressed() as suppressed, memory.collector_resting(), bounded:
        player.play()
    memory.trim(player.models)
    if suppressed.error is None:
        return ""
    memory.give_back(suppressed.error)
    if isinstance(suppressed.error, (CommunicationError, memory.NoRoomError, OutOfRangeError, AddressError)):
        return str(suppressed.error)
    said = (str(suppressed.error).splitlines() or [""])[0][:200]
    return f"{type(suppressed.error).__name__} while replaying: {said}"


def why_not(step: TapedStep, models: Models) -> str:
    """Why a step cannot be run again; empty when it can."""
    sharded = obstacle_to_replay(itertools.chain(models.roots, models.modules))
    return _obstacle(step) or sharded or unrepeatable.obstacle(models.roots, models.modules)


def _obstacle(step: TapedStep) -> str:
    """Why a step cannot be replayed at all; empty when it can."""
    if step.moved:
        return WEIGHTS_HAD_MOVED
    if step.tape.obstacle or step.state.gap():
        return step.tape.obstacle or step.state.gap()
    if step.edits_weights():
        return IN_FORWARD
    if step.tape.full:
        return f"the step made more than {MAX_ENTRIES} calls, too many to keep"
    entries = [entry for _, entry in step.entries()]
    if not step.given and not any(entry.kind is EntryKind.BACKWARD for entry in entries):
        return "no backward was seen in the step"
    gaps = (_gap(entry, step.tape.start) for entry in entries)
    return next(filter(None, gaps), "")


def _lost_weights(step: TapedStep, models: Models) -> str:
    """Why the weights themselves cannot be told to be the origin, though they are not finite; empty where they can."""
    if step.after_unjudged and not all(finite(weight) for _, weight in models.parameters.values()):
        return "the weights were moved within the step before AMPscope could look, and were not finite afterwards"
    return ""


def _gap(entry: Entry, start: int) -> str:
    """Says what an entry builds on that the tape, which begins at ``start``, does not hold; empty if all is there."""
    for reference in (*entry.earlier, *entry.arguments.outside):
        if isinstance(reference, EarlierResult) and reference.entry < start:
            return "the step builds on calls of a step before, which the tape has let go"
        if isinstance(reference, OutsideTensor) and reference.tensor.grad_fn is not None and not _cuts_history(entry):
            made_by = reference.tensor.grad_fn.name()
            gap = f"the step uses a tensor whose making the tape did not see (its history ends in {made_by})"
            return f"{gap}; {COMPILED}" if dynamo.in_use() else gap
    return ""


def _cuts_history(entry: Entry) -> bool:
    """Whether a call takes the values of its operands only."""
    return not entry.state.ambient.grad or getattr(entry.call, "__name__", "") == "detach"
