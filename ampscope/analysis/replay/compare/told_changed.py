"""Which ops of both steps are others: arguments, dtypes, operands, lines of code, names of modules."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from ampscope.analysis.replay.compare.groups import NODES, Group, Places
from ampscope.analysis.replay.compare.pair_of_steps import StepPair
from ampscope.analysis.replay.compare.results import Difference, Kind
from ampscope.analysis.replay.compare.roots import Root, Walked
from ampscope.analysis.replay.compare.words import counted, ops_listed, places
from ampscope.analysis.words.wording import op_in_words

_RENAMED = 20.0
#: Of another line where the results are others, too: it is what was changed.
_CHANGED_LINE = 93.0
#: Of the op itself, which no other difference explains.
_GIVING_OTHERS = frozenset({Kind.VALUE, Kind.NONFINITE, Kind.OPERANDS})
_KINDS = frozenset({Kind.SCALAR, Kind.DTYPE, Kind.OPERANDS, Kind.SHAPE})


def told_changed(pair: StepPair, walked: Walked) -> Iterator[Difference]:
    """What is another about ops that both have, in no order."""
    where = Places(pair)
    found = [root for root in walked.roots if root.kind in _KINDS]
    forward = {(each.kind, each.change) for each in found if not where.is_backward(each)}
    for group in where.grouped(found, lambda root: _signature(where, root)):
        root = group.first
        if not where.is_backward(root) or (root.kind, root.change) not in forward:
            yield where.difference(root.kind, group, _sentence(where, group))
    yield from _lines(where, walked)
    yield from _renamed(pair)


def _signature(where: Places, root: Root) -> Hashable:
    """Ops in another dtype are told together, whatever they do."""
    op = where.site(root).op
    return root.kind, root.change, op in NODES if root.kind is Kind.DTYPE else op, where.is_backward(root)


def _sentence(where: Places, group: Group) -> str:
    root = group.first
    change = root.change
    op, there = op_in_words(where.site(root).op), places(group.modules)
    if change is None:
        return f"{op} differs {there}."
    if root.kind is Kind.SCALAR:
        return f"{change.name} of {op} is {change.was} in A and {change.now} in B, {there}."
    if root.kind is Kind.DTYPE:
        return _dtype_sentence(where, group, change.was, change.now)
    if root.kind is Kind.SHAPE:
        return f"{op} works on {change.was} in A and on {change.now} in B, {there}."
    if change.name == "order":
        return f"{op} reads its operands in another order, {there}."
    return f"{op} reads other operands in B, {there}: something else is connected to it."


def _dtype_sentence(where: Places, group: Group, was: str, now: str) -> str:
    sites = [where.site(each) for each in group.roots]
    ops = [site.op for site in sites if not site.cast] or [site.op for site in sites]
    one, other = sites[0], where.pair.other.site_of(group.first.there)
    if one.op in NODES:
        return f"{counted(len(ops), str(one.op))} {places(group.modules)}: {was} in A, {now} in B."
    regions = f" (autocast: {one.autocast or 'off'} in A, {other.autocast or 'off'} in B)"
    told = regions if one.autocast != other.autocast else ""
    return f"{ops_listed(ops)} ran in {was} in A and in {now} in B, {places(group.modules)}{told}."


def _lines(where: Places, walked: Walked) -> Iterator[Difference]:
    """The same ops in other lines of code; where they give something else, that is what was changed."""
    valued = {root.here for root in walked.roots if root.kind in _GIVING_OTHERS}
    for group in where.grouped(walked.lines, lambda root: root.change):
        change = group.first.change
        if change is None:
            continue
        ops = ops_listed(dict.fromkeys(where.site(each).op for each in group.roots))
        text = f"Another line of code, {places(group.modules)} ({ops}): {change.was} in A, {change.now} in B."
        changed = any(each.here in valued for each in group.roots)
        yield where.difference(Kind.LINE, group, text, score=_CHANGED_LINE if changed else None)


def _renamed(pair: StepPair) -> Iterator[Difference]:
    """Modules of another name, those with a common beginning of theirs together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for mine, theirs in pair.pairs.modules.renamed:
        groups.setdefault(_beginnings(mine, theirs), []).append(mine)
    for (mine, theirs), modules in groups.items():
        many = f" ({counted(len(modules), 'module')})" if len(modules) > 1 else ""
        text = f"{mine or 'The model itself'} of A is called {theirs or 'the model itself'} in B{many}."
        yield Difference(
            kind=Kind.RENAMED, module=modules[0], text=text, score=_RENAMED, modules=tuple(modules), count=len(modules)
        )


def _beginnings(one: str, other: str) -> tuple[str, str]:
    """Both names without the end that they share."""
    mine, theirs = one.split("."), other.split(".")
    while len(mine) > 1 and len(theirs) > 1 and mine[-1] == theirs[-1]:
        mine, theirs = mine[:-1], theirs[:-1]
    return ".".join(mine), ".".join(theirs)
