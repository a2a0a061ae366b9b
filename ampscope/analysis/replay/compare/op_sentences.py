"""The sentences on ops, casts and modules that only one of two steps has, and on ops of both that changed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from ampscope.analysis.replay.compare.compare_results import Difference, DifferenceKind, ops_listed, places
from ampscope.analysis.replay.compare.groups import NODES, STRUCTURE, RootPlaces
from ampscope.analysis.replay.compare.pair_of_steps import StepPair
from ampscope.analysis.replay.compare.roots import Root, Walked
from ampscope.analysis.replay.pairing import beginnings_of
from ampscope.analysis.words import counted, op_in_words
from ampscope.trace.schema import Cast, Phase

_WHY = {str(Cast.AUTOCAST): "that autocast makes ", str(Cast.EXPLICIT): "that the code asks for "}
_ALONE = (
    DifferenceKind.MICRO_BATCHES,
    DifferenceKind.RECOMPUTE,
    DifferenceKind.MODULE,
    DifferenceKind.CAST,
    DifferenceKind.OP,
)
#: Class names in a sentence.
_CLASSES = 3


def told_alone(pair: StepPair, walked: Walked) -> Iterator[Difference]:
    """Yields the ops, casts and modules that only one step has, in no order."""
    return _Teller(pair, walked).told()


class _Teller:
    """Ops without a counterpart, as sentences.

    Args:
        pair: The steps.
        walked: Where they differ.
    """

    def __init__(self, pair: StepPair, walked: Walked) -> None:
        self.pair, self.walked, self.where = pair, walked, RootPlaces(pair)
        self._paired: list[int] = np.flatnonzero(pair.pairs.theirs >= 0).tolist()
        modules = pair.pairs.modules
        self._beginnings = _with_owners(modules.theirs.keys()), _with_owners(modules.theirs.values())
        self._new = frozenset(modules.only_one), frozenset(modules.only_other)

    def told(self) -> Iterator[Difference]:
        """Modules as a whole, then casts, then ops, those in the same place of both together."""
        where = self.where
        kinds: dict[DifferenceKind, list[Root]] = {kind: [] for kind in _ALONE}
        for root in self.walked.roots:
            if root.kind in (DifferenceKind.OP, DifferenceKind.CAST):
                kinds[self._kind(root)].append(root)
        kinds[DifferenceKind.CAST] = [root for root in kinds[DifferenceKind.CAST] if not self._follows(root)]
        for group in where.grouped(kinds[DifferenceKind.MICRO_BATCHES], lambda _: None):
            mine, theirs = (counted(number, "micro-batch") for number in self._micro_batches)
            yield where.difference(DifferenceKind.MICRO_BATCHES, group, f"A step has {mine} in A and {theirs} in B.")
        for group in where.grouped(kinds[DifferenceKind.RECOMPUTE], lambda root: root.there < 0):
            yield where.difference(DifferenceKind.RECOMPUTE, group, self._again_sentence(group))
        for group in where.grouped(kinds[DifferenceKind.MODULE], self._new_module):
            told = where.difference(DifferenceKind.MODULE, group, self._module_sentence(group))
            yield replace(told, module=self._new_module(group[0])[1])
        for group in where.grouped(kinds[DifferenceKind.CAST], self._cast_signature):
            yield where.difference(DifferenceKind.CAST, group, self._cast_sentence(group))
        alike_gaps: dict[Hashable, list[Root]] = {}
        for gap in where.grouped(kinds[DifferenceKind.OP], self._place):
            if self._is_told(gap):
                alike_gaps.setdefault((self._sides(gap), where.is_backward(gap[0])), []).extend(gap)
        for alike in alike_gaps.values():
            yield where.difference(DifferenceKind.OP, alike, self._gap_sentence(alike))

    def _kind(self, root: Root) -> DifferenceKind:
        """Returns the kind as which an op that only one step has is told."""
        seen, at = self.where.seen(root)
        if seen.micro_batch[at] >= min(self._micro_batches):
            return DifferenceKind.MICRO_BATCHES
        if self.where.site(root).phase == Phase.RECOMPUTE:
            return DifferenceKind.RECOMPUTE
        return DifferenceKind.MODULE if self._is_of_new_module(root) else root.kind

    @cached_property
    def _micro_batches(self) -> tuple[int, int]:
        mine, theirs = (seen.micro_batch[~seen.sink & ~seen.entry] for seen in (self.pair.one, self.pair.other))
        return int(mine.max(initial=0)) + 1, int(theirs.max(initial=0)) + 1

    def _again_sentence(self, group: list[Root]) -> str:
        who = "A" if group[0].there < 0 else "B"
        ops = counted(len(group), "op")
        return f"{who} alone runs {ops} of its forward again in backward, {places(self.where.modules(group))}."

    def _module_sentence(self, group: list[Root]) -> str:
        who, lacks = ("A", "B") if group[0].there < 0 else ("B", "A")
        name = self._new_module(group[0])[1]
        sites = [self.where.site(each) for each in group]
        kinds = sorted({site.module_type for site in sites} - {""})
        ops = counted(sum(site.op not in NODES for site in sites), "op")
        extent = f"{', '.join(kinds[:_CLASSES])}; {ops}" if kinds else ops
        return f"{who} has a module that {lacks} lacks: {name} ({extent})."

    def _cast_sentence(self, group: list[Root]) -> str:
        site = self.where.site(group[0])
        who = "A" if group[0].there < 0 else "B"
        kind = f"{_WHY.get(site.cast, '')}from {_first(site.in_dtypes)} to {_first(site.out_dtypes)}"
        many = f" ({counted(len(group), 'place')})" if len(group) > 1 else ""
        return f"{who} alone has a cast {kind}, {places(self.where.modules(group))}{many}."

    def _gap_sentence(self, group: list[Root]) -> str:
        (mine, theirs), where = self._sides(group), places(self.where.modules(group))
        if not theirs or not mine:
            return f"{'A' if mine else 'B'} alone runs {ops_listed(mine or theirs)}, {where}."
        return f"A runs {ops_listed(mine)} where B runs {ops_listed(theirs)}, {where}."

    def _sides(self, group: list[Root]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the ops of both steps in one place; of several places that are alike, in the first."""
        first = self._place(group[0])
        here = [each for each in group if self._place(each) == first and self.where.site(each).op not in NODES]
        mine = tuple(self.where.site(each).op for each in here if each.there < 0)
        return mine, tuple(self.where.site(each).op for each in here if each.here < 0)

    def _cast_signature(self, root: Root) -> Hashable:
        site = self.where.site(root)
        backward = self.where.is_backward(root)
        return root.here < 0, _first(site.in_dtypes), _first(site.out_dtypes), site.cast, backward

    def _is_told(self, group: list[Root]) -> bool:
        """A place where only values come in has another op, too, which tells more; a backward follows its forward."""
        if all(self.where.site(each).op in NODES for each in group):
            return False
        return not (self._forward_changed and self.where.is_backward(group[0]))

    def _follows(self, root: Root) -> bool:
        """Whether a cast is there for what another op runs in, or is backward's mirror of one in forward."""
        if root.kind is not DifferenceKind.CAST:
            return False
        if self.where.is_backward(root):
            return self._forward_changed
        return self.where.site(root).cast == Cast.AUTOCAST and not self._neighbours(root).isdisjoint(self._dtypes)

    @cached_property
    def _forward_changed(self) -> bool:
        return any(each.kind in STRUCTURE and not self.where.is_backward(each) for each in self.walked.roots)

    @cached_property
    def _dtypes(self) -> frozenset[tuple[str, int]]:
        """Ops that run in another dtype, in both steps."""
        found = [each for each in (*self.walked.roots, *self.walked.followers) if each.kind is DifferenceKind.DTYPE]
        return frozenset({("A", each.here) for each in found} | {("B", each.there) for each in found})

    def _neighbours(self, root: Root) -> set[tuple[str, int]]:
        """Who wrote what a cast reads, and who reads it."""
        seen, at = self.where.seen(root)
        side, writers = ("A", self.pair.writers) if root.here >= 0 else ("B", self.pair.other_writers)
        start, stop = int(seen.first_reader[at]), int(seen.first_reader[at + 1])
        rows = seen.readers[start:stop]
        readers = [seen.position(int(seq)) for seq in seen.edges.arrays["seq"][rows]] if len(rows) else []
        return {(side, each) for each in (*writers[at], *readers)}

    def _is_of_new_module(self, root: Root) -> bool:
        return self.where.site(root).module in self._new[root.there >= 0]

    def _new_module(self, root: Root) -> tuple[bool, str]:
        """Returns which step an op is of, and the outermost module around it of which the other step has nothing."""
        is_other = root.there >= 0
        parts = self.where.site(root).module.split(".")
        names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return is_other, next((name for name in names if name not in self._beginnings[is_other]), ".".join(parts))

    def _place(self, root: Root) -> tuple[str, int]:
        """The module, and the last op before that both steps have."""
        if root.here < 0:
            return self.where.module(root), int(root.order - 0.5) if root.order >= 0 else -1
        at = bisect_left(self._paired, root.here)
        return self.where.module(root), self._paired[at - 1] if at else -1


def _with_owners(names: Iterable[str]) -> frozenset[str]:
    """All names, and those of the modules around them."""
    parts = [name.split(".") for name in names]
    return frozenset(".".join(each[:end]) for each in parts for end in range(1, len(each) + 1))


def _first(dtypes: Iterable[str]) -> str:
    return next(iter(dtypes), "").removeprefix("torch.") or "another dtype"


_RENAMED = 20.0
#: Of another line where the results are others, too: it is what was changed.
_CHANGED_LINE = 93.0
#: Of the op itself, which no other difference explains.
_GIVING_OTHERS = frozenset({DifferenceKind.VALUE, DifferenceKind.NONFINITE, DifferenceKind.OPERANDS})
_CHANGED = frozenset({DifferenceKind.SCALAR, DifferenceKind.DTYPE, DifferenceKind.OPERANDS, DifferenceKind.SHAPE})


def told_changed(pair: StepPair, walked: Walked) -> Iterator[Difference]:
    """Yields the changes of ops that both steps have, in no order."""
    where = RootPlaces(pair)
    found = [root for root in walked.roots if root.kind in _CHANGED]
    forward = {(each.kind, each.change) for each in found if not where.is_backward(each)}
    for group in where.grouped(found, lambda root: _signature(where, root)):
        root = group[0]
        if not where.is_backward(root) or (root.kind, root.change) not in forward:
            yield where.difference(root.kind, group, _sentence(where, group))
    yield from _lines(where, walked)
    yield from _renamed(pair)


def _signature(where: RootPlaces, root: Root) -> Hashable:
    """Ops in another dtype are told together, whatever they do."""
    op = where.site(root).op
    return root.kind, root.change, op in NODES if root.kind is DifferenceKind.DTYPE else op, where.is_backward(root)


def _sentence(where: RootPlaces, group: list[Root]) -> str:
    root = group[0]
    change = root.change
    op, there = op_in_words(where.site(root).op), places(where.modules(group))
    if change is None:
        return f"{op} differs {there}."
    if root.kind is DifferenceKind.SCALAR:
        return f"{change.name} of {op} is {change.was} in A and {change.now} in B, {there}."
    if root.kind is DifferenceKind.DTYPE:
        return _dtype_sentence(where, group, change.was, change.now)
    if root.kind is DifferenceKind.SHAPE:
        return f"{op} works on {change.was} in A and on {change.now} in B, {there}."
    if change.name == "order":
        return f"{op} reads its operands in another order, {there}."
    return f"{op} reads other operands in B, {there}: something else is connected to it."


def _dtype_sentence(where: RootPlaces, group: list[Root], was: str, now: str) -> str:
    sites = [where.site(each) for each in group]
    ops = [site.op for site in sites if not site.cast] or [site.op for site in sites]
    one, other = sites[0], where.pair.other.site_of(group[0].there)
    if one.op in NODES:
        return f"{counted(len(ops), str(one.op))} {places(where.modules(group))}: {was} in A, {now} in B."
    regions = f" (autocast: {one.autocast or 'off'} in A, {other.autocast or 'off'} in B)"
    told = regions if one.autocast != other.autocast else ""
    return f"{ops_listed(ops)} ran in {was} in A and in {now} in B, {places(where.modules(group))}{told}."


def _lines(where: RootPlaces, walked: Walked) -> Iterator[Difference]:
    """The same ops in other lines of code; where they give something else, that is what was changed."""
    valued = {root.here for root in walked.roots if root.kind in _GIVING_OTHERS}
    for group in where.grouped(walked.lines, lambda root: root.change):
        change = group[0].change
        if change is None:
            continue
        ops = ops_listed(dict.fromkeys(where.site(each).op for each in group))
        text = f"Another line of code, {places(where.modules(group))} ({ops}): {change.was} in A, {change.now} in B."
        changed = any(each.here in valued for each in group)
        yield where.difference(DifferenceKind.LINE, group, text, score=_CHANGED_LINE if changed else None)


def _renamed(pair: StepPair) -> Iterator[Difference]:
    """Modules of another name, those with a common beginning of theirs together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for mine, theirs in pair.pairs.modules.renamed:
        *_, beginnings = beginnings_of(mine, theirs)
        groups.setdefault(beginnings, []).append(mine)
    for (mine, theirs), modules in groups.items():
        many = f" ({counted(len(modules), 'module')})" if len(modules) > 1 else ""
        text = f"{mine or 'The model itself'} of A is called {theirs or 'the model itself'} in B{many}."
        yield Difference(
            kind=DifferenceKind.RENAMED,
            module=modules[0],
            text=text,
            score=_RENAMED,
            modules=tuple(modules),
            count=len(modules),
        )
