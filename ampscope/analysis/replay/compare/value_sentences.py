"""The sentences on values that differ: those given to the step, results of ops on the same operands, magnitudes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ampscope.analysis.op_facts import numel
from ampscope.analysis.replay.compare.compare_results import LISTED, Difference, DifferenceKind, numbers, place, places
from ampscope.analysis.replay.compare.groups import RootPlaces
from ampscope.analysis.replay.compare.pair_of_steps import StepPair
from ampscope.analysis.replay.compare.roots import Root, Walked
from ampscope.analysis.results import SourceLine
from ampscope.analysis.words import capitalized, counted, listed, op_in_words
from ampscope.numerals import number
from ampscope.trace.schema import Node

_SCORES = {
    DifferenceKind.NONFINITE: 97.0,
    DifferenceKind.VALUE: 90.0,
    DifferenceKind.SCALE: 88.0,
    DifferenceKind.SEED: 87.0,
    DifferenceKind.LEARNING_RATE: 86.5,
    DifferenceKind.OPTIMIZER: 86.0,
    DifferenceKind.WEIGHTS: 85.0,
    DifferenceKind.BATCH: 84.0,
    DifferenceKind.RANDOM: 82.0,
    DifferenceKind.RANGE: 25.0,
}
#: From this share of the parameters on that differ, another seed is what differs.
_NEARLY_ALL = 0.5
#: Modules whose magnitudes are told.
_MOST_RANGES = 3
_WORDS = 1 << 64
#: How much it matters that numbers differ by rounding alone.
_ROUNDED = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """Holds what is known of the step before, and of the step rows of both."""

    same: bool = False  #: both traced it, and it is the same to the last bit
    rates: tuple[float | None, float | None] = (None, None)  #: learning rates of the step before
    scales: tuple[float | None, float | None] = (None, None)  #: loss scales of this step
    several: bool = False  #: several optimizers make steps


def told_values(pair: StepPair, walked: Walked, before: Before) -> list[Difference]:
    """Returns the differences of values, in no order."""
    kinds: dict[DifferenceKind, list[Root]] = {}
    for root in walked.roots:
        kinds.setdefault(root.kind, []).append(root)
    teller = _Teller(pair, before)
    given = [kind for kind in (DifferenceKind.WEIGHTS, DifferenceKind.BATCH, DifferenceKind.RANDOM) if kind in kinds]
    told: list[Difference] = []
    of_one_step = pair.one.traced.step == pair.other.traced.step and not before.same
    if of_one_step and len(given) > 1 and teller.is_nearly_all(kinds.get(DifferenceKind.WEIGHTS, ())):
        roots = [root for kind in given for root in kinds.pop(kind)]
        told.append(teller.difference(DifferenceKind.SEED, roots, teller.seed(given, roots)))
    for kind, sentence in teller.sentences.items():
        if kind in kinds:
            told.append(teller.difference(*sentence(kinds[kind])))
    if DifferenceKind.NONFINITE not in kinds and (born := _not_finite(pair)) is not None:
        told.append(teller.difference(*teller.sentences[DifferenceKind.NONFINITE]([born])))
    return [*told, *_ranges(pair)]


class _Teller:
    """Roots as sentences.

    Args:
        pair: The steps.
        before: What is known of the step before.
    """

    def __init__(self, pair: StepPair, before: Before) -> None:
        self.pair, self.before = pair, before
        self.sentences = {
            DifferenceKind.WEIGHTS: self._weights,
            DifferenceKind.BATCH: self._batch,
            DifferenceKind.RANDOM: self._random,
            DifferenceKind.SCALE: self._scale,
            DifferenceKind.VALUE: self._value,
            DifferenceKind.NONFINITE: self._nonfinite,
        }

    def difference(self, kind: DifferenceKind, roots: list[Root], text: str) -> Difference:
        """One difference with the place of its first root."""
        return RootPlaces(self.pair).difference(kind, roots, text, score=_SCORES[kind])

    def is_nearly_all(self, roots: Iterable[Root]) -> bool:
        """Whether most of the parameters differ, of those that chance may have filled."""
        return len(list(roots)) > max(_NEARLY_ALL * self._parameters(varied=True), 1)

    def seed(self, given: Sequence[DifferenceKind], roots: list[Root]) -> str:
        """States that another seed was set."""
        words = {
            DifferenceKind.WEIGHTS: "weights",
            DifferenceKind.BATCH: "the batch",
            DifferenceKind.RANDOM: "random numbers",
        }
        weights = [each for each in roots if each.kind is DifferenceKind.WEIGHTS]
        told = listed([words[kind] for kind in given], LISTED, "module").capitalize()
        of = f"{len(weights):,} of {counted(self._parameters(), 'parameter and buffer').replace('r and b', 'rs and b')}"
        return f"{told} of step {self._step()} differ ({of}): another seed, or another start."

    def _weights(self, roots: list[Root]) -> tuple[DifferenceKind, list[Root], str]:
        names = [self.pair.one.site_of(each.here).name for each in roots]
        whole = self._parameters()
        step = self._step()
        if self.before.same:
            return self._optimizer(roots, whole)
        if len(names) == 1:
            bit = ", by as much as one changed bit" if self._is_one_bit(roots[0]) else ""
            rest = f"; the other {whole - 1:,} parameters and buffers are the same to the last bit" if whole > 1 else ""
            return DifferenceKind.WEIGHTS, roots, f"{names[0]} differs when step {step} begins{bit}{rest}."
        text = f"{len(names):,} of {whole:,} parameters and buffers differ when step {step} begins: "
        return DifferenceKind.WEIGHTS, roots, f"{text}{listed(names, LISTED, 'tensor')}."

    def _optimizer(self, roots: list[Root], whole: int) -> tuple[DifferenceKind, list[Root], str]:
        step = self.pair.one.traced.step
        same = f"step {step - 1:,} is the same to the last bit, and step {step:,} begins with other weights"
        mine, theirs = self.before.rates
        extent = f"{len(roots):,} of {whole:,}"
        if mine is not None and theirs is not None and mine != theirs:
            was, now = numbers(mine, theirs)
            rates = f"The learning rate is {was} in A and {now} in B"
            return DifferenceKind.LEARNING_RATE, roots, f"{rates}: {same} ({extent})."
        which = "an" if self.before.several else "the"
        why = f"{which} optimizer, its settings (eps, betas, weight decay) or its state differ"
        return DifferenceKind.OPTIMIZER, roots, f"{capitalized(same)} ({extent}): {why}."

    def _batch(self, roots: list[Root]) -> tuple[DifferenceKind, list[Root], str]:
        names = [self.pair.one.site_of(each.here).name for each in roots]
        others = listed(names, LISTED, "input")
        return DifferenceKind.BATCH, roots, f"Step {self._step()} was given another batch or constant: {others}."

    def _random(self, roots: list[Root]) -> tuple[DifferenceKind, list[Root], str]:
        modules = tuple(dict.fromkeys(self.pair.one.site_of(each.here).module for each in roots))
        text = f"Step {self._step()} drew other random numbers, {places(modules)}: another seed, or another number of "
        return DifferenceKind.RANDOM, roots, f"{text}draws before."

    def _scale(self, roots: list[Root]) -> tuple[DifferenceKind, list[Root], str]:
        mine, theirs = self.before.scales
        if mine is not None and theirs is not None:
            was, now = numbers(mine, theirs)
        else:
            was, now = ("none (as 1)" if each is None else number(each) for each in (mine, theirs))
        return DifferenceKind.SCALE, roots, f"The loss scale of step {self._step()} is {was} in A and {now} in B."

    def _value(self, roots: list[Root]) -> tuple[DifferenceKind, list[Root], str]:
        first = roots[0]
        site, error = self.pair.one.site_of(first.here), float(self.pair.error[first.here])
        more = f", the first of {len(roots):,} ops that do," if len(roots) > 1 else ""
        read = "the same, or other parts of the same," if self._reads_parts(first.here) else "the same"
        known = f", though what it reads is {read} as far as that was measured" if self.pair.writers[first.here] else ""
        apart = f"apart by {number(error)} of the largest magnitude"
        text = f"{op_in_words(site.op)} {place(site.module)}{more} gives something else ({apart}){known}."
        return DifferenceKind.VALUE, roots, text

    def _reads_parts(self, here: int) -> bool:
        """Whether an operand has fewer elements than what was written for it."""
        one = self.pair.one
        written = [int(one.outputs.arrays["numel"][one.first_output[each]]) for each in self.pair.writers[here]]
        read = [numel(shape) for shape in one.site_of(here).in_shapes]
        return any(some < whole for some, whole in zip(read, written, strict=False))

    def _nonfinite(self, roots: list[Root]) -> tuple[DifferenceKind, list[Root], str]:
        first = roots[0]
        site = self.pair.one.site_of(first.here)
        who, other = ("A", "B") if self.pair.one.nonfinite[first.here] else ("B", "A")
        text = f"{op_in_words(site.op)} {place(site.module)} is not finite in {who}, and finite in {other}."
        return DifferenceKind.NONFINITE, roots, text

    def _is_one_bit(self, root: Root) -> bool:
        mine, theirs = self.pair.one, self.pair.other
        here, there = int(mine.first_output[root.here]), int(theirs.first_output[root.there])
        sums = [seen.outputs.row(row)["checksum"] for seen, row in ((mine, here), (theirs, there))]
        if None in sums:
            return False
        apart: int = (sums[0] - sums[1]) % _WORDS
        return min(apart, _WORDS - apart).bit_count() == 1

    def _parameters(self, *, varied: bool = False) -> int:
        """How many parameters and buffers the step read; with ``varied``, those whose elements are not all the same."""
        one = self.pair.one
        of = [site.op in (Node.PARAMETER, Node.BUFFER, Node.CARRIED) for site in one.sites]
        kept = np.array(of, np.bool_)[one.site]
        if varied:
            first = one.first_output[:-1]
            kept &= one.outputs.floats("min")[first] != one.outputs.floats("max")[first]
        return int(kept.sum())

    def _step(self) -> str:
        mine, theirs = self.pair.one.traced.step, self.pair.other.traced.step
        return f"{mine:,}" if mine == theirs else f"{mine:,} (A), {theirs:,} (B)"


def same_numbers(pair: StepPair) -> bool:
    """Whether all ops that both have, and all that came in, are the same to the last bit."""
    return bool(pair.same_bits[(pair.pairs.theirs >= 0) & ~pair.one.sink].all())


def told_rounding(pair: StepPair) -> Difference:
    """States that results differ, though by no more than rounding allows for."""
    apart = np.flatnonzero(~pair.same_bits & (pair.pairs.theirs >= 0) & ~pair.one.sink)
    site = pair.one.site_of(int(apart[0]))
    many = f"{len(apart):,} of {counted(len(pair.one), 'result')} of step {pair.one.traced.step:,}"
    first = f"the first that of {op_in_words(site.op)} {place(site.module)}"
    text = f"{many} differ by no more than rounding allows for, {first}."
    return Difference(
        kind=DifferenceKind.VALUE,
        module=site.module,
        text=text,
        score=_ROUNDED,
        step=pair.one.traced.step,
        op=site.op,
        source=SourceLine.of(site),
        count=len(apart),
    )


def _not_finite(pair: StepPair) -> Root | None:
    """The first op in which something begins that is not finite, where the other step's is finite."""
    one, other, theirs = pair.one, pair.other, pair.pairs.theirs
    paired = np.flatnonzero(theirs >= 0)
    mine, also = one.nonfinite[paired], other.nonfinite[theirs[paired]]
    born = one.born[paired] | other.born[theirs[paired]]
    found = paired[(mine != also) & born]
    return Root(DifferenceKind.NONFINITE, int(found[0]), int(theirs[found[0]]), int(found[0])) if len(found) else None


def _ranges(pair: StepPair) -> Iterator[Difference]:
    """Modules whose largest magnitude in forward is a factor of 2 or more apart, the farthest first."""
    one, other = pair.one, pair.other
    theirs = pair.pairs.theirs
    told = (theirs >= 0) & ~one.backward & ~one.entry & ~one.sink & ~one.cast
    apart = np.where(told, other.largest[np.maximum(theirs, 0)] - one.largest, np.nan) if len(other) else np.empty(0)
    farthest: dict[str, tuple[float, int]] = {}
    for at in np.flatnonzero(np.abs(apart) >= 1.0).tolist():
        module = one.site_of(at).module
        farthest[module] = max(farthest.get(module, (0.0, at)), (float(apart[at]), at), key=lambda each: abs(each[0]))
    ordered = sorted(farthest.items(), key=lambda each: -abs(each[1][0]))
    for module, (bits, at) in ordered[:_MOST_RANGES]:
        site = one.site_of(at)
        mine, there = (2.0 ** float(each) for each in (one.largest[at], other.largest[theirs[at]]))
        yield Difference(
            kind=DifferenceKind.RANGE,
            module=module,
            text=f"{op_in_words(site.op)} {place(module)} reaches {number(mine)} in A and {number(there)} in B.",
            score=round(_SCORES[DifferenceKind.RANGE] + min(abs(bits), 10.0) / 10.0, 2),
            step=one.traced.step,
            op=site.op,
        )
