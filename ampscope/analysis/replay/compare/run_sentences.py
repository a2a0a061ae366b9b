"""The sentences on all else that differs between two runs: where they ran, their curves, and their diagnoses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ampscope.analysis.arrays import BoolArray, Columns, FloatArray, IntArray
from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.replay.compare.compare_results import Difference, DifferenceKind, numbers
from ampscope.analysis.replay.compare.sides import Opened
from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.analysis.tables.step_history import in_order, steps_of
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.analysis.words import capitalized, counted
from ampscope.trace.schema import EventKind, Source, Table, execution_of
from ampscope.trace.vocabulary import Severity, Verdict

_VERDICT = 70.0
_FINDING = 65.0
_RATE, _LOSS, _NORM, _SCALE, _SKIPS, _STEPS = 50.0, 48.0, 46.0, 44.0, 42.0, 41.0
_VERDICTS = {
    Verdict.HEALTHY: "is healthy",
    Verdict.AT_RISK: "is at risk",
    Verdict.PROBLEM: "has a problem",
    Verdict.PARTLY_OBSERVED: "was observed in part",
    Verdict.NOT_OBSERVED: "was not observed",
}
_ENVIRONMENT = 30.0
_COMPILED = 43.0
_ROUNDED = 14.0
_COLUMNS = ("step", "loss", "grad_norm", "scale", "lr", "skipped", "averaged")
#: A configuration that says how much was recorded, not how the training ran.
_OF_RECORDING = frozenset({"every", "overhead", "replay_budget", "save_tensors", "ranks", "disk_budget"})

Pair = tuple[TracedStep, TracedStep]


class Curves:
    """The step attempts of one optimizer in both, by step.

    Args:
        one: A side.
        other: The other.
        optimizer: Whose attempts.
    """

    def __init__(self, one: Opened, other: Opened, optimizer: int) -> None:
        self.mine, self.theirs = _steps(one, optimizer), _steps(other, optimizer)
        mine, theirs = self.mine.ints("step"), self.theirs.ints("step")
        self.steps, self._here, self._there = np.intersect1d(mine, theirs, return_indices=True)

    def at(self, column: str, step: int, other_step: int) -> tuple[float | None, float | None]:
        """A value of a step of each; None where it was not recorded."""
        return _at(self.mine, column, step), _at(self.theirs, column, other_step)

    def both(self, column: str) -> tuple[FloatArray, FloatArray, BoolArray]:
        """The values of steps that both made, and where both recorded them; no loss scale is one of 1."""
        mine, theirs = self.mine.floats(column)[self._here], self.theirs.floats(column)[self._there]
        known, also = self.mine.known(column)[self._here], self.theirs.known(column)[self._there]
        if column == "scale":  # without a scaler the loss is as it is
            return np.where(known, mine, 1.0), np.where(also, theirs, 1.0), known | also
        return mine, theirs, known & also

    def parts(self, column: str, tolerance: float) -> tuple[int, float, float, float] | None:
        """The first step at which a value is apart by more than ``tolerance`` of it, both values, and how far."""
        mine, theirs, known = self.both(column)
        same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.abs(mine - theirs) / np.maximum(np.abs(mine), np.abs(theirs))
        error = np.where(same | ~known, 0.0, np.where(np.isfinite(share), share, np.inf))
        found = np.flatnonzero(error > tolerance)
        if not len(found):
            return None
        at = found[0]
        return int(self.steps[at]), float(mine[at]), float(theirs[at]), float(error[at])


def told_curves(curves: Curves, tolerance: float) -> Iterator[Difference]:
    """Yields where learning rate, loss, gradient norm, loss scale, skips and lengths part."""
    words: list[tuple[DifferenceKind, str, str, float, float]] = [
        (DifferenceKind.LEARNING_RATE, "lr", "learning rate", _RATE, 0.0),
        (DifferenceKind.LOSS, "loss", "loss", _LOSS, tolerance),
        (DifferenceKind.GRAD_NORM, "grad_norm", "gradient norm", _NORM, tolerance),
        (DifferenceKind.SCALE, "scale", "loss scale", _SCALE, 0.0),
    ]
    for kind, column, name, score, limit in words:
        found = curves.parts(column, limit)
        if found is not None:
            step, mine, theirs, _ = found
            was, now = numbers(mine, theirs)
            text = f"The {name} parts at step {step:,}: {was} in A, {now} in B."
            yield Difference(kind=kind, text=text, score=score, step=step)
        elif (near := curves.parts(column, 0.0)) is not None:
            text = f"The {name} differs from step {near[0]:,} on, within tolerance."
            yield Difference(kind=kind, text=text, score=_ROUNDED, step=near[0])
    yield from _lengths(curves)


def _lengths(curves: Curves) -> Iterator[Difference]:
    mine, theirs = curves.mine, curves.theirs
    skipped, also = (int(each.flags("skipped").sum()) for each in (mine, theirs))
    here, there, _ = curves.both("skipped")
    if int(here.sum()) != int(there.sum()):
        text = f"A skipped {counted(skipped, 'step')} of {len(mine):,}, B {also:,} of {len(theirs):,}."
        yield Difference(kind=DifferenceKind.SKIPS, text=text, score=_SKIPS)
    if len(curves.steps) < max(len(mine), len(theirs)):
        shared = (
            f"; {counted(len(curves.steps), 'step')} by both" if len(curves.steps) < min(len(mine), len(theirs)) else ""
        )
        text = f"A made {counted(len(mine), 'step')}, B {len(theirs):,}{shared}."
        yield Difference(kind=DifferenceKind.STEPS, text=text, score=_STEPS)


def on_other_weights(one: Opened, other: Opened, together: Sequence[Pair]) -> list[Pair]:
    """The pairs of which one was traced as it ran, and the other after its optimizer had moved the weights.

    Compiled code cannot be traced as it runs: where a step of it ended well, its ops are known from running it again
    afterwards. What went wrong, or stood out, was run again before the weights moved.

    Args:
        one: A side.
        other: The other.
        together: Steps of both that belong together.
    """
    judged = [_judged(side) for side in (one, other)]
    return [pair for pair in together if _is_rerun(pair[0], judged[0]) != _is_rerun(pair[1], judged[1])]


def _judged(side: Opened) -> frozenset[int]:
    """The steps that were run again before the weights moved."""
    wrong = {row.step for row in side.run.rows(Table.INCIDENTS, rank=side.rank)}
    spikes = side.run.rows(Table.EVENTS, rank=side.rank, kind=EventKind.SPIKE)
    return frozenset(wrong | {row.step for row in spikes})


def _is_rerun(traced: TracedStep, judged: frozenset[int]) -> bool:
    return execution_of(traced.source)[0] == Source.REPLAY and traced.step not in judged


def told_compiled(pairs: Sequence[Pair]) -> Iterator[Difference]:
    """States that ops of steps that were run again uncompiled are not compared, and why.

    Args:
        pairs: Those of `on_other_weights`.
    """
    if not pairs:
        return
    here = execution_of(pairs[0][0].source)[0] == Source.REPLAY
    text = (
        f"{'A' if here else 'B'} recorded the ops of {counted(len(pairs), 'step')} by running the step again "
        "uncompiled, as it does in a process that has compiled code: they are not compared. Losses, gradient norms and "
        "loss scales are those of the steps themselves."
    )
    yield Difference(kind=DifferenceKind.NOT_COMPARED, text=text, score=_COMPILED, step=pairs[0][0].step)


def told_verdicts(one: Diagnosis, other: Diagnosis) -> Iterator[Difference]:
    """Verdicts, incidents and findings that only one has."""
    if one.verdict is not other.verdict:
        worse = next((each for each in (one, other) if each.primary is not None), None)
        why = f": {worse.summary}" if worse is not None else "."
        first = worse.primary.step if worse is not None and worse.primary is not None else None
        yield Difference(
            kind=DifferenceKind.VERDICT, text=verdicts_in_words(one, other) + why, score=_VERDICT, step=first
        )
    mine, theirs = _items(one), _items(other)
    for who, items, others in (("A", mine, theirs), ("B", theirs, mine)):
        for key in [key for key in items if key not in others]:
            item = items[key]
            text = f"In {who} alone: {item_in_words(item)}, step {item.step:,}."
            module = getattr(item, "module", "")
            yield Difference(kind=DifferenceKind.VERDICT, module=module, text=text, score=_FINDING, step=item.step)


def verdicts_in_words(one: Diagnosis, other: Diagnosis) -> str:
    """``A is healthy, B has a problem``."""
    return f"A {_VERDICTS[one.verdict]}, B {_VERDICTS[other.verdict]}"


def told_environment(one: Opened, other: Opened) -> Iterator[Difference]:
    """Versions, devices, sizes and configuration that differ, each a sentence."""
    mine, theirs = one.run.manifest, other.run.manifest
    facts: list[tuple[str, Any, Any]] = [
        ("device", mine.device, theirs.device),
        ("number of ranks", mine.world_size, theirs.world_size),
        ("model", mine.model, theirs.model),
        ("number of parameters", mine.parameters, theirs.parameters),
        ("version of ampscope", mine.ampscope, theirs.ampscope),
    ]
    names = dict.fromkeys((*mine.versions, *theirs.versions))
    versions = [(name, mine.versions.get(name), theirs.versions.get(name)) for name in names]
    facts += [(name if name == "platform" else f"version of {name}", was, now) for name, was, now in versions]
    here, there = _flat(mine.configuration), _flat(theirs.configuration)
    facts += [(f"setting {name}", here[name], there[name]) for name in here if name in there]
    for place, (name, was, now) in enumerate(facts):
        if was != now:
            text = f"{capitalized(name)}: {_word(was)} in A, {_word(now)} in B."
            yield Difference(kind=DifferenceKind.ENVIRONMENT, text=text, score=round(_ENVIRONMENT - place / 10, 2))


def _flat(configuration: dict[str, Any]) -> dict[str, Any]:
    """Returns a run's configuration without settings that only say how much was recorded; groups are unfolded."""
    found: dict[str, Any] = {}
    for name, value in configuration.items():
        if name in _OF_RECORDING:
            continue
        found |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _word(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "not recorded" if value in (None, "") else value if isinstance(value, str) else json.dumps(value)


def _items(diagnosis: Diagnosis) -> dict[object, Incident | Finding]:
    """Returns the incidents and findings of a diagnosis that matter, the first of each kind."""
    items: list[Incident | Finding] = [*diagnosis.incidents, *diagnosis.findings]
    found: dict[object, Incident | Finding] = {}
    for item in items:
        if item.severity is not Severity.INFO:
            found.setdefault((item.cause, getattr(item, "op", "")), item)
    return found


def _steps(side: Opened, optimizer: int) -> Columns:
    return in_order(steps_of(side.run, side.rank, optimizer).select(*_COLUMNS))


def _at(steps: Columns, column: str, step: int) -> float | None:
    numbers: IntArray = steps.ints("step")
    at = int(np.searchsorted(numbers, step))
    if at >= len(numbers) or numbers[at] != step or not steps.known(column)[at]:
        return None
    return float(steps.floats(column)[at])
