"""The precision of each op of a traced step: by module, by op, its casts, and fp32 work inside autocast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

import narwhals as nw

from ampscope.analysis.results import SourceLine
from ampscope.analysis.rounding import is_floating, plain, ran_in
from ampscope.analysis.tables.lazy_tables import collect
from ampscope.analysis.tables.traced_steps import ExecutedSite, TracedStep, executed, of_step, traced_steps
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Cast, SiteRow, Table, said

_WIDE = frozenset({"float32", "float64"})


class WideReason(StrEnum):
    """Why an op inside an autocast region ran in a wide dtype."""

    POLICY = "policy"  #: autocast widened an operand for it
    REQUESTED = "requested"  #: the program widened an operand, ``.float()``
    PROMOTED = "promoted"  #: operands of both widths: the wide one won
    OPERANDS = "operands"  #: all its floating operands were wide already
    OWN = "own"  #: it widens by itself, or makes a new tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Island:
    """Wide ops of one kind at one line of one module."""

    op: str
    module: str
    phase: str
    dtype: str
    reason: WideReason
    source: SourceLine | None
    count: int
    elements: int
    first: int = 0  #: sequence number of the first


def fp32_islands(run: Run, traced: TracedStep, done: Iterable[ExecutedSite]) -> tuple[Fp32Island, ...]:
    """The wide ops among ``done`` that an autocast region encloses, most elements first."""
    wide = [one for one in done if one.site.autocast and ran_in(one.site) in _WIDE]
    if not wide:
        return ()
    after = _sites_after_casts(run, traced)
    islands = (_island(one, _reason(one.site, after)) for one in wide)
    return tuple(sorted(_added_up(islands, ("count", "elements")), key=lambda island: -island.elements))


def _reason(site: SiteRow, after: dict[int, frozenset[str]]) -> WideReason:
    casts = after.get(site.site, frozenset())
    widths = {plain(dtype) in _WIDE for dtype in site.in_dtypes if is_floating(dtype)}
    if Cast.AUTOCAST in casts:
        return WideReason.POLICY
    if Cast.EXPLICIT in casts:
        return WideReason.REQUESTED
    if widths == {True, False}:
        return WideReason.PROMOTED
    return WideReason.OPERANDS if widths == {True} else WideReason.OWN


def _sites_after_casts(run: Run, traced: TracedStep) -> dict[int, frozenset[str]]:
    """For each site the kinds of widening casts that wrote one of its operands."""
    widening = {site.site: site.cast for site in run.rows(Table.SITES, rank=traced.rank) if _widens(site)}
    ops = of_step(run, Table.OPS, traced).filter(nw.col("out") == 0).select("seq", "site")
    casts = ops.filter(nw.col("site").is_in(list(widening))).select(from_seq="seq", cast_site="site")
    edges = of_step(run, Table.EDGES, traced).select("seq", "from_seq")
    joined = collect(edges.join(casts, on="from_seq").join(ops, on="seq").select("site", "cast_site").unique())
    found: dict[int, set[str]] = {}
    for row in joined:
        found.setdefault(row["site"], set()).add(widening[row["cast_site"]])
    return {site: frozenset(casts) for site, casts in found.items()}


def _widens(site: SiteRow) -> bool:
    return site.cast in (Cast.AUTOCAST, Cast.EXPLICIT) and any(plain(dtype) in _WIDE for dtype in site.out_dtypes)


def _island(one: ExecutedSite, reason: WideReason) -> Fp32Island:
    site = one.site
    return Fp32Island(
        op=site.op,
        module=site.module,
        phase=site.phase,
        dtype=ran_in(site),
        reason=reason,
        source=SourceLine.of(site),
        count=one.count,
        elements=one.elements,
        first=one.first,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How much ran in one dtype."""

    dtype: str
    ops: int
    bytes: int  #: written by those ops


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRow:
    """A module or an op, and what it ran in; the largest share first."""

    name: str
    kind: str  #: the module's class; empty for an op and for a fold of several modules
    shares: tuple[Share, ...]
    first: int = 0  #: sequence number of its first op

    @property
    def ops(self) -> int:
        """Executed ops over all dtypes."""
        return sum(share.ops for share in self.shares)

    @property
    def bytes(self) -> int:
        """Bytes written over all dtypes."""
        return sum(share.bytes for share in self.shares)

    def part(self, dtype: str, *, by_bytes: bool = False) -> float:
        """The share of ``dtype``, between 0 and 1, in ops or in bytes written."""
        mine = next((share for share in self.shares if share.dtype == dtype), Share(dtype=dtype, ops=0, bytes=0))
        part, whole = (mine.bytes, self.bytes) if by_bytes else (mine.ops, self.ops)
        return part / whole if whole else 0.0


NOTHING = PrecisionRow(name="", kind="", shares=())


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRow:
    """Conversions of one kind at one line."""

    kind: Cast
    from_dtype: str
    to_dtype: str
    module: str
    phase: str
    source: SourceLine | None
    count: int
    elements: int
    bytes: int  #: written
    first: int = 0  #: sequence number of the first


Counted = TypeVar("Counted", Fp32Island, CastRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision(NotebookRepr):
    """The precision of one traced step; every count is of that step alone."""

    step: int | None = None
    source: str = ""  #: which execution: `ampscope.trace.schema.Source`
    traced: tuple[TracedStep, ...] = ()  #: what else could be shown, newest first
    autocast: tuple[str, ...] = ()  #: dtypes of the autocast regions seen
    total: PrecisionRow = NOTHING
    modules: tuple[PrecisionRow, ...] = ()
    ops: tuple[PrecisionRow, ...] = ()
    cast_totals: tuple[CastRow, ...] = ()  #: by kind and dtypes; no module, phase or line
    casts: tuple[CastRow, ...] = ()  #: by line; most elements first
    islands: tuple[Fp32Island, ...] = ()  #: most elements first


def precision(run: Run, *, step: int | None = None, source: str | None = None, rank: int | None = None) -> Precision:
    """The precision of the traced ``step`` and ``source``; by default the newest, live rather than replayed.

    A run (or a choice) without traced ops gives an empty result that still lists what there is.
    """
    traced = traced_steps(run, rank=rank)
    chosen = next((one for one in traced if step in (None, one.step) and source in (None, one.source)), None)
    if chosen is None:
        return Precision(traced=traced)
    done = executed(run, chosen)
    casts = _cast_rows(_cast(one) for one in done if one.site.cast != Cast.NONE)
    computing = [one for one in done if one.site.cast == Cast.NONE and ran_in(one.site)]
    return Precision(
        step=chosen.step,
        source=chosen.source,
        traced=traced,
        autocast=tuple(sorted({plain(one.site.autocast) for one in done if one.site.autocast})),
        total=PrecisionRow(name="", kind="", shares=_shares(computing)),
        modules=_rows(computing, lambda site: site.module, lambda site: site.module_type),
        ops=_rows(computing, lambda site: site.op, lambda _: ""),
        cast_totals=_cast_rows(replace(row, module="", phase="", source=None) for row in casts),
        casts=casts,
        islands=fp32_islands(run, chosen, computing),
    )


def fold_modules(rows: Iterable[PrecisionRow], depth: int) -> tuple[PrecisionRow, ...]:
    """The rows of modules joined to their ancestors ``depth`` names deep, in order of appearance."""
    groups: dict[str, list[PrecisionRow]] = defaultdict(list)
    for row in rows:
        groups[".".join(row.name.split(".")[:depth])].append(row)
    return tuple(_folded(name, group) for name, group in groups.items())


def under(rows: Iterable[PrecisionRow], module: str) -> tuple[PrecisionRow, ...]:
    """The rows of ``module`` and of what is inside it; all of them for an empty name."""
    return tuple(row for row in rows if not module or row.name == module or row.name.startswith(f"{module}."))


def deepest(rows: Iterable[PrecisionRow], limit: int) -> int:
    """The largest depth at which the modules fold into at most ``limit`` rows; 1 where none does."""
    paths = [tuple(row.name.split(".")) for row in rows]
    depths = range(max(map(len, paths), default=1), 0, -1)
    return next((depth for depth in depths if len({path[:depth] for path in paths}) <= limit), 1)


def _folded(name: str, group: list[PrecisionRow]) -> PrecisionRow:
    own = next((row.kind for row in group if row.name == name), "")
    shares = _sum(share for row in group for share in row.shares)
    return PrecisionRow(name=name, kind=own, shares=shares, first=min(row.first for row in group))


def _rows(
    done: Iterable[ExecutedSite], name: Callable[[SiteRow], str], kind: Callable[[SiteRow], str]
) -> tuple[PrecisionRow, ...]:
    groups: dict[str, list[ExecutedSite]] = defaultdict(list)
    for one in done:
        groups[name(one.site)].append(one)
    return tuple(
        PrecisionRow(name=key, kind=kind(group[0].site), shares=_shares(group), first=group[0].first)
        for key, group in groups.items()
    )


def _shares(done: Iterable[ExecutedSite]) -> tuple[Share, ...]:
    return _sum(Share(dtype=ran_in(one.site), ops=one.count, bytes=one.bytes) for one in done)


def _sum(shares: Iterable[Share]) -> tuple[Share, ...]:
    ops: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    for share in shares:
        ops[share.dtype] += share.ops
        size[share.dtype] += share.bytes
    joined = [Share(dtype=dtype, ops=ops[dtype], bytes=size[dtype]) for dtype in ops]
    return tuple(sorted(joined, key=lambda share: (-share.ops, share.dtype)))


def _cast_rows(rows: Iterable[CastRow]) -> tuple[CastRow, ...]:
    """The rows summed where all else is the same; most elements first."""
    joined = _added_up(rows, ("count", "elements", "bytes"))
    return tuple(sorted(joined, key=lambda row: (-row.elements, -row.count)))


def _added_up(rows: Iterable[Counted], names: Sequence[str]) -> list[Counted]:
    """The rows that are the same but for their numbers as one, with these numbers summed up, in order of appearance."""
    groups: dict[Counted, list[Counted]] = defaultdict(list)
    for row in rows:
        groups[replace(row, first=0, **_sums((), names))].append(row)
    return [replace(key, first=min(row.first for row in group), **_sums(group, names)) for key, group in groups.items()]


def _sums(rows: Sequence[Counted], names: Sequence[str]) -> Mapping[str, Any]:
    return {name: sum(getattr(row, name) for row in rows) for name in names}


def _cast(one: ExecutedSite) -> CastRow:
    site = one.site
    return CastRow(
        kind=said(Cast, site.cast, Cast.NONE),
        from_dtype=plain(site.in_dtypes[0]) if site.in_dtypes else "",
        to_dtype=plain(site.out_dtypes[0]) if site.out_dtypes else "",
        module=site.module,
        phase=site.phase,
        source=SourceLine.of(site),
        count=one.count,
        elements=one.elements,
        bytes=one.bytes,
        first=one.first,
    )
