"""Runs a bad step again: faithfully, with a verdict on how far that can be trusted, or with one thing changed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from ampscope.capture.replay import memory, tape
from ampscope.capture.replay.changes import Change
from ampscope.capture.replay.player import Player, Recording
from ampscope.capture.replay.tape import Entry, Kind, Outside, Result, Tape
from ampscope.capture.torch_support.guard import Attempt
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.tracer import CommunicationError, Tracer
from ampscope.trace.schema import ReplayStatus, Trial


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
    bad_rows: dict[str, list[int]] = field(default_factory=dict)  #: of each input that is not finite, by name


class Tried(NamedTuple):
    """What came out of a replay with one thing changed."""

    outcome: Trial
    reason: str = ""
    loss: float | None = None
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
    obstacle = _obstacle(recording)
    if obstacle:
        return Outcome(ReplayStatus.UNAVAILABLE, obstacle)
    player = Player(recording, models, tracer, Change())
    failed = _play(player)
    outcome = Outcome(ReplayStatus.UNAVAILABLE, failed) if failed else _compared(player, real, recording.had_gradients)
    outcome.seconds = time.perf_counter() - started
    return outcome


def retry(recording: Recording, models: Models, tracer: Tracer, change: Change) -> Tried:
    """Runs ``recording`` once more with one thing changed.

    Args:
        recording: A step whose faithful replay was possible.
        models: The watched models.
        tracer: Observes every op.
        change: What is done otherwise.

    Returns:
        Whether the step came out finite. Nothing of the training is different afterwards.
    """
    started = time.perf_counter()
    player = Player(recording, models, tracer, change)
    failed = _play(player)
    seconds = time.perf_counter() - started
    if failed:
        return Tried(Trial.UNAVAILABLE, failed, None, seconds)
    scalars = [float(loss) for loss in player.losses if loss.numel() == 1]
    loss = sum(scalars) / len(scalars) if scalars else None
    return Tried(Trial.FINITE if player.finite else Trial.NONFINITE, "; ".join(player.differences), loss, seconds)


def _play(player: Player) -> str:
    """Plays; returns why it could not be done, empty when it could."""
    attempt = Attempt()
    with attempt:
        player.play()
    if attempt.error is None:
        return ""
    memory.give_back(attempt.error)
    if isinstance(attempt.error, CommunicationError):
        return str(attempt.error)
    said = (str(attempt.error).splitlines() or [""])[0][:200]
    return f"{type(attempt.error).__name__} while replaying: {said}"


def _obstacle(recording: Recording) -> str:
    """Why a step cannot be replayed at all; empty when it can."""
    recorded = recording.tape
    if recorded.spoilt:
        return recorded.spoilt
    if recorded.full:
        return f"the step made more than {tape.MAX_ENTRIES} calls, too many to keep"
    needed = [recorded[number] for number in recorded.needed(recording.since)]
    if not any(entry.kind is Kind.BACKWARD for entry in needed):
        return "no backward was seen in the step"
    return next(filter(None, (_gap(entry, recorded) for entry in needed)), "")


def _gap(entry: Entry, recorded: Tape) -> str:
    """What an entry builds on that the tape does not hold, in words."""
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


def _compared(player: Player, real: Symptom, had_gradients: bool) -> Outcome:
    """Compares what the replay left with what the real step left."""
    differences = list(player.differences)
    if real and player.finite and had_gradients and not real.loss:
        reason = "the step added to gradients from before it, which may be what is not finite; they are not replayed"
        return Outcome(ReplayStatus.UNAVAILABLE, reason)
    if real and player.finite:
        reason = "the same calls on the same values came out finite this time"
        return Outcome(ReplayStatus.NOT_REPRODUCED, "; ".join([reason, *dict.fromkeys(differences)]))
    if real.gradients and not _same_gradients(real, player.bad_gradients):
        differences.append("other parameters have non-finite gradients")
    if differences:
        return Outcome(ReplayStatus.DIVERGED, "; ".join(dict.fromkeys(differences)))
    return Outcome(ReplayStatus.EXACT)


def _same_gradients(real: Symptom, bad: frozenset[str]) -> bool:
    """Whether the gradients that came out non-finite are those of the real step.

    Those are looked at after the loop has clipped them, and a norm that is not finite spreads to all it clips.
    """
    bad = bad & real.judged or bad
    return real.gradients == bad or (bool(bad) and bad < real.gradients == real.judged)
