"""Looks from time to time whether what an optimizer writes in half precision arrives: in single weights, in its state.

A weight that has not moved since the look before, or a running average, is looked at closer: a step on float32 copies
shows what was to be written. Most of a model may train well beside a norm's gain that its dtype holds at 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.changes.replay_results import ReplayResult
from ampscope.capture.checks.update_drift import Convergence, Decay, Drift
from ampscope.capture.events import StepAttempt, StepObserver
from ampscope.capture.loop_state.state_watch import MOST_NAMED
from ampscope.capture.loop_state.still_averages import LARGER, MOST_STILL, movement_of
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.step.gradients import KeptInHalf, kept_in_half, sampled
from ampscope.capture.torch_support.call_state import random_state_kept
from ampscope.capture.torch_support.guard import Guard, Suppressed
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.trace.evidence import Evidence, LostUpdates
from ampscope.trace.schema import ReplayStatus, StateKind, Trigger


class Float32Step:
    """An optimizer's coming step, made on copies of some of its parameters; nothing of the training is different after.

    Args:
        optimizer: The optimizer; a `plain` one.
        parameters: Those that take part; they have gradients.
        larger: Whether what it keeps in half precision begins larger by a factor, see `enlarged`.

    Attributes:
        failed: Whether it raised.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, larger: bool = False) -> None:
        widened: Callable[[Tensor], Tensor] = _larger if larger else _wide
        self._copies = {id(parameter): _copied(parameter) for parameter in parameters}
        self._again: Any = OptimizerView(optimizer).copied_onto(self._copies, widened)
        step = type(optimizer).step
        self._step = getattr(step, "__wrapped__", step)
        self.failed = not self._makes_it()

    def updates(self) -> dict[int, Tensor] | None:
        """The change of each parameter (float32), by ``id`` of it, in one more step with the same gradients.

        None where that raises. An optimizer that keeps what it could not write (Kahan's sum, float32 weights of its
        own) writes all of that in the first step on copies; what one step is to write shows in the next.
        """
        before = {key: copy.detach().clone() for key, copy in self._copies.items()}
        if not self._makes_it():
            return None
        return {key: copy.detach() - before[key] for key, copy in self._copies.items()}

    def _makes_it(self) -> bool:
        with random_state_kept(), Suppressed() as suppressed:
            self._step(self._again)
        return suppressed.error is None

    def state(self, parameter: nn.Parameter, key: str) -> Tensor | None:
        """Returns the state that the step leaves of a parameter; None where the optimizer keeps it no more."""
        value = self._again.state[self._copies[id(parameter)]].get(key)
        return value if isinstance(value, Tensor) else None


def enlarged(tensor: Tensor) -> Tensor:
    """The values with which state begins where it begins larger."""
    return torch.where(tensor == 0, torch.ones_like(tensor), tensor * LARGER)


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(_wide(parameter))
    assert parameter.grad is not None
    copy.grad = _wide(parameter.grad)
    return copy


def _wide(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return plain.float() if plain.dtype in HALF else plain.clone()


def _larger(tensor: Tensor) -> Tensor:
    return enlarged(_wide(tensor)) if tensor.dtype in HALF else _wide(tensor)


#: One step in this many is looked at, at first; later one in so many.
_OFTEN, _EARLY, _RARELY = 16, 128, 64
#: Elements of all weights of which a step is made on copies.
_LARGEST = 1 << 22
#: A learning rate below this share of the highest so far is meant to move nothing much.
_FULL_RATE = 0.5
#: Looks that are made whatever they cost.
_FREE_LOOKS = 5


class _Watched(NamedTuple):
    """A tensor as it was at the look before, and what was seen of it since it stands still."""

    before: Tensor
    seen: Drift | Decay


class _Rate:
    """The learning rate of an optimizer: whether it is that of training, and not of a warm-up or its end."""

    def __init__(self) -> None:
        self._highest = self._latest = 0.0
        self.rises = self.is_full = False

    def read(self, rate: float | None) -> None:
        """The rate of this look."""
        now = rate if rate is not None else 1.0
        self.rises = now > self._latest > 0
        self._latest, self._highest = now, max(now, self._highest)
        self.is_full = now >= _FULL_RATE * self._highest > 0


class StillUpdates(StepObserver):
    """Looks at what each optimizer keeps in half precision.

    Args:
        models: The watched models.
        recorder: Takes what stands still, once of each kind and optimizer.
        terminal: Where the user is told.
        budget: Whether a step on copies can be afforded.
        guard: Catches faults of looking.
    """

    def __init__(
        self, models: Models, recorder: Recorder, terminal: Terminal, budget: ReplayBudget, guard: Guard
    ) -> None:
        self.guard = guard
        self._models = models
        self._recorder = recorder
        self._terminal = terminal
        self._budget = budget
        self._watched: dict[int, dict[tuple[str, str], _Watched]] = {}
        self._rates: dict[int, _Rate] = {}
        self._convergence: dict[int, Convergence] = {}
        self._told: set[tuple[int, StateKind]] = set()
        self._looks = 0

    def optimizer_steps(self, attempt: StepAttempt) -> None:
        """Looks, if the turn has come."""
        if attempt.bad or attempt.on_device or not _is_due(attempt.step):
            return
        kept = [
            each
            for each in kept_in_half(attempt.optimizer, self._models)
            if (attempt.index, each.kind) not in self._told
        ]
        if kept and self._budget.allows_look(whatever_it_costs=self._looks < _FREE_LOOKS):
            started = time.perf_counter()
            self._look(attempt, kept)
            seconds = time.perf_counter() - started
            attempt.judging_s += seconds
            self._budget.spent(seconds)

    def _look(self, attempt: StepAttempt, kept: Sequence[KeptInHalf]) -> None:
        self._looks += 1
        rate = self._rates.setdefault(attempt.index, _Rate())
        known_rate = OptimizerView(attempt.optimizer).learning_rate
        rate.read(float(known_rate) if known_rate is not None else None)
        self._convergence.setdefault(attempt.index, Convergence()).look(attempt)
        known = self._watched.pop(attempt.index, {})
        if rate.rises:
            known = {key: each for key, each in known.items() if isinstance(each.seen, Decay)}
        values = {each.key: sampled(each.tensor) for each in kept}
        same = _same_as_before({key: (known[key].before, value) for key, value in values.items() if key in known})
        still = [each for each in kept if each.key in same]
        self._watched[attempt.index] = {
            each.key: known[each.key] if each.key in same else _first(attempt.step, each, values[each.key])
            for each in kept
        }
        close = [each for each in still if each.kind is StateKind.OPTIMIZER or rate.is_full]
        if close and OptimizerView(attempt.optimizer).is_plain:
            self._look_closer(attempt, close)

    def _look_closer(self, attempt: StepAttempt, still: Sequence[KeptInHalf]) -> None:
        """Makes the step on copies, and takes down what was to be written."""
        parameters = _within(still)
        chosen = [each for each in still if id(each.parameter) in parameters]
        wide = Float32Step(attempt.optimizer, [*parameters.values()])
        state = [each for each in chosen if each.kind is StateKind.OPTIMIZER]
        larger = Float32Step(attempt.optimizer, [*parameters.values()], larger=True) if state else wide
        if not chosen or wide.failed or larger.failed:
            return
        watched = self._watched[attempt.index]
        for each in state:
            _read_state(watched[each.key].seen, attempt.step, each, wide, larger)
        updates = wide.updates()
        if updates is None:
            return
        for each in chosen:
            _read_weight(watched[each.key].seen, attempt.step, each, updates[id(each.parameter)])
        for kind in StateKind.WEIGHT, StateKind.OPTIMIZER:
            lost = [each for each in chosen if each.kind is kind and self._is_lost(attempt, watched[each.key].seen)]
            if lost:
                self._told.add((attempt.index, kind))
                found = [_described(each, watched[each.key]) for each in lost]
                self._tell(attempt, found)

    def _is_lost(self, attempt: StepAttempt, seen: Drift | Decay) -> bool:
        if isinstance(seen, Drift) and self._convergence[attempt.index].reached(seen.since):
            return False
        return seen.is_lost

    def _tell(self, attempt: StepAttempt, found: list[LostUpdates]) -> None:
        trigger, status = Trigger.UPDATES_LOST, ReplayStatus.UNAVAILABLE
        outcome = ReplayResult(status, "the step went well; what its optimizer was to write was computed on copies")
        names = tuple(each.owner for each in found)
        self._recorder.incident(
            trigger,
            step=attempt.step,
            optimizer=attempt.index,
            loss=None,
            scale=None,
            outcome=outcome,
            evidence=Evidence(bad_params=names[:MOST_NAMED], held=tuple(found[:MOST_NAMED]), count=len(found)),
        )
        self._terminal.incident(trigger.replace("_", " "), attempt.step, outcome.status, outcome.reason)


def _first(step: int, kept: KeptInHalf, value: Tensor) -> _Watched:
    value = value.clone()
    return _Watched(value, Drift(step, value) if kept.kind is StateKind.WEIGHT else Decay(step, value))


def _same_as_before(pairs: dict[tuple[str, str], tuple[Tensor, Tensor]]) -> frozenset[tuple[str, str]]:
    """Returns the keys of the pairs of which nearly all is as it was; waits for the device once."""
    if not pairs:
        return frozenset()
    shares = [(before == now).float().mean() for before, now in pairs.values()]
    home = shares[0].device
    found = torch.stack([share.to(home) for share in shares]).tolist()
    return frozenset(key for key, share in zip(pairs, found, strict=True) if share >= MOST_STILL)


def _within(still: Sequence[KeptInHalf]) -> dict[int, nn.Parameter]:
    """The parameters that take part, by ``id``: the smallest, as many as are not too large together."""
    chosen: dict[int, nn.Parameter] = {}
    left = _LARGEST
    for each in sorted(still, key=lambda each: each.tensor.numel()):
        if id(each.parameter) not in chosen and each.tensor.numel() <= left:
            chosen[id(each.parameter)] = each.parameter
            left -= each.tensor.numel()
    return chosen


def _read_weight(seen: Drift | Decay, step: int, kept: KeptInHalf, update: Tensor) -> None:
    """Takes down what a step in float32 writes of a weight, where there is a gradient."""
    if isinstance(seen, Drift):
        seen.read(step, torch.where(_asked(kept), sampled(update), 0.0))


def _read_state(seen: Drift | Decay, step: int, kept: KeptInHalf, wide: Float32Step, larger: Float32Step) -> None:
    """Takes down what a step in float32 writes into a running average, where there is a gradient."""
    before = sampled(kept.tensor).float()
    after, after_larger = wide.state(kept.parameter, kept.name), larger.state(kept.parameter, kept.name)
    if isinstance(seen, Decay) and after is not None and after_larger is not None:
        found = movement_of(before, sampled(after), enlarged(before), sampled(after_larger))
        moved = torch.where(_asked(kept), found.moved, 0.0)
        seen.read(step, sampled(kept.tensor).clone(), found._replace(moved=moved))


def _asked(kept: KeptInHalf) -> Tensor:
    """Marks the sampled elements that have a gradient other than zero."""
    assert kept.parameter.grad is not None
    return sampled(kept.parameter.grad) != 0


def _described(kept: KeptInHalf, watched: _Watched) -> LostUpdates:
    told = watched.seen.evidence
    share = told.share if isinstance(watched.seen, Decay) else _still(kept, watched)
    return replace(told, kind=kept.kind, name=kept.name, owner=kept.owner, numel=kept.tensor.numel(), share=share)


def _still(kept: KeptInHalf, watched: _Watched) -> float:
    """The share of a weight that is as it was."""
    return float((watched.before == sampled(kept.tensor)).float().mean())


def _is_due(step: int) -> bool:
    return step % (_OFTEN if step < _EARLY else _RARELY) == 0
