"""Which measured tensors a module holds: what its ops made, its parameters, and what its products are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import narwhals as nw
import numpy as np

from ampscope.analysis.numerics.arrays import BoolArray, IntArray
from ampscope.analysis.tables.exponent_rows import Measured, MeasuredRow
from ampscope.analysis.tables.lazy_tables import collect, rank_table
from ampscope.provenance import op_name
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Cast, Node, Phase, SiteRow, Table

#: Ops that a format of 8 bits is for; they are given what other modules made.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "mv", "addmv", "convolution_backward"})
_VALUES = frozenset({Phase.FORWARD, Phase.RECOMPUTE})


@dataclass(frozen=True)
class Members:
    """Which tensor is of which module; one may be of several."""

    modules: tuple[str, ...]
    types: tuple[str, ...]  #: class names
    tensor: IntArray  #: its place among `Measured.rows`
    module: IntArray
    is_gradient: BoolArray


def members(run: Run, rank: int, measured: Measured, sites: Mapping[int, SiteRow]) -> Members:
    """The members of all modules, in the order in which these first ran.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    own = [(place, row.site.module, row.is_gradient) for place, row in enumerate(measured.rows) if _is_own(row, sites)]
    given = _given(run, rank, measured.rows, sites)
    pairs = dict.fromkeys([*own, *given])
    names = tuple(
        dict.fromkeys(module for _, module, _ in sorted(pairs, key=lambda one: _order(measured.rows[one[0]])))
    )
    numbers = {name: number for number, name in enumerate(names)}
    types = {site.module: site.module_type for site in sites.values() if site.module_type}
    return Members(
        modules=names,
        types=tuple(types.get(name, "") for name in names),
        tensor=np.array([place for place, _, _ in pairs], np.int64),
        module=np.array([numbers[module] for _, module, _ in pairs], np.int64),
        is_gradient=np.array([gradient for _, _, gradient in pairs], np.bool_),
    )


def _order(row: MeasuredRow) -> tuple[bool, int]:
    return row.site.op in frozenset(Node), row.seq


def _is_own(row: MeasuredRow, sites: Mapping[int, SiteRow]) -> bool:
    """Whether a tensor is one of the module's; casts have the values of what they are given.

    What backward makes of the loss is the loss's, as the scaled one itself is: no module runs it, and autocast leaves
    it in float32 whatever the modules run in.
    """
    if row.site.op in frozenset(Node):
        return row.site.op in (Node.PARAMETER, Node.GRADIENT)
    if row.site.cast != Cast.NONE or row.site.phase not in (*_VALUES, Phase.BACKWARD):
        return False
    forward = sites.get(row.site.forward_site) if row.site.forward_site is not None else None
    return forward is None or forward.phase != Phase.LOSS


def _given(
    run: Run, rank: int, rows: Sequence[MeasuredRow], sites: Mapping[int, SiteRow]
) -> Iterator[tuple[int, str, bool]]:
    """The operands of products: of forward all, of backward the gradients among them."""
    places = {(row.execution.step, row.execution.source, row.seq, row.out): n for n, row in enumerate(rows)}
    products = [number for number, site in sites.items() if op_name(site.op) in _PRODUCTS]
    steps = sorted({row.execution.step for row in rows})
    if not products or not steps:
        return
    ops = rank_table(run, Table.OPS, rank, step=steps).filter(nw.col("site").is_in(products))
    edges = rank_table(run, Table.EDGES, rank, step=steps)
    keys = ["step", "source", "seq"]
    joined = edges.select(*keys, "from_seq", "from_out").join(ops.select(*keys, "site").unique(), on=keys, how="inner")
    for edge in collect(joined):
        place = places.get((edge["step"], edge["source"], edge["from_seq"], edge["from_out"]))
        if place is None:
            continue
        consumer, gradient = sites[edge["site"]], rows[place].is_gradient
        if gradient == (consumer.phase == Phase.BACKWARD):
            yield place, consumer.module, gradient
