"""Runs a step's tape again under full observation, and says how far the result can be trusted."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture import ambient, containers, tape
from ampscope.capture.ambient import random_state_kept
from ampscope.capture.guard import Attempt
from ampscope.capture.models import Models, unwrapped
from ampscope.capture.standin import StandIns, StateKeeper
from ampscope.capture.tape import Entry, Held, Kind, Outside, Result, Tape
from ampscope.capture.tracer import Tracer
from ampscope.trace.schema import Node, ReplayStatus


class Recording(NamedTuple):
    """What it takes to run a step again."""

    tape: Tape
    state: StateKeeper  #: what forward may change, as it was when the step began
    since: int  #: position on the tape where the step begins; of what lies before, only what it depends on is run
    had_gradients: bool = False  #: gradients were there before its first backward


class Symptom(NamedTuple):
    """What was not finite in the real step; false when nothing was."""

    gradients: frozenset[str] = frozenset()
    loss: bool = False
    judged: frozenset[str] = frozenset()  #: the parameters whose gradients were looked at; empty for all

    def __bool__(self) -> bool:
        return bool(self.gradients) or self.loss


@dataclass(slots=True)
class Outcome:
    """What a replay came to."""

    status: ReplayStatus
    reason: str = ""
    seconds: float = 0.0


def run(recording: Recording, models: Models, tracer: Tracer, real: Symptom) -> Outcome:
    """Replays ``recording`` under ``tracer`` and compares it with the real step.

    Args:
        recording: The step.
        models: The watched models.
        tracer: Observes every op; its sinks are set here.
        real: What was bad in the real step.

    Returns:
        The outcome. Nothing of the model, the generators or the gradients is different afterwards.
    """
    started = time.perf_counter()
    needed = recording.tape.needed(recording.since)
    obstacle = _obstacle(recording.tape, needed)
    if obstacle:
        return Outcome(ReplayStatus.UNAVAILABLE, obstacle)
    player = _Player(recording, needed, models, tracer)
    attempt = Attempt()
    with attempt, random_state_kept(), _gradients_kept(models), _eager():
        player.play()
    if attempt.error is not None:
        said = (str(attempt.error).splitlines() or [""])[0][:200]
        reason = f"{type(attempt.error).__name__} while replaying: {said}"
        return Outcome(ReplayStatus.UNAVAILABLE, reason, time.perf_counter() - started)
    outcome = player.outcome(real)
    outcome.seconds = time.perf_counter() - started
    return outcome


def _obstacle(recorded: Tape, positions: list[int]) -> str:
    """Why a tape cannot be replayed at all; empty when it can."""
    if recorded.spoilt:
        return recorded.spoilt
    if recorded.full:
        return f"the step made more than {tape.MAX_ENTRIES} calls, too many to keep"
    needed = [recorded[number] for number in positions]
    if not any(entry.kind is Kind.BACKWARD for entry in needed):
        return "no backward was seen in the step"
    for entry in needed:
        for held in entry.held:
            if isinstance(held, Result) and held.entry < recorded.start:
                return "the step builds on calls of a step before, which the tape has let go"
            if isinstance(held, Outside) and held.tensor.grad_fn is not None and not _cuts_history(entry):
                made_by = held.tensor.grad_fn.name()
                return f"the step uses a tensor whose making the tape did not see (its history ends in {made_by})"
    return ""


def _cuts_history(entry: Entry) -> bool:
    """Whether a call takes the values of its operands only."""
    return not entry.ambient.grad or getattr(entry.call, "__name__", "") == "detach"


@contextlib.contextmanager
def _gradients_kept(models: Models) -> Iterator[None]:
    """Puts back every ``.grad`` in case a module holds a parameter where no stand-in reaches it."""
    kept = [(parameter, parameter.grad) for _, parameter in models.parameters.values()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Runs compiled parts eagerly, where ``torch.compile`` is in use at all."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class _Player:
    """One run over a tape."""

    def __init__(self, recording: Recording, needed: list[int], models: Models, tracer: Tracer) -> None:
        self._entries = [(number, recording.tape[number]) for number in needed]
        self._had_gradients = recording.had_gradients
        self._models = models
        self._tracer = tracer
        self._stand_ins = StandIns(models, recording.state)
        self._results: dict[int, list[Tensor]] = {}
        self._losses: list[Tensor] = []
        self._differences: list[str] = []

    def play(self) -> None:
        self._check_versions()
        self._name_leaves()
        with self._stand_ins.in_place(self._hooks()), self._tracer.active():
            for _, entries in groupby(self._entries, key=lambda numbered: numbered[1].epoch):
                with ambient.one_autocast_cache():
                    for number, entry in entries:
                        self._play_entry(number, entry)
        self._mark_sinks()

    def _hooks(self) -> list[Callable[..., Any]]:
        """What the loop attached to tensors in this step; it runs again in the replay's backward."""
        attached = (entry for _, entry in self._entries if tape.attaches(entry.call))
        return [value for entry in attached for value in entry.args if callable(value)]

    def _play_entry(self, index: int, entry: Entry) -> None:
        self._tracer.paused = True
        args, kwargs = containers.rebuild((entry.args, entry.kwargs), self._resolver(), Held)
        self._tracer.paused = False
        if kwargs.get("generator") is not None:
            kwargs["generator"] = entry.kwargs["generator"].clone_state()
        if entry.random is not None:
            entry.random.put_back()
        self._tracer.entry_place = entry.place
        for module, training in zip(self._models.modules, entry.training, strict=False):
            module.__dict__["training"] = training  # the module's attributes are twins, and go with the replay
        with entry.ambient.entered():
            if entry.kind is Kind.BACKWARD:
                self._backward(entry, args, kwargs)
                return
            call = unwrapped(entry.call) if isinstance(entry.call, nn.Module) else entry.call
            self._name_inputs(entry, args, kwargs)
            result = call_user(call, args, kwargs)
        if entry.kind is Kind.MODULE:
            self._compare(entry, result)
        left = tape.produced(args, kwargs, result) if entry.in_place else containers.tensors(result)
        self._results[index] = list(left)

    def _compare(self, entry: Entry, result: Any) -> None:
        self._tracer.paused = True
        if not _alike(tape.fingerprint(result), entry.fingerprint):
            name = self._models.names.get(id(entry.call), "") or type(entry.call).__name__
            self._differences.append(f"the output of {name} differs")
        self._tracer.paused = False

    def _backward(self, entry: Entry, args: Any, kwargs: Any) -> None:
        self._tracer.paused = True
        losses = [loss.detach() for loss in tape.backward_roots(args, kwargs)]
        if not _alike(losses, entry.fingerprint):
            self._differences.append("the loss differs")
        self._losses += losses
        self._tracer.paused = False
        self._tracer.creates_graph = tape.creates_graph(args, kwargs)
        call_user(entry.call, args, kwargs)
        self._tracer.micro_batch += 1

    def _resolver(self) -> Callable[[Any], Tensor]:
        def resolve(held: Any) -> Tensor:
            if isinstance(held, Result):
                return self._results[held.entry][held.leaf]
            return self._stand_ins.of(held.tensor)

        return resolve

    def _check_versions(self) -> None:
        """Notes inputs and weights that were changed in place since the real step read them."""
        for _, entry in self._entries:
            if entry.versions and entry.versions != self._models.versions(entry.module):
                self._differences.append("weights changed since")
            for held in entry.held:
                if isinstance(held, Outside) and tape.version(held.tensor) != held.version:
                    self._differences.append("an input was changed in place since")

    def _name_leaves(self) -> None:
        for name, parameter in self._models.parameters.values():
            self._tracer.name_entry(parameter, Node.PARAMETER, name)
        for module, name, buffer in self._stand_ins.buffers():
            self._tracer.name_entry(buffer, Node.BUFFER, ".".join(filter(None, (module, name))))

    def _name_inputs(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        what = "" if entry.kind is Kind.MODULE else f"{getattr(entry.call, '__name__', 'a function')} "
        for name, tensor in named_inputs(args, kwargs):
            self._tracer.name_entry(tensor, Node.INPUT, what + name)

    def _mark_sinks(self) -> None:
        for loss in self._losses:
            self._tracer.sink(loss, Node.LOSS, "loss")
        for name, parameter in self._stand_ins.parameters():
            if parameter.grad is not None and not finite(parameter.grad):
                self._tracer.sink(parameter.grad, Node.GRADIENT, name, name.rpartition(".")[0])
        for module, name, buffer in self._stand_ins.buffers():
            if not finite(buffer):
                self._tracer.sink(buffer, Node.BUFFER_AFTER, ".".join(filter(None, (module, name))), module)

    def outcome(self, real: Symptom) -> Outcome:
        """Compares what the replay left with what the real step left."""
        bad = frozenset(name for name, p in self._stand_ins.parameters() if p.grad is not None and not finite(p.grad))
        bad_loss = not all(finite(loss) for loss in self._losses)
        if real and not bad and not bad_loss and self._had_gradients and not real.loss:
            reason = (
                "the step added to gradients from before it, which may be what is not finite; they are not replayed"
            )
            return Outcome(ReplayStatus.UNAVAILABLE, reason)
        if real and not bad and not bad_loss:
            reason = "the same calls on the same values came out finite this time"
            return Outcome(ReplayStatus.NOT_REPRODUCED, "; ".join([reason, *dict.fromkeys(self._differences)]))
        if real.gradients and real.gradients != (bad & real.judged or bad):
            self._differences.append("other parameters have non-finite gradients")
        if self._differences:
            return Outcome(ReplayStatus.DIVERGED, "; ".join(dict.fromkeys(self._differences)))
        return Outcome(ReplayStatus.EXACT)


def call_user(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls the user's code; the search for a user's line ends at this frame."""
    return call(*args, **kwargs)


def named_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors a module was called with, named as the user would: ``args[0]``, ``input_ids``."""
    for index, value in enumerate(args):
        found = list(containers.tensors(value))
        for part, tensor in enumerate(found):
            yield f"args[{index}]" if len(found) == 1 else f"args[{index}][{part}]", tensor
    for name, value in kwargs.items():
        found = list(containers.tensors(value))
        for part, tensor in enumerate(found):
            yield name if len(found) == 1 else f"{name}[{part}]", tensor


def finite(tensor: Tensor) -> bool:
    """Whether every element is finite; waits for the device."""
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor
    return not values.is_floating_point() or bool(values.isfinite().all())


def _alike(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether two lists of tensors hold the same values, NaN equal to NaN."""
    if len(ours) != len(theirs):
        return False
    return all(
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
        for a, b in zip(ours, theirs, strict=True)
    )
