"""Two runs, or two steps, against each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.origin.step_graph import source_line
from ampscope.analysis.replay.compare.groups import sources
from ampscope.analysis.replay.compare.pair_of_steps import StepPair, pair_of
from ampscope.analysis.replay.compare.results import Comparison, Difference, Divergence, Kind, Likeness, Side
from ampscope.analysis.replay.compare.roots import Root, Walked, walk
from ampscope.analysis.replay.compare.sides import Opened, chosen, opened, signatures, steps_together
from ampscope.analysis.replay.compare.told_alone import told_alone
from ampscope.analysis.replay.compare.told_changed import told_changed
from ampscope.analysis.replay.compare.told_runs import Curves, told_curves, told_environment, told_verdicts
from ampscope.analysis.replay.compare.told_values import Before, told_values
from ampscope.analysis.replay.compare.tolerances import Expected, curve_tolerance, replay_noise
from ampscope.analysis.replay.compare.words import counted, number, place
from ampscope.analysis.replay.recording import Recording, recording
from ampscope.analysis.results import Diagnosis
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.analysis.words.wording import op_in_words
from ampscope.errors import AmpscopeError
from ampscope.trace.schema import ENTRY_NODES

#: Steps with other ops, and the same numbers, that are looked at.
_MOST_STEPS = 4
#: How much it matters that numbers differ by rounding alone.
_ROUNDED = 15.0
#: Kinds that tell of the run around the numbers, and not of other numbers.
_AROUND = frozenset({Kind.ENVIRONMENT, Kind.RENAMED, Kind.LINE, Kind.VERDICT})

Pair = tuple[TracedStep, TracedStep]


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
        return _Comparing(sides[0], sides[1], tolerance).result()


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
        self.curves = Curves(one, other)
        if not self.together and not len(self.curves.steps):
            raise AmpscopeError(
                f"{one.run.path} and {other.run.path} have no step in common: there is nothing to compare."
            )
        self.diverged: Divergence | None = None
        self.differing: list[Pair] = []
        self.found: list[Difference] = []
        self.compared = 0
        self.recordings: list[Recording] = []
        self.widest = 0.0

    def result(self) -> Comparison:
        """The result."""
        self._steps()
        diagnoses = (diagnose(self.one.run), diagnose(self.other.run)) if self.of_runs else None
        self.found += told_environment(self.one, self.other)
        if diagnoses is not None:
            self.found += self._of_curves()
            self.found += told_verdicts(*diagnoses)
        differences = tuple(sorted(_once(self.found), key=lambda each: -each.score))
        return Comparison(
            likeness=self._likeness(differences),
            identical=self._likeness(differences) is Likeness.IDENTICAL,
            summary=self._summary(differences),
            first_divergence=self.diverged,
            differences=differences,
            a=_side(self.one, self.curves.mine.ints("step").size, diagnoses and diagnoses[0]),
            b=_side(self.other, self.curves.theirs.ints("step").size, diagnoses and diagnoses[1]),
            traced=len(self.together),
            compared=self.compared,
            tolerance=self.tolerance,
        )

    def _steps(self) -> None:
        """The first step, for the program, and the first whose numbers differ, or the next where rounding did not.

        What comes after a step that differs has other weights, and says nothing more about the program: the curves tell
        how the runs went on.
        """
        self.differing = self._differing() if self.of_runs else self.together
        noise = replay_noise(self.one, self.other) if self.differing and self.tolerance is None else 0.0
        for pair in [*(self.together[:1] if self.of_runs else ()), *self.differing[:_MOST_STEPS]]:
            if self.compared and pair is self.together[0]:
                continue
            before = self._before(pair)
            seen = pair_of(recording(self.one.run, pair[0]), recording(self.other.run, pair[1]))
            walked = walk(seen, Expected(tolerance=self.tolerance, noise=noise, scales=before.scales))
            self.compared += 1
            self.found += [
                *told_alone(seen, walked),
                *told_changed(seen, walked),
                *told_values(seen, walked, before),
            ]
            self.recordings, self.widest = [seen.one, seen.other], walked.widest
            if walked.apart:
                self.diverged = _divergence(seen, walked)
            elif not _same_numbers(seen):
                self.found.append(_rounded(seen))
            if not _same_numbers(seen):
                return

    def _differing(self) -> list[Pair]:
        mine, theirs = signatures(self.one), signatures(self.other)
        return [
            pair
            for pair in self.together
            if mine.get((pair[0].step, pair[0].source)) != theirs.get((pair[1].step, pair[1].source))
        ]

    def _before(self, pair: Pair) -> Before:
        """What the step before was; it is the same where it was traced and does not differ."""
        mine, theirs = pair[0].step, pair[1].step
        at = self.together.index(pair)
        last = self.together[at - 1][0].step if at else -1
        same = self.of_runs and last == mine - 1 and last >= 0 and self.together[at - 1] not in self.differing
        return Before(
            same=same,
            rates=self.curves.at("lr", mine - 1, theirs - 1),
            scales=self.curves.at("scale", mine, theirs),
        )

    def _of_curves(self) -> Iterator[Difference]:
        """Where the curves part; where no trace told so before, that is where the runs diverge."""
        limit = curve_tolerance(self.recordings, self.widest) if self.tolerance is None else self.tolerance
        named = {each.kind for each in self.found}
        yield from (each for each in told_curves(self.curves, limit) if each.kind not in named)
        parted = self.curves.parts("loss", limit) or self.curves.parts("grad_norm", limit)
        if parted is not None and self.diverged is None:
            step, _, _, error = parted
            self.diverged = Divergence(
                step=step,
                op="",
                module="",
                source=None,
                error=error,
                tolerance=limit,
                rank=self.one.rank,
                other_step=step,
            )

    def _likeness(self, differences: tuple[Difference, ...]) -> Likeness:
        if self.diverged is not None:
            return Likeness.DIFFERENT
        same = all(each.kind in _AROUND - {Kind.RENAMED} for each in differences)
        return Likeness.IDENTICAL if same else Likeness.WITHIN_TOLERANCE

    def _summary(self, differences: tuple[Difference, ...]) -> str:
        seen = f"{counted(len(self.together), 'step')} that both traced"
        likeness = self._likeness(differences)
        if likeness is Likeness.IDENTICAL:
            curves = "loss, gradient norm and loss scale are the same at every step" if self.of_runs else ""
            what = f"{seen}: the same ops gave the same, to the last bit that was measured" if self.together else ""
            told = "; ".join(filter(None, (what, curves)))
            return f"{told[:1].upper()}{told[1:]}."
        if likeness is Likeness.WITHIN_TOLERANCE:
            return f"Nothing is out of tolerance in the {seen}; what differs all the same stands below."
        return _parted(self.diverged) if self.diverged is not None else ""


def _parted(found: Divergence) -> str:
    """Where the numbers part, in a sentence."""
    steps = f"step {found.step:,}" + (f" (step {found.other_step:,} in B)" if found.other_step != found.step else "")
    if not found.op:
        return f"The curves part at {steps}; no trace that both have tells with which op."
    what = f"with {op_in_words(found.op)} {place(found.module)}"
    if found.op in ENTRY_NODES:
        what = f"with {op_in_words(found.op)} {place(found.module)}, before anything is computed"
    apart = f": {number(found.error)} of the largest magnitude apart" if found.error is not None else ""
    return f"The numbers part at {steps} {what}{apart}."


def _divergence(pair: StepPair, walked: Walked) -> Divergence:
    """The first op beyond tolerance, or what of another program or input led to it."""
    first = walked.apart[0]
    cause = walked.cause[first]
    root = walked.roots[cause] if cause >= 0 else Root(Kind.VALUE, first, int(pair.pairs.theirs[first]), first)
    site = pair.one.site_of(root.here) if root.here >= 0 else pair.other.site_of(root.there)
    mine, theirs = sources(pair, root)
    error = float(pair.error[first])
    return Divergence(
        step=pair.one.traced.step,
        op=site.op,
        module=site.module,
        source=mine or theirs,
        error=error if error > 0 else None,
        tolerance=walked.tolerance[first],
        rank=pair.one.traced.rank,
        other_step=pair.other.traced.step,
        seq=int(pair.one.seq[root.here]) if root.here >= 0 else None,
    )


def _rounded(pair: StepPair) -> Difference:
    """That results differ, though by no more than rounding allows for."""
    apart = np.flatnonzero(~pair.same_bits & (pair.pairs.theirs >= 0) & ~pair.one.sink)
    site = pair.one.site_of(int(apart[0]))
    many = f"{len(apart):,} of {counted(len(pair.one), 'result')} of step {pair.one.traced.step:,}"
    first = f"the first that of {op_in_words(site.op)} {place(site.module)}"
    text = f"{many} differ by no more than rounding allows for, {first}."
    return Difference(
        kind=Kind.VALUE,
        module=site.module,
        text=text,
        score=_ROUNDED,
        step=pair.one.traced.step,
        op=site.op,
        source=source_line(site),
        count=len(apart),
    )


def _same_numbers(pair: StepPair) -> bool:
    """Whether all ops that both have, and all that came in, are the same to the last bit."""
    return bool(pair.same_bits[(pair.pairs.theirs >= 0) & ~pair.one.sink].all())


def _once(differences: list[Difference]) -> Iterator[Difference]:
    """What several steps show, once."""
    found: dict[tuple[Kind, str, str], Difference] = {}
    for each in differences:
        found.setdefault((each.kind, each.module, each.text), each)
    yield from found.values()


def _side(side: Opened, steps: int, diagnosis: Diagnosis | None) -> Side:
    manifest = side.run.manifest
    return Side(
        path=str(side.run.path),
        name=manifest.name,
        rank=side.rank,
        step=side.step,
        steps=steps,
        verdict=diagnosis.verdict.value if diagnosis is not None else "",
        model=manifest.model,
        device=manifest.device,
    )
