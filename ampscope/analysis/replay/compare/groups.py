"""Differences that one sentence tells: roots that are alike, where they are, and how much they matter together."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from ampscope.analysis.arrays import IntArray
from ampscope.analysis.replay.compare.compare_results import Difference, DifferenceKind, Divergence
from ampscope.analysis.replay.compare.pair_of_steps import StepPair
from ampscope.analysis.replay.compare.roots import Root, Walked
from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.results import SourceLine
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, SiteRow

#: How much a change of the program matters; of several the earlier one matters more, by up to `_EARLY`.
_SCORE = 99.0
_EARLY = 5.0
#: What is taken off for a change in backward: it mostly follows from one in forward.
_BACKWARD = 30.0
_MINOR = {DifferenceKind.LINE: 10.0, DifferenceKind.SHAPE: 60.0, DifferenceKind.RECOMPUTE: 61.0}
#: Ways in and out of a step, which are no ops.
NODES = frozenset(str(node) for node in ENTRY_NODES | SINK_NODES)
#: Changes of the program that bring others with them.
STRUCTURE = frozenset({DifferenceKind.OP, DifferenceKind.CAST, DifferenceKind.OPERANDS, DifferenceKind.DTYPE})


class RootPlaces:
    """Finds the program point, the module and the recording of each root."""

    def __init__(self, pair: StepPair) -> None:
        self.pair = pair
        self._names = {theirs: mine for mine, theirs in pair.pairs.modules.theirs.items()}

    def site(self, root: Root) -> SiteRow:
        """The program point, in the first where it has one."""
        seen, at = self.seen(root)
        return seen.site_of(at)

    def module(self, root: Root) -> str:
        """The name that the first has for the module, where it has one."""
        module = self.site(root).module
        return self._names.get(module, module) if root.here < 0 else module

    def seen(self, root: Root) -> tuple[Recording, int]:
        """The recording and the position in it; those of the first where it has the op."""
        return (self.pair.one, root.here) if root.here >= 0 else (self.pair.other, root.there)

    def is_backward(self, root: Root) -> bool:
        """Whether it ran in backward."""
        seen, at = self.seen(root)
        return bool(seen.backward[at])

    def modules(self, roots: Iterable[Root]) -> tuple[str, ...]:
        """The modules of roots, each once."""
        return tuple(dict.fromkeys(map(self.module, roots)))

    def grouped(self, roots: Iterable[Root], by: Callable[[Root], Hashable]) -> Iterator[list[Root]]:
        """Roots that are alike by order, in order of the first."""
        groups: dict[Hashable, list[Root]] = {}
        for root in sorted(roots, key=lambda each: each.order):
            groups.setdefault(by(root), []).append(root)
        yield from groups.values()

    def difference(
        self, kind: DifferenceKind, roots: Sequence[Root], text: str, *, score: float | None = None
    ) -> Difference:
        """Makes a difference of roots, at the place of the first of them."""
        root = min(roots, key=lambda each: each.order)
        mine, theirs = sources(self.pair, root)
        return Difference(
            kind=kind,
            module=self.module(root),
            text=text,
            score=self._score(kind, root) if score is None else score,
            step=self.pair.one.traced.step,
            op=self.site(root).op,
            source=mine or theirs,
            other_source=theirs if mine and theirs != mine else None,
            modules=self.modules(roots),
            count=len(roots),
        )

    def _score(self, kind: DifferenceKind, root: Root) -> float:
        late = _EARLY * max(root.order, 0.0) / max(len(self.pair.one), 1)
        if kind in _MINOR:
            return round(_MINOR[kind] - late, 2)
        return round(_SCORE - late - _BACKWARD * self.is_backward(root), 2)


def sources(pair: StepPair, root: Root) -> tuple[SourceLine | None, SourceLine | None]:
    """The lines of code of a root in both."""
    mine = SourceLine.of(pair.one.site_of(root.here)) if root.here >= 0 else None
    theirs = SourceLine.of(pair.other.site_of(root.there)) if root.there >= 0 else None
    return mine, theirs


def divergence(pair: StepPair, walked: Walked, scales: tuple[float | None, float | None]) -> Divergence:
    """The first op beyond tolerance; before it, what one step alone has and it reads.

    Its numbers are those of the same op: of what only one step has there are none, but for a loss scale, which without
    a scaler is 1.
    """
    root = _parting(pair, walked)
    site = RootPlaces(pair).site(root)
    mine, theirs = sources(pair, root)
    alone = min(root.here, root.there) < 0
    error = 0.0 if alone else float(pair.error[root.here])
    if root.kind is DifferenceKind.SCALE and alone:
        one, other = (1.0 if each is None else each for each in scales)
        error = abs(one - other) / max(abs(one), abs(other))
    return Divergence(
        step=pair.one.traced.step,
        op=site.op,
        module=site.module,
        source=mine or theirs,
        error=error if error > 0 else None,
        tolerance=0.0 if alone else walked.tolerance[root.here],
        rank=pair.one.traced.rank,
        other_step=pair.other.traced.step,
        seq=int(pair.one.seq[root.here]) if root.here >= 0 else None,
        other_seq=int(pair.other.seq[root.there]) if root.there >= 0 else None,
        traced=pair.one.traced.source,
        other_traced=pair.other.traced.source,
        unlike=pair.unlike(root.here, root.there) if math.isinf(error) else (),
    )


def _parting(pair: StepPair, walked: Walked) -> Root:
    """The first op beyond tolerance, or the first of those without a counterpart that lead to it.

    An earlier op that both have and that is another is not named: its own result is within tolerance.
    """
    here = walked.apart[0]
    there = int(pair.pairs.theirs[here])
    mine = _first_alone(here, pair.one, pair.writers, pair.pairs.theirs)
    theirs = _first_alone(there, pair.other, pair.other_writers, pair.pairs.mine)
    roots = [each for each in walked.roots if each.there < 0 <= each.here and each.here == mine]
    roots += [each for each in walked.roots if each.here < 0 <= each.there and each.there == theirs]
    cause = walked.roots[walked.cause[here]] if walked.cause[here] >= 0 else None
    if (
        cause is not None
        and cause.kind in (DifferenceKind.OP, DifferenceKind.CAST)
        and all(each.kind is not DifferenceKind.SCALE for each in roots)
    ):
        roots.append(cause)  # another program leads here, by ops that both have as well
    roots += [each for each in walked.roots if each.here == here]
    return min(roots, key=lambda each: each.order, default=Root(DifferenceKind.VALUE, here, there, here))


def _first_alone(at: int, seen: Recording, writers: list[list[int]], partners: IntArray) -> int:
    """The earliest op without a counterpart from which an op reads, by such ops alone; -1 where it reads of none."""
    found, left = set[int](), [at]
    while left:
        before = {each for each in writers[left.pop()] if partners[each] < 0 and not seen.entry[each]} - found
        found |= before
        left += before
    return min(found, default=-1)
