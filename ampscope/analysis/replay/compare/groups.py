"""Differences that one sentence tells: roots that are alike, where they are, and how much they matter together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from ampscope.analysis.origin.step_graph import source_line
from ampscope.analysis.replay.compare.pair_of_steps import StepPair
from ampscope.analysis.replay.compare.results import Difference, Divergence, Kind
from ampscope.analysis.replay.compare.roots import Root, Walked
from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.results import SourceLine
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, SiteRow

#: How much a change of the program matters; of several the earlier one matters more, by up to `_EARLY`.
_SCORE = 99.0
_EARLY = 5.0
#: What is taken off for a change in backward: it mostly follows from one in forward.
_BACKWARD = 30.0
_MINOR = {Kind.LINE: 10.0, Kind.SHAPE: 60.0, Kind.RECOMPUTE: 61.0}
#: Ways in and out of a step, which are no ops.
NODES = frozenset(str(node) for node in ENTRY_NODES | SINK_NODES)
#: Changes of the program that bring others with them.
STRUCTURE = frozenset({Kind.OP, Kind.CAST, Kind.OPERANDS, Kind.DTYPE})


@dataclass(slots=True)
class Group:
    """Roots that are alike, by order."""

    roots: list[Root] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)

    @property
    def first(self) -> Root:
        """The earliest."""
        return self.roots[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """Where they are, each module once."""
        return tuple(self.names)


class Places:
    """Where roots are.

    Args:
        pair: The steps.
    """

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

    def grouped(self, roots: Iterable[Root], by: Callable[[Root], Hashable]) -> Iterator[Group]:
        """Roots that are alike, in order of the first."""
        groups: dict[Hashable, Group] = {}
        for root in sorted(roots, key=lambda each: each.order):
            group = groups.setdefault(by(root), Group())
            group.roots.append(root)
            group.names.setdefault(self.module(root))
        yield from groups.values()

    def difference(self, kind: Kind, group: Group, text: str, *, score: float | None = None) -> Difference:
        """What a group is, with the place of its first root."""
        root = group.first
        mine, theirs = sources(self.pair, root)
        return Difference(
            kind=kind,
            module=group.modules[0],
            text=text,
            score=self._score(kind, root) if score is None else score,
            step=self.pair.one.traced.step,
            op=self.site(root).op,
            source=mine or theirs,
            other_source=theirs if mine and theirs and mine != theirs else None,
            modules=group.modules,
            count=len(group.roots),
        )

    def _score(self, kind: Kind, root: Root) -> float:
        late = _EARLY * max(root.order, 0.0) / max(len(self.pair.one), 1)
        if kind in _MINOR:
            return round(_MINOR[kind] - late, 2)
        return round(_SCORE - late - _BACKWARD * self.is_backward(root), 2)


def sources(pair: StepPair, root: Root) -> tuple[SourceLine | None, SourceLine | None]:
    """The lines of code of a root in both."""
    mine = source_line(pair.one.site_of(root.here)) if root.here >= 0 else None
    theirs = source_line(pair.other.site_of(root.there)) if root.there >= 0 else None
    return mine, theirs


def divergence(pair: StepPair, walked: Walked) -> Divergence:
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
