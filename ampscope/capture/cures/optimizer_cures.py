"""An optimizer steps again on copies: for its op, and for the eps, dtype or gradients that keep it finite."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ampscope.capture.changes.replaced_calls import relative_change
from ampscope.capture.changes.replay_results import ChangedResult, FormUsed, TrialResult
from ampscope.capture.events import StepAttempt
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.rerun.engine import LookDepth, RerunEngine
from ampscope.capture.rerun.optimizer_rerun import Copied, StepAgain, traced
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.tensor_tree import HALF
from ampscope.capture.torch_support.user_line import NOWHERE
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Change, Form, Source, Trial, source_of

#: What an optimizer adds before it divides where its dtype holds it: the default of most of torch's.
_USUAL_EPS = 1e-8
#: The norm to which gradients are clipped by most who do.
USUAL_NORM = 1.0


class _Tried(NamedTuple):
    """A change of an optimizer's step."""

    form: Form
    dtype: torch.dtype | None = None  #: of what is half precision
    eps: float | None = None
    norm: float | None = None  #: to which the gradients are clipped
    was: float | None = None  #: the eps, or the norm, that it had


def cures(again: StepAgain, engine: RerunEngine) -> Iterator[TrialResult]:
    """Tries one change after another, where the step as it was leaves what is not finite once more.

    Args:
        again: The step.
        engine: Makes it.
    """
    unchanged, _ = _run(again, engine, None)
    if unchanged is None or unchanged.finite:
        return
    for change in _changes(again, unchanged):
        copied, seconds = _run(again, engine, change)
        outcome = Trial.UNAVAILABLE if copied is None else Trial.FINITE if copied.finite else Trial.NONFINITE
        name = type(again.source).__name__
        moved = None
        if copied is not None and change.dtype is None:  # else good values differ by rounding alone
            moved = _good_change(unchanged.parameters, copied.parameters)
        used = FormUsed(change.form, name, NOWHERE, None, change.eps or change.norm, change.was, moved)
        reason = "" if copied is not None else "the optimizer does not step so"
        yield TrialResult(Change.FORM, (), (), None, ChangedResult(outcome, reason, None, seconds), form=used)


def _changes(again: StepAgain, copied: Copied) -> Iterator[_Tried]:
    """Yields what to try: another eps where the dtype makes it zero, float32 for half, clipping of large gradients."""
    lost = {eps: surviving(eps, dtype) for eps, dtype in OptimizerView(copied.optimizer).epsilons}
    for was, eps in lost.items():
        if eps is not None:
            yield _Tried(Form.OPTIMIZER_EPS, eps=eps, was=was)
    if any(parameter.dtype in HALF for parameter in again.parameters.values()):
        yield _Tried(Form.OPTIMIZER_IN_FLOAT32, dtype=torch.float32)
    norm = norm_of(again.parameters)
    if norm > USUAL_NORM:
        yield _Tried(Form.OPTIMIZER_CLIPPED, norm=USUAL_NORM, was=norm)


def surviving(eps: float, dtype: torch.dtype) -> float | None:
    """The eps to put in the place of one that is zero in a dtype; None where it is not."""
    info = FINFO.get(str(dtype).removeprefix("torch."))
    if info is None or (eps != 0 and not info.vanishes(eps)):
        return None
    return max(_USUAL_EPS, info.survivor)


def _run(again: StepAgain, engine: RerunEngine, change: _Tried | None) -> tuple[Copied | None, float]:
    """The copies after the step, and how long that took; None where it could not be made."""
    started = time.perf_counter()

    def adjust(copied: Copied) -> None:
        if change is not None and change.eps is not None:
            other, was = change.eps, change.was
            copied.adjust("eps", lambda eps: other if eps == was else eps)
        if change is not None and change.norm is not None:
            clipped(copied, change.norm / (change.was or 1.0))

    dtype = change.dtype if change is not None else None
    copied = engine.step(partial(again.made, dtype=dtype, adjust=adjust))
    return copied, time.perf_counter() - started


def clipped(copied: Copied, share: float) -> None:
    """Makes the gradients of the copies smaller."""
    for parameter in copied.parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(share)


def norm_of(parameters: Mapping[str, nn.Parameter]) -> float:
    """Computes the norm of all gradients of the parameters; in float64, whose range their squares do not leave."""
    squares = [
        parameter.grad.double().square().sum() for parameter in parameters.values() if parameter.grad is not None
    ]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _good_change(before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> float | None:
    """How far the weights are others that were finite as it was, in units of their dtype's eps."""
    changes = [relative_change(parameter.detach(), after[name].detach()) for name, parameter in before.items()]
    return max((each for each in changes if each is not None), default=None)


class OptimizerAgain:
    """Runs steps of optimizers that left something bad again.

    Args:
        engine: Says what is watched, what observes it, and whether that fails.
        trials: The same, for trying something.
        recorder: Where rows go.
    """

    def __init__(self, engine: RerunEngine, trials: RerunEngine, recorder: Recorder) -> None:
        self._engine = engine
        self._trials = trials
        self._models = engine.models
        self._recorder = recorder

    def show(self, attempt: StepAttempt, names: list[str]) -> None:
        """Records which op of the optimizer makes what is bad, as far as its step shows it, and what cures that.

        Args:
            attempt: Its optimizer has stepped; its gradients are still there.
            names: Qualified names of the parameters that are bad, or whose state is.
        """
        replayed = source_of(Source.REPLAY, attempt.index)
        tracer = self._engine.tracer(LookDepth.FULL)
        with self._engine.guard:
            again = StepAgain.of(attempt, names, self._models) if attempt.traced != replayed else None
            if again is not None and traced(again, self._models, tracer):
                attempt.traced = replayed
                self._recorder.trace(*tracer.rows(attempt.step, replayed), attempt.step, replayed)
                self.try_cures(attempt, names)
        attempt.before = None
        tracer.release()

    def try_cures(self, attempt: StepAttempt, names: list[str]) -> None:
        """Records what would have kept the step finite; arguments as in `show`."""
        if self._trials.guard.broken or not self._trials.budget.allows_trial(0):
            return
        with self._trials.guard:
            again = StepAgain.of(attempt, names, self._models)
            for trial in cures(again, self._trials) if again is not None else ():
                self._recorder.trial(trial, step=attempt.step, optimizer=attempt.index)
