"""A step runs again: faithfully, with a verdict on how far that can be trusted, or with one thing changed."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.changes.replay_results import ChangedResult, Regained, ReplayResult, Symptom
from ampscope.capture.events import StepAttempt
from ampscope.capture.isolation import memory
from ampscope.capture.isolation.device_asserts import OutOfRangeError
from ampscope.capture.isolation.write_guard import AddressError
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.rerun import fidelity, player
from ampscope.capture.rerun.player import Player
from ampscope.capture.tape.call_tape import MAX_ENTRIES
from ampscope.capture.tape.tape_entry import EarlierResult, Entry, EntryKind, OutsideTensor
from ampscope.capture.tape.taped_step import TapedStep
from ampscope.capture.tape.weight_writes import IN_FORWARD
from ampscope.capture.torch_support import dynamo
from ampscope.capture.torch_support.guard import Guard, Suppressed
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.own_collectives import CommunicationError
from ampscope.capture.torch_support.sharding import class_name, local, obstacle_to_replay
from ampscope.capture.tracing.batch_rows import BatchRows
from ampscope.capture.tracing.light_statistics import finite
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import ReplayStatus, Source, Trial, source_of

#: Homes of the functions that ``make_graphed_callables`` puts in the place of a forward, torch's and others'.
_GRAPHED = frozenset({"torch.cuda.graphs", "transformer_engine.pytorch.graph"})
#: Wrappers that note each forward and backward for their next step, by home and name.
_COUNTING = frozenset(
    {
        ("deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("fairscale.nn.data_parallel.fully_sharded_data_parallel", "FullyShardedDataParallel"),
        ("fairscale.nn.data_parallel.sharded_ddp", "ShardedDataParallel"),
        ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"),
    }
)


def obstacle_of_models(roots: Iterable[nn.Module], modules: Iterable[nn.Module]) -> str:
    """Why no step of these models is run again; empty where none of them speaks against it.

    Args:
        roots: The models as the loop calls them.
        modules: All that they are made of.
    """
    reasons = (reason for root in roots for reason in _of_wrapper(root))
    others = (reason for module in modules for reason in _of_module(module))
    return next(reasons, "") or next(others, "")


def _of_wrapper(root: nn.Module) -> Iterator[str]:
    yield from _of_module(root)
    for kind in type(root).__mro__:
        if (kind.__module__, kind.__name__) in _COUNTING:
            yield f"{kind.__name__} notes each forward and backward for its next step, and would note those of a replay"


def _of_module(module: nn.Module) -> Iterator[str]:
    if any(map(_is_graph, _own(module))):
        yield (
            f"a part of {class_name(module)} was captured into a CUDA graph, which computes on the training's own "
            f"memory, gradients and buffers included"
        )
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        yield (
            "DataParallel runs each part of a batch on another device, with random numbers and statistics of its own, "
            "and a replay runs the batch as a whole; steps of DistributedDataParallel can be replayed"
        )
    if isinstance(module, nn.RNNBase) and _draws_in_cudnn(module):
        yield (
            f"the dropout between the layers of {class_name(module)} is drawn from a state of cuDNN's own, which "
            "nobody can put back; single layers with nn.Dropout between them can be replayed"
        )


def _own(module: nn.Module) -> Iterator[Any]:
    """Yields what a module keeps in its attributes, and in containers there."""
    for value in vars(module).values():
        yield value
        if type(value) in (list, tuple):
            yield from value
        elif type(value) is dict:
            yield from value.values()


def _is_graph(value: Any) -> bool:
    return isinstance(value, torch.cuda.CUDAGraph) or getattr(value, "__module__", None) in _GRAPHED


def _draws_in_cudnn(module: nn.RNNBase) -> bool:
    drops = module.training and module.dropout > 0 and module.num_layers > 1
    on_cuda = drops and any(parameter.is_cuda for parameter in module.parameters(recurse=False))
    return on_cuda and bool(torch.backends.cudnn.enabled)


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
        result = fidelity.compared(player, tracer, real, step, after_good_step=after_good_step)
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
    return _obstacle(step) or sharded or obstacle_of_models(models.roots, models.modules)


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


class Again:
    """Runs steps again, at the cost of the replays' budget.

    Args:
        models: The watched models.
        recorder: Where rows go.
        budget: What it costs.
        guard: Catches faults of looking.
    """

    def __init__(self, models: Models, recorder: Recorder, budget: ReplayBudget, guard: Guard) -> None:
        self.models = models
        self.recorder = recorder
        self.budget = budget
        self.guard = guard

    def run(self, recording: TapedStep, change: ReplayChange) -> Regained:
        """Runs the step with a change; nothing of it is recorded."""
        tracer = self._tracer(Sites(0, self.models.module_type), full=False)
        found = regained(recording, self.models, tracer, change)
        tracer.release()
        self.budget.spent(found.seconds)
        return found

    def traced(
        self, recording: TapedStep, change: ReplayChange, asked_for: frozenset[str]
    ) -> tuple[Regained, TracedRows]:
        """Runs the step with every statistic, and with the gradients that are asked for as sinks."""
        tracer = self._tracer(self.recorder.sites, full=True)
        found = regained(recording, self.models, tracer, change, asked_for=asked_for)
        rows = TracedRows(*tracer.rows(0, ""), self.recorder.sites)
        tracer.release()
        self.budget.spent(found.seconds)
        return found, rows

    def record(self, attempt: StepAttempt, rows: TracedRows, wide: TracedRows | None = None) -> None:
        """Writes the trace of the step as it was, and of the same in float32."""
        attempt.traced = source_of(Source.REPLAY, attempt.index)
        self.recorder.trace(*rows.labelled(attempt.step, attempt.traced), attempt.step, attempt.traced)
        if wide is not None:
            source = source_of(Source.REPLAY_FP32, attempt.index)
            self.recorder.trace(*wide.labelled(attempt.step, source), attempt.step, source)

    def _tracer(self, sites: Sites, *, full: bool) -> Tracer:
        stops = (player.call_user.__code__,)
        return Tracer(sites, self.models.names, full=full, guard=self.guard, stops=stops)
