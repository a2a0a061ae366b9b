"""Ops that ran in float32 inside an autocast region, and why they did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import narwhals as nw

from ampscope.analysis.numerics.dtypes import is_floating, plain, ran_in
from ampscope.analysis.results import SourceLine
from ampscope.analysis.tables.lazy_tables import collect
from ampscope.analysis.tables.traced_steps import Executed, TracedStep, of_step
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Cast, SiteRow, Table

_WIDE = frozenset({"float32", "float64"})


class Reason(StrEnum):
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
    reason: Reason
    source: SourceLine | None
    count: int
    elements: int
    first: int = 0  #: sequence number of the first


def fp32_islands(run: Run, traced: TracedStep, done: Iterable[Executed]) -> tuple[Fp32Island, ...]:
    """The wide ops among ``done`` that an autocast region encloses, most elements first."""
    wide = [one for one in done if one.site.autocast and ran_in(one.site) in _WIDE]
    if not wide:
        return ()
    after = _sites_after_casts(run, traced)
    groups: dict[tuple[object, ...], Fp32Island] = {}
    for one in wide:
        island = _island(one, _reason(one.site, after))
        key = (island.op, island.module, island.phase, island.dtype, island.reason, island.source)
        groups[key] = _joined(groups[key], island) if key in groups else island
    return tuple(sorted(groups.values(), key=lambda island: -island.elements))


def _reason(site: SiteRow, after: dict[int, frozenset[str]]) -> Reason:
    casts = after.get(site.site, frozenset())
    widths = {plain(dtype) in _WIDE for dtype in site.in_dtypes if is_floating(dtype)}
    if Cast.AUTOCAST in casts:
        return Reason.POLICY
    if Cast.EXPLICIT in casts:
        return Reason.REQUESTED
    if widths == {True, False}:
        return Reason.PROMOTED
    return Reason.OPERANDS if widths == {True} else Reason.OWN


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


def _island(one: Executed, reason: Reason) -> Fp32Island:
    site = one.site
    return Fp32Island(
        op=site.op,
        module=site.module,
        phase=site.phase,
        dtype=ran_in(site),
        reason=reason,
        source=one.line,
        count=one.count,
        elements=one.elements,
        first=one.first,
    )


def _joined(left: Fp32Island, right: Fp32Island) -> Fp32Island:
    return Fp32Island(
        op=left.op,
        module=left.module,
        phase=left.phase,
        dtype=left.dtype,
        reason=left.reason,
        source=left.source,
        count=left.count + right.count,
        elements=left.elements + right.elements,
        first=min(left.first, right.first),
    )
