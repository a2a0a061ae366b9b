"""Two runs, or two steps, against each other."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from ampscope.analysis.diagnosis.diagnosis import judged
from ampscope.analysis.replay.compare.compare_results import (
    Comparison,
    Difference,
    DifferenceKind,
    Divergence,
    Likeness,
    Side,
    parted_in_words,
)
from ampscope.analysis.replay.compare.groups import divergence
from ampscope.analysis.replay.compare.op_sentences import told_alone, told_changed
from ampscope.analysis.replay.compare.pair_of_steps import pair_of
from ampscope.analysis.replay.compare.roots import Expected, curve_tolerance, replay_noise, walk
from ampscope.analysis.replay.compare.run_sentences import (
    Curves,
    Pair,
    on_other_weights,
    told_compiled,
    told_curves,
    told_environment,
    told_verdicts,
    verdicts_in_words,
)
from ampscope.analysis.replay.compare.sides import (
    Opened,
    chosen,
    opened,
    optimizer_of,
    optimizers,
    signatures,
    steps_together,
)
from ampscope.analysis.replay.compare.value_sentences import Before, same_numbers, told_rounding, told_values
from ampscope.analysis.replay.recording import Recording, recording
from ampscope.analysis.results import Diagnosis
from ampscope.analysis.words import capitalized, counted
from ampscope.errors import AmpscopeError
from ampscope.trace.read.find import told_name

#: Steps with other ops, and the same numbers, that are looked at.
_MOST_STEPS = 4
#: Kinds that tell of the run around the numbers, and not of other numbers.
_AROUND = frozenset({DifferenceKind.ENVIRONMENT, DifferenceKind.LINE})
#: Kinds that leave the steps that both made the same.
_BESIDE = _AROUND | {DifferenceKind.RENAMED, DifferenceKind.VERDICT, DifferenceKind.STEPS}
#: Kinds that tell of another program.
_OF_PROGRAM = frozenset(
    {
        DifferenceKind.OP,
        DifferenceKind.MODULE,
        DifferenceKind.CAST,
        DifferenceKind.SCALAR,
        DifferenceKind.OPERANDS,
        DifferenceKind.DTYPE,
        DifferenceKind.SHAPE,
    }
)
_NOT_COMPARED = 43.0


def compare(
    one: str | os.PathLike[str], other: str | os.PathLike[str], *, tolerance: float | None = None
) -> Comparison:
    """Compare two runs, or two steps.

    Args:
        one: ``RUN``, or ``RUN@STEP``, ``RUN@STEP:RANK``, ``RUN@:RANK``, where RUN is a run's folder.
        other: The same. A step that one of the two names is meant for both.
        tolerance: By how much results may be apart, as a share of their largest magnitude; 0 for not at all. By
            default a few units in the last place of the coarser dtype, more where differences add up.

    Raises:
        RunError: a folder cannot be read.
        AmpscopeError: a step was asked for of which there is no trace.
    """
    with ExitStack() as stack:
        sides = []
        for named in (one, other):
            sides.append(opened(chosen(named)))
            stack.callback(sides[-1].run.close)
        return comparison(sides[0], sides[1], tolerance=tolerance)


def comparison(one: Opened, other: Opened, *, tolerance: float | None = None) -> Comparison:
    """`compare` for runs that are open, and stay so.

    Args:
        one: A side.
        other: The other.
        tolerance: As of `compare`.

    Raises:
        RunError: a part of one cannot be read.
        AmpscopeError: a step was asked for of which there is no trace.
    """
    return _Comparing(one, other, tolerance).result()


class _Comparing:
    """One comparison.

    Args:
        one: A side.
        other: The other.
        tolerance: As asked for.
    """

    def __init__(self, one: Opened, other: Opened, tolerance: float | None) -> None:
        self.one, self.other, self.tolerance = one, other, tolerance
        self.of_runs = one.step is None and other.step is None
        self.together = steps_together(one, other)
        self.compiled = on_other_weights(one, other, self.together) if self.of_runs else []
        self.together = [pair for pair in self.together if pair not in self.compiled]
        self.curves = {number: Curves(one, other, number) for number in optimizers(one, other)}
        if not self.together and not self.compiled and not any(len(each.steps) for each in self.curves.values()):
            raise AmpscopeError(
                f"{one.run.path} and {other.run.path} have no step in common: there is nothing to compare."
            )
        self.diverged: Divergence | None = None
        self.differing: list[Pair] = []
        self.found: list[Difference] = []
        self.compared = 0
        self.recordings: list[Recording] = []
        self.widest = 0.0
        self.diagnoses: tuple[Diagnosis, Diagnosis] | None = None

    def result(self) -> Comparison:
        """The result."""
        self._steps()
        self.diagnoses = (judged(self.one.run), judged(self.other.run)) if self.of_runs else None
        self.found += told_environment(self.one, self.other)
        self.found += [*self._not_compared(), *told_compiled(self.compiled)]
        if self.diagnoses is not None:
            self.found += self._of_curves()
            self.found += told_verdicts(*self.diagnoses)
        named = (self._with_optimizer(each) for each in _once(self.found))
        differences = tuple(sorted(named, key=lambda each: -each.score))
        likeness = self._likeness(differences)
        return Comparison(
            likeness=likeness,
            identical=likeness is Likeness.IDENTICAL,
            summary=self._summary(differences),
            first_divergence=self.diverged,
            differences=differences,
            a=_side(
                self.one, sum(len(each.mine) for each in self.curves.values()), self.diagnoses and self.diagnoses[0]
            ),
            b=_side(
                self.other, sum(len(each.theirs) for each in self.curves.values()), self.diagnoses and self.diagnoses[1]
            ),
            traced=len(self.together) + len(self.compiled),
            compared=self.compared,
            tolerance=self.tolerance,
        )

    def _steps(self) -> None:
        """The first step, for the program, and the first whose numbers differ, or the next where rounding did not.

        What comes after a step that differs has other weights, and says nothing more about the program, but for the
        first step of another optimizer: the curves tell how the runs went on.
        """
        self.differing = self._differing() if self.of_runs else self.together
        noise = replay_noise(self.one, self.other) if self.differing and self.tolerance is None else 0.0
        firsts = {optimizer_of(pair[0]): pair for pair in reversed(self.together)}.values()
        parted = False
        for pair in self.together:
            if pair not in firsts and (parted or pair not in self.differing[:_MOST_STEPS]):
                continue
            number = optimizer_of(pair[0])
            before = self._before(pair)
            seen = pair_of(recording(self.one.run, pair[0]), recording(self.other.run, pair[1]))
            walked = walk(seen, Expected(tolerance=self.tolerance, noise=noise, scales=before.scales))
            self.compared += 1
            told = [*told_alone(seen, walked), *told_changed(seen, walked)]
            if not parted:
                told += told_values(seen, walked, before)
                self.recordings, self.widest = [seen.one, seen.other], walked.widest
                if walked.apart:
                    self.diverged = replace(divergence(seen, walked, before.scales), optimizer=number)
                elif not same_numbers(seen):
                    told.append(told_rounding(seen))
            self.found += (replace(each, optimizer=number) for each in told)
            parted = parted or not same_numbers(seen)

    def _differing(self) -> list[Pair]:
        mine, theirs = signatures(self.one), signatures(self.other)
        return [
            pair
            for pair in self.together
            if mine.get((pair[0].step, pair[0].source)) != theirs.get((pair[1].step, pair[1].source))
        ]

    def _before(self, pair: Pair) -> Before:
        """Describes the step before a pair's; it is the same where it was traced and does not differ."""
        mine, theirs = pair[0].step, pair[1].step
        number = optimizer_of(pair[0])
        earlier = [each for each in self.together[: self.together.index(pair)] if optimizer_of(each[0]) == number]
        same = self.of_runs and bool(earlier) and earlier[-1][0].step == mine - 1 and earlier[-1] not in self.differing
        others = (each.parts("lr", 0.0) for key, each in self.curves.items() if key != number)
        rates = self.curves[number].at("lr", mine - 1, theirs - 1)
        return Before(
            same=same and (rates[0] != rates[1] or not any(others)),
            rates=rates,
            scales=self.curves[number].at("scale", mine, theirs),
            several=len(self.curves) > 1,
        )

    def _not_compared(self) -> Iterator[Difference]:
        """Optimizers of whose steps the two have no trace in common, where they have of others'."""
        traced = {optimizer_of(each[0]) for each in self.together}
        for number in self.curves.keys() - traced if traced else ():
            text = "No step was traced in both: its ops were not compared."
            yield Difference(kind=DifferenceKind.NOT_COMPARED, text=text, score=_NOT_COMPARED, optimizer=number)

    def _with_optimizer(self, found: Difference) -> Difference:
        """A difference with the optimizer whose step it is, where there are several."""
        if found.optimizer is None or len(self.curves) == 1:
            return found
        return replace(found, text=f"Optimizer {found.optimizer}: {found.text}")

    def _of_curves(self) -> Iterator[Difference]:
        """Yields where the curves part; where no trace told so before, the runs diverge there."""
        if self.compiled and not self.recordings:  # what they computed in tells how exact a loss can be
            one, other = self.compiled[0]
            self.recordings = [recording(self.one.run, one), recording(self.other.run, other)]
        limit = curve_tolerance(self.recordings, self.widest) if self.tolerance is None else self.tolerance
        named = {(each.kind, each.optimizer) for each in self.found}
        parted: list[tuple[int, int, tuple[int, float, float, float]]] = []
        for number, curves in self.curves.items():
            for told in told_curves(curves, limit):
                if (told.kind, number) not in named:
                    yield replace(told, optimizer=number)
            found = curves.parts("loss", limit) or curves.parts("grad_norm", limit)
            parted += [(found[0], number, found)] if found is not None else []
        if parted and self.diverged is None:
            _, number, (step, *values, error) = min(parted)
            self.diverged = Divergence(
                step=step,
                op="",
                module="",
                source=None,
                error=error,
                tolerance=limit,
                rank=self.one.rank,
                other_step=step,
                optimizer=number,
                unlike=tuple(values) if math.isinf(error) else (),
            )

    def _likeness(self, differences: tuple[Difference, ...]) -> Likeness:
        if self.diverged is not None or self._judged_apart():
            return Likeness.DIFFERENT
        same = all(each.kind in _AROUND for each in differences)
        return Likeness.IDENTICAL if same else Likeness.WITHIN_TOLERANCE

    def _summary(self, differences: tuple[Difference, ...]) -> str:
        seen = f"{counted(len(self.together), 'step')} that both traced"
        likeness = self._likeness(differences)
        if likeness is Likeness.IDENTICAL:
            curves = "loss, gradient norm and loss scale are the same at every step" if self.of_runs else ""
            what = f"{seen}: the same ops gave the same, to the last bit that was measured" if self.together else ""
            told = "; ".join(filter(None, (what, curves)))
            return f"{capitalized(told)}."
        if self.diverged is not None:
            return f"{self._changed_before(differences, self.diverged)}{parted_in_words(self.diverged)}"
        shared = counted(sum(len(each.steps) for each in self.curves.values()), "step")
        if all(each.kind in _BESIDE for each in differences):
            told = f"The same in the {shared} that both made"
        else:
            told = f"Nothing is out of tolerance in the {seen if self.together else shared + ' that both made'}"
        if self.diagnoses is not None and self._judged_apart():
            return f"{told}, but {verdicts_in_words(*self.diagnoses)}."
        return f"{told}; what differs all the same stands below."

    def _changed_before(self, differences: tuple[Difference, ...], parted: Divergence) -> str:
        """Lists the lines of the program that are others, where the step parts elsewhere: they come first."""
        first = next(iter(differences), None)
        if first is None or first.kind not in _OF_PROGRAM or first.step != parted.step or not parted.op:
            return ""
        return f"{first.text} " if (first.op, first.module) != (parted.op, parted.module) else ""

    def _judged_apart(self) -> bool:
        return self.diagnoses is not None and self.diagnoses[0].verdict is not self.diagnoses[1].verdict


def _once(differences: list[Difference]) -> Iterator[Difference]:
    found: dict[tuple[DifferenceKind, str, str], Difference] = {}
    for each in differences:
        text = "" if each.kind is DifferenceKind.SCALE else each.text  # each step has its own
        found.setdefault((each.kind, each.module, text), each)
    yield from found.values()


def _side(side: Opened, steps: int, diagnosis: Diagnosis | None) -> Side:
    manifest = side.run.manifest
    return Side(
        path=str(side.run.path),
        name=told_name(side.run.path, manifest.name),
        rank=side.rank,
        step=side.step,
        steps=steps,
        verdict=diagnosis.verdict.value if diagnosis is not None else "",
        model=manifest.model,
        device=manifest.device,
    )
