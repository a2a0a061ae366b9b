"""The records of a replay tell where a step failed: at which op, in which modules, and how near others are to it."""

from __future__ import annotations

import math
from typing import NamedTuple

from ampscope import provenance
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.trace.dtypes import FINFO, HALF_DTYPES
from ampscope.trace.schema import ENTRY_NODES, LOSS_CODE, OpRow, Phase, SiteRow


class OpKey(NamedTuple):
    """An op of the step, however it is executed: the dtypes may differ."""

    op: str
    module: str
    phase: str
    file: str
    line: int
    grad_fn: str

    @staticmethod
    def of(site: SiteRow) -> OpKey:
        """The op at a site."""
        return OpKey(site.op, site.module, site.phase, site.file, site.line, site.grad_fn)


class Failure(NamedTuple):
    """The place of a failure, as a replay shows it."""

    op: OpKey
    execution: int  #: how many executions of the op came before
    modules: tuple[str, ...]  #: in which values went wrong; `LOSS_CODE` for the code outside
    dtypes: frozenset[str]  #: half dtypes that the step computed in
    by_scale: bool  #: the loss scale takes part: a scaled loss or a gradient is out of range


def located(rows: TracedRows, *, scaled: bool) -> Failure | None:
    """The failure's place by the records of a replay; None where nothing non-finite reached what matters.

    Args:
        rows: The records.
        scaled: Whether the step has a loss scale.
    """
    graph = rows.graph()
    born = provenance.origins(graph)
    if not born:
        return None
    first = graph.site(born[0].seq)
    outside = first.phase == Phase.LOSS and first.op.startswith("aten.mul.")  # the scaling itself, of a half loss
    sites = rows.site_rows()
    return Failure(
        op=OpKey.of(first),
        execution=sum(row.seq < born[0].seq and OpKey.of(sites[row.site]) == OpKey.of(first) for row in rows.ops),
        modules=tuple(dict.fromkeys(_module(graph, origin.seq) for origin in born)),
        dtypes=frozenset(dtype for site in sites.values() for dtype in site.out_dtypes if dtype in HALF_DTYPES),
        by_scale=scaled and (first.phase == Phase.BACKWARD or outside),
    )


def _module(graph: provenance.Graph, seq: int) -> str:
    """The module in which an op runs; of a value from outside, the module that first reads it."""
    site = graph.site(seq)
    if site.op in ENTRY_NODES:
        readers = sorted(edge.seq for edge in graph.readers[seq])
        site = graph.site(readers[0]) if readers else site
    return site.module or (LOSS_CODE if site.phase == Phase.LOSS else "")


def output_at(rows: TracedRows, failure: Failure) -> OpRow | None:
    """Returns the row of what the failed op gave in another replay; None where it was not executed."""
    keys = {number: OpKey.of(site) for number, site in rows.site_rows().items()}
    executions = [row for row in rows.ops if not row.out and keys[row.site] == failure.op]
    return executions[failure.execution] if failure.execution < len(executions) else None


def near_overflow(rows: TracedRows) -> dict[str, float]:
    """The modules whose forward gives numbers of float16 within one doubling of overflow, with the factor left.

    The end of the range itself is no result: code writes it, for a mask.
    """
    sites = rows.site_rows()
    largest = FINFO["float16"].max
    found: dict[str, float] = {}
    for row in rows.ops:
        site = sites[row.site]
        if site.phase not in (Phase.FORWARD, Phase.LOSS) or site.out_dtypes[row.out : row.out + 1] != ("float16",):
            continue
        ends = [abs(end) for end in (row.min, row.max) if end is not None and abs(end) < largest]
        module = site.module or (LOSS_CODE if site.phase == Phase.LOSS else "")
        if module and 2 * max(ends, default=0.0) > largest:
            found[module] = min(found.get(module, math.inf), largest / max(ends))
    return found


def scale_headroom(rows: TracedRows) -> float | None:
    """How many times larger the loss scale could be before a float16 gradient leaves its range.

    Returns:
        The ratio of float16's largest value to the largest float16 gradient of the replay; None where there was none.
    """
    sites = rows.site_rows()
    largest = 0.0
    for row in rows.ops:
        site = sites[row.site]
        if site.phase == Phase.BACKWARD and site.out_dtypes[row.out : row.out + 1] == ("float16",):
            ends = [abs(end) for end in (row.min, row.max) if end is not None and end - end == 0]
            largest = max([largest, *ends])
    return FINFO["float16"].max / largest if largest else None
