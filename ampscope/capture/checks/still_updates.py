"""Looks from time to time whether what an optimizer writes in half precision arrives: in single weights, in its state.

A weight that has not moved since the look before, or a running average, is looked at closer: a step on float32 copies
shows what was to be written. Most of a model may train well beside a norm's gain that its dtype holds at 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.changes.replay_results import ReplayResult
from ampscope.capture.checks.check import Asks, Check, CheckContext
from ampscope.capture.events import StepAttempt
from ampscope.capture.loop_state.state_watch import MOST_NAMED
from ampscope.capture.loop_state.stillness import MOST_STILL, Decay, Drift, enlarged, movement_of
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.rerun.optimizer_rerun import Copied, StepAgain, cloned
from ampscope.capture.step.gradients import KeptInHalf, kept_in_half, sampled
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.trace.evidence import Evidence, LostUpdates
from ampscope.trace.schema import ReplayStatus, StateKind, Trigger

#: One step in this many is looked at, at first; later one in so many.
_OFTEN, _EARLY, _RARELY = 16, 128, 64
#: Elements of all weights of which a step is made on copies.
_LARGEST = 1 << 22
#: A learning rate below this share of the highest so far is meant to move nothing much.
_FULL_RATE = 0.5


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


#: A training has come to its end where gradients and loss are smaller than they were by these factors,
_SMALL, _FALLEN = 0.05, 0.2
#: or where gradients are smaller by this one, and the loss has fallen by this share of its whole way at most.
_SMALLER, _FLAT = 0.5, 0.02


class Convergence:
    """The losses and norms that were seen at looks."""

    def __init__(self) -> None:
        self._losses: list[tuple[int, float]] = []
        self._norm = self._largest = 0.0

    def look(self, attempt: StepAttempt) -> None:
        """Takes down what is known of a step; waits for the device."""
        norm, loss = attempt.norm, attempt.opened.mean_loss()
        if norm is None:
            norm = attempt.opened.norms.get(id(attempt.optimizer))
        self._norm = float(norm) if norm is not None else math.nan
        self._largest = max(self._largest, self._norm)
        if loss is not None and math.isfinite(value := float(loss)):
            self._losses.append((attempt.step, value))

    def reached(self, since: int) -> bool:
        """Whether gradients and loss are small, or gradients are smaller and the loss has not fallen since a step."""
        losses = [loss for _, loss in self._losses]
        latest = [loss for step, loss in self._losses if step >= since]
        if not latest:
            return False
        if self._norm < _SMALL * self._largest and latest[-1] < _FALLEN * max(losses):
            return True
        half = max(1, len(latest) // 2)
        fallen = (sum(latest[:half]) - sum(latest[-half:])) / half
        return self._norm < _SMALLER * self._largest and fallen < _FLAT * (max(losses) - min(losses))


class StillUpdates(Check):
    """Looks at what each optimizer keeps in half precision.

    Args:
        context: What it needs of its run.
        terminal: Where the user is told.
    """

    free_looks = 5
    needs_tape = False

    def __init__(self, context: CheckContext, terminal: Terminal) -> None:
        super().__init__(context)
        self._terminal = terminal
        self._watched: dict[int, dict[tuple[str, str], _Watched]] = {}
        self._rates: dict[int, _Rate] = {}
        self._convergence: dict[int, Convergence] = {}
        self._told: set[tuple[int, StateKind]] = set()

    def due(self, attempt: StepAttempt) -> Asks | None:
        """Whether the turn has come, and the optimizer keeps anything in half precision."""
        step = attempt.step
        if attempt.on_device or step % (_OFTEN if step < _EARLY else _RARELY):
            return None
        kept = [
            each
            for each in kept_in_half(attempt.optimizer, self.engine.models)
            if (attempt.index, each.kind) not in self._told
        ]
        return self._asks(attempt, kept) if kept else None

    def _asks(self, attempt: StepAttempt, kept: Sequence[KeptInHalf]) -> Asks:
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
            yield from self._closer(attempt, close)
        return None

    def _closer(self, attempt: StepAttempt, still: Sequence[KeptInHalf]) -> Asks:
        """Makes the step on copies, and takes down what was to be written."""
        parameters = _within(still)
        chosen = [each for each in still if id(each.parameter) in parameters]
        again = StepAgain(attempt.optimizer, {each.owner: each.parameter for each in chosen}, cloned, None)
        wide: Copied | None = yield partial(again.made, dtype=torch.float32)
        state = [each for each in chosen if each.kind is StateKind.OPTIMIZER]
        larger: Copied | None = (yield partial(again.made, dtype=torch.float32, state=_larger)) if state else wide
        if not chosen or wide is None or larger is None:
            return None
        watched = self._watched[attempt.index]
        for each in state:
            _read_state(watched[each.key].seen, attempt.step, each, wide, larger)
        updates = self._updates(again, wide)
        if updates is None:
            return None
        for each in chosen:
            _read_weight(watched[each.key].seen, attempt.step, each, updates[each.owner])
        for kind in StateKind.WEIGHT, StateKind.OPTIMIZER:
            lost = [each for each in chosen if each.kind is kind and self._is_lost(attempt, watched[each.key].seen)]
            if lost:
                self._told.add((attempt.index, kind))
                self._tell(attempt, [_described(each, watched[each.key]) for each in lost])
        return None

    def _updates(self, again: StepAgain, copied: Copied) -> dict[str, Tensor] | None:
        """The change of each parameter in one more step with the same gradients; None where that raises.

        An optimizer that keeps what it could not write (Kahan's sum, float32 weights of its own) writes all of that in
        the first step on copies; what one step is to write shows in the next.
        """
        before = {name: copy.detach().clone() for name, copy in copied.parameters.items()}
        if not again.again(copied, self.engine.models):
            return None
        return {name: copy.detach() - before[name] for name, copy in copied.parameters.items()}

    def _is_lost(self, attempt: StepAttempt, seen: Drift | Decay) -> bool:
        if isinstance(seen, Drift) and self._convergence[attempt.index].reached(seen.since):
            return False
        return seen.is_lost

    def _tell(self, attempt: StepAttempt, found: list[LostUpdates]) -> None:
        trigger, status = Trigger.UPDATES_LOST, ReplayStatus.UNAVAILABLE
        outcome = ReplayResult(status, "the step went well; what its optimizer was to write was computed on copies")
        names = tuple(each.owner for each in found)
        self.recorder.incident(
            trigger,
            step=attempt.step,
            optimizer=attempt.index,
            loss=None,
            scale=None,
            outcome=outcome,
            evidence=Evidence(bad_params=names[:MOST_NAMED], held=tuple(found[:MOST_NAMED]), count=len(found)),
        )
        self._terminal.incident(trigger.replace("_", " "), attempt.step, outcome.status, outcome.reason)


def _larger(tensor: Tensor) -> Tensor:
    """A copy of state that begins larger, where it is in half precision."""
    return enlarged(tensor.detach().float()) if tensor.dtype in HALF else cloned(tensor)


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


def _read_state(seen: Drift | Decay, step: int, kept: KeptInHalf, wide: Copied, larger: Copied) -> None:
    """Takes down what a step in float32 writes into a running average, where there is a gradient."""
    before = sampled(kept.tensor).float()
    after, after_larger = (each.optimizer.state[each.parameters[kept.owner]].get(kept.name) for each in (wide, larger))
    if isinstance(seen, Decay) and isinstance(after, Tensor) and isinstance(after_larger, Tensor):
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
