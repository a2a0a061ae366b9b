"""Names and turns choose what the traces of healthy steps hold: what was asked for, and every statistic of some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ampscope.capture.tracing.sites import SiteKey, Sites
from ampscope.trace.files.arrow_arrays import ColumnBlock
from ampscope.trace.schema import ENTRY_NODES, EdgeRow, Node, OpRow

Patterns = tuple[str, ...]

#: Nodes that stand for a parameter.
_OF_PARAMETERS = frozenset({Node.PARAMETER, Node.GRADIENT, Node.WEIGHT_AFTER, Node.STATE_AFTER})


class Filters(NamedTuple):
    """Patterns of what is asked for, as in a shell (``*``, ``?``, ``[ab]``); None for everything."""

    modules: Patterns | None = None  #: qualified names; what is inside of a module belongs to it
    ops: Patterns | None = None  #: ``aten.mm.default``, ``aten.mm`` or ``mm``
    parameters: Patterns | None = None  #: qualified names; by default those of the modules that are asked for


_ALL = Filters()


class Selection:
    """Selects which ops of a healthy step are written, and measured beyond extremes; incidents are written whole.

    Args:
        sites: The numbered program points.
    """

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._filters = Filters()
        self._kept: list[bool] = []  # by site
        self._enters: list[bool] = []  # by site, whether it is of a value from outside

    @property
    def filters(self) -> Filters:
        """The filters on modules, ops and the like in force; setting them forgets which sites passed the old ones."""
        return self._filters

    @filters.setter
    def filters(self, filters: Filters) -> None:
        self._filters = filters
        self._kept, self._enters = [], []

    def keeps(self, site: int) -> bool:
        """Whether what a site gives is asked for."""
        if self._filters == _ALL:
            return True
        self._describe()
        return self._kept[site - self._sites.first]

    def keeps_parameter(self, name: str) -> bool:
        """Whether a parameter is asked for: by its name, or else by its module's, where no op was asked for alone."""
        modules, ops, parameters = self._filters
        if parameters is not None:
            return matches(name, parameters)
        return is_inside(name.rpartition(".")[0], modules) if modules is not None else ops is None

    def columns(self, ops: ColumnBlock, edges: ColumnBlock) -> tuple[ColumnBlock, ColumnBlock]:
        """Returns the op rows that pass the filters, and the edges between them."""
        if self._filters == _ALL:
            return ops, edges
        seq, site = (np.asarray(ops.columns[name]) for name in ("seq", "site"))
        reader, writer = (np.asarray(edges.columns[name]) for name in ("seq", "from_seq"))
        kept = self._kept_rows(seq, site, reader, writer)
        return ops.where(kept), edges.where(_between(seq[kept], reader, writer))

    def rows(self, ops: list[OpRow], edges: list[EdgeRow]) -> tuple[list[OpRow], list[EdgeRow]]:
        """Returns the op rows that pass the filters, and the edges between them, given as single rows."""
        if self._filters == _ALL:
            return ops, edges
        seq, site = (np.array([getattr(row, name) for row in ops], np.int64) for name in ("seq", "site"))
        reader, writer = (np.array([getattr(edge, name) for edge in edges], np.int64) for name in ("seq", "from_seq"))
        kept = self._kept_rows(seq, site, reader, writer)
        between = _between(seq[kept], reader, writer).tolist()
        found = [row for row, keep in zip(ops, kept.tolist(), strict=True) if keep]
        return found, [edge for edge, keep in zip(edges, between, strict=True) if keep]

    def _kept_rows(
        self, seq: NDArray[Any], site: NDArray[Any], reader: NDArray[Any], writer: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """Marks the rows of sites that pass the filters, and those of outside values that these ops read."""
        self._describe()
        places = site - self._sites.first
        kept: NDArray[np.bool_] = np.array(self._kept, bool)[places]
        read = writer[np.isin(reader, seq[kept])]
        entries: NDArray[np.bool_] = np.array(self._enters, bool)[places] & np.isin(seq, read)
        return kept | entries

    def _describe(self) -> None:
        """Takes in the sites that are new."""
        first = self._sites.first
        for number in range(first + len(self._kept), first + len(self._sites)):
            point = self._sites.point(number)
            self._kept.append(self._is_asked_for(point))
            self._enters.append(point.op in ENTRY_NODES)

    def _is_asked_for(self, point: SiteKey) -> bool:
        if point.op in _OF_PARAMETERS:
            return self.keeps_parameter(point.name.rpartition(" of ")[2])
        if point.op in ENTRY_NODES:
            return self._filters == _ALL
        modules, ops, _ = self._filters
        asked = modules is None or is_inside(point.module, modules)
        return asked and (ops is None or any(matches(name, ops) for name in names_of(point.op)))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is that of a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_inside(module: str, patterns: Iterable[str]) -> bool:
    """Whether a module, or one that it lies in, has a name of one of the patterns."""
    parts = module.split(".")
    return any(matches(".".join(parts[:end]), patterns) for end in range(1, len(parts) + 1))


def names_of(op: str) -> Iterator[str]:
    """The names of an op's overload by which it may be asked for."""
    yield op
    parts = op.split(".")
    if len(parts) == 3:
        yield ".".join(parts[:2])
        yield parts[1]


def _between(seq: NDArray[Any], reader: NDArray[Any], writer: NDArray[Any]) -> NDArray[np.bool_]:
    return np.isin(reader, seq) & np.isin(writer, seq)


#: Outputs of ops that a step takes every statistic of, at most; and parameters, whose gradients and optimizer state
#: come with them.
MOST_OUTPUTS, MOST_PARAMETERS = 256, 16
#: Of these outputs, the part that may be near a limit.
_NEAR = 2


class Rotation:
    """The choice of one step after the other. It depends on what was measured alone.

    Args:
        selection: What is asked for; nothing else has a turn.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._turn = 0
        self._parts = 1
        self._near: frozenset[int] = frozenset()

    def chooses(self, site: int) -> bool:
        """Whether it is the turn of an op's site."""
        turn = site in self._near or (site - self._turn) % self._parts == 0
        return turn and self._selection.keeps(site)

    def parameters(self, names: list[str]) -> list[str]:
        """The parameters whose turn it is, of those that there are."""
        names = list(filter(self._selection.keeps_parameter, names))
        if len(names) <= MOST_PARAMETERS:
            return names
        first = self._turn * MOST_PARAMETERS % len(names)
        return (names + names)[first : first + MOST_PARAMETERS]

    def pass_on(self, outputs: int, nearest: list[int]) -> None:
        """The turn goes to others.

        Args:
            outputs: How many the step had.
            nearest: The sites that are near a limit, the nearest first.
        """
        self._near = frozenset(nearest[: MOST_OUTPUTS // _NEAR])
        room = MOST_OUTPUTS - min(len(nearest), MOST_OUTPUTS // _NEAR)
        self._parts = max(1, -(-outputs // room))
        self._turn += 1
