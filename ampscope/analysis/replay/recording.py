"""A recording is a traced step as arrays, op by op: forward with backward, and values that are infinite on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ampscope.analysis.arrays import BoolArray, Columns, FloatArray, IntArray
from ampscope.analysis.rounding import ran_in
from ampscope.analysis.step_graph import SiteTable
from ampscope.analysis.tables.lazy_tables import collect_columns
from ampscope.analysis.tables.traced_steps import TracedStep, of_step
from ampscope.provenance import Graph, Harmless, harmless_births, is_deliberate, names_infinity
from ampscope.trace.dtypes import FINFO
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Cast, EdgeRow, OpRow, Phase, SiteRow, Statistics, Table


def forward_of(sites: Sequence[SiteRow], site: IntArray, micro_batch: IntArray) -> IntArray:
    """Returns for each op of backward the position of its op of forward; -1 for all others.

    A program point that ran several times is matched in reverse within a micro-batch: backward undoes the last
    execution first.

    Args:
        sites: Program points.
        site: Of each op the index of its own.
        micro_batch: Of each op.
    """
    found = np.full(len(site), -1, np.int64)
    index = {row.site: place for place, row in enumerate(sites)}
    wanted = np.array([-1 if row.forward_site is None else index.get(row.forward_site, -1) for row in sites], np.int64)
    here = np.flatnonzero(wanted[site] >= 0) if len(site) else np.empty(0, np.int64)
    if not len(here):
        return found
    batch = micro_batch - micro_batch.min()
    width = int(batch.max()) + 1
    key = site * width + batch
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    own = np.searchsorted(ordered, key)
    rank = np.empty(len(site), np.int64)
    rank[order] = np.arange(len(site))
    turn = (rank - own)[here]
    mine = (np.searchsorted(ordered, key, side="right") - own)[here]
    forward = wanted[site[here]] * width + batch[here]
    start = np.searchsorted(ordered, forward)
    times = np.searchsorted(ordered, forward, side="right") - start
    per = np.maximum(mine // np.maximum(times, 1), 1)
    place = start + np.maximum(times - 1 - turn // per, 0)
    found[here[times > 0]] = order[place[times > 0]]
    return found


def intended(traced: TracedStep, ops: Columns, edges: Columns, sites: Mapping[int, SiteRow]) -> set[int]:
    """Sequence numbers of the ops that wrote a mask, or carry one that does no harm.

    Args:
        traced: The step.
        ops: Its rows by sequence number and output.
        edges: Its rows by reader, of which both ends are among ``ops``.
        sites: Program points by number.
    """
    masks = _possible_masks(ops, sites)
    if not masks:
        return set()
    graph = Graph(_op_rows(traced, ops), _edge_rows(traced, edges), sites.__getitem__)
    queue = [birth.seq for birth in harmless_births(graph, masks) if birth.why is Harmless.MASK]
    found = set(queue)
    while queue:
        bad = {edge.seq for edge in graph.readers[queue.pop()] if graph.edge_is_bad(edge)}
        fresh = {seq for seq in bad - found if graph.bad_output(seq) is not None}
        found |= fresh
        queue.extend(fresh)
    return found.union(seq for seq in masks if is_deliberate(graph, seq) and not graph.bad_inputs(seq))


def _possible_masks(ops: Columns, sites: Mapping[int, SiteRow]) -> list[int]:
    """The ops of whose outputs the first that is not finite holds no NaN, and may be meant by its looks."""
    low, high = ops.floats("min"), ops.floats("max")
    bad = np.flatnonzero(ops.bad("min") | ops.bad("max"))
    first = bad[np.unique(ops.ints("seq")[bad], return_index=True)[1]]
    first = first[~(np.isnan(low) & ops.known("min"))[first]]
    seq = ops.ints("seq")[first]
    numbers, site = np.unique(ops.ints("site")[np.searchsorted(ops.ints("seq"), seq)], return_inverse=True)
    told = np.array([names_infinity(sites[number]) for number in numbers.tolist()], np.bool_)[site]
    mask = (low == -np.inf) & (high < np.inf)
    return [int(each) for each in seq[told | mask[first]]]


def _op_rows(traced: TracedStep, ops: Columns) -> Iterator[OpRow]:
    names = ("seq", "out", "site", "micro_batch", "numel", "min", "max")
    for seq, out, site, batch, numel, low, high in zip(*(ops.arrays[name].tolist() for name in names), strict=True):
        yield OpRow(traced.step, traced.source, seq, out, site, batch, numel, None, Statistics(low, high))


def _edge_rows(traced: TracedStep, edges: Columns) -> Iterator[EdgeRow]:
    names = ("seq", "arg", "from_seq", "from_out", "in_place", "partial", "min", "max")
    for values in zip(*(edges.arrays[name].tolist() for name in names), strict=True):
        yield EdgeRow(traced.step, traced.source, *values)


#: An op is near the limit when its largest magnitude exceeds 1/8 of what its dtype holds: one more doubling or two,
#: as a longer sequence or a larger learning rate brings, and it overflows.
NEAR_BITS = 3.0

#: Columns of ``ops`` that are numbers; a histogram is fetched for the one op that is looked at.
STATISTICS = tuple(name for name in Statistics._fields if not name.startswith("exp_"))
_OP_COLUMNS = ("seq", "out", "site", "micro_batch", "numel", "checksum", *STATISTICS)
_EDGE_COLUMNS = ("seq", "arg", "from_seq", "from_out", "in_place", "partial", "min", "max")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """One execution of a step. ``n`` executed ops, inputs and parameters among them, have positions 0 to n - 1.

    Arrays have n elements unless said otherwise. Magnitudes and limits are exponents of 2; NaN where nothing was
    measured, or where there is no finite value other than 0. It has many attributes because each is one column of the
    ops, as an array.
    """

    traced: TracedStep
    sites: tuple[SiteRow, ...]  #: those that ran, by number
    modules: tuple[str, ...]  #: their names, each once, in order of first execution
    seq: IntArray  #: ascending
    site: IntArray  #: index into `sites`
    module: IntArray  #: index into `modules`
    micro_batch: IntArray
    backward: BoolArray  #: ran in backward, recomputed ones too
    forward: IntArray  #: position of the op of forward that one of backward belongs to; -1 for none
    smallest: FloatArray  #: least known magnitude over the op's floating outputs
    largest: FloatArray  #: largest finite magnitude
    floor: FloatArray  #: smallest subnormal of the dtype it ran in
    limit: FloatArray  #: where that dtype overflows
    cast: BoolArray
    near: BoolArray  #: within `NEAR_BITS` of the limit
    nonfinite: BoolArray
    born: BoolArray  #: not finite though nothing it read was
    intended: BoolArray  #: not finite because the code wants it so, as a mask
    entry: BoolArray  #: an input, parameter or buffer
    sink: BoolArray  #: a loss, gradient, or what the step left behind
    outputs: Columns  #: the rows of ``ops`` without histograms, in order
    first_output: IntArray  #: n + 1 row numbers in `outputs`
    edges: Columns  #: the rows of ``edges`` by consumer
    first_edge: IntArray  #: n + 1 row numbers in `edges`
    readers: IntArray  #: row numbers in `edges` by producer
    first_reader: IntArray  #: n + 1 places in `readers`

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def alarming(self) -> BoolArray:
        """A mask of the ops with something non-finite that nobody wanted so."""
        return self.nonfinite & ~self.intended

    @property
    def headroom(self) -> FloatArray:
        """Doublings left before the dtype overflows."""
        return self.limit - self.largest

    def position(self, seq: int) -> int:
        """Returns the position of the op with sequence number ``seq``, or else of the last one before it."""
        return max(int(np.searchsorted(self.seq, seq, side="right")) - 1, 0)

    def site_of(self, position: int) -> SiteRow:
        """The program point of an op."""
        return self.sites[int(self.site[position])]


def recording(run: Run, traced: TracedStep) -> Recording:
    """Load ``traced``; a step of which no row is left gives an empty recording."""
    ops = collect_columns(of_step(run, Table.OPS, traced).select(*_OP_COLUMNS).sort("seq", "out"))
    edges = collect_columns(of_step(run, Table.EDGES, traced).select(*_EDGE_COLUMNS).sort("seq", "arg"))
    seq, first = np.unique(ops.ints("seq"), return_index=True)
    numbers, site = np.unique(ops.ints("site")[first], return_inverse=True)
    sites = tuple(map(SiteTable(run, traced.rank).__getitem__, numbers.tolist()))
    kept = edges.where(np.isin(edges.ints("seq"), seq) & np.isin(edges.ints("from_seq"), seq))
    bounds = np.append(first, len(ops)).astype(np.int64)
    seen = _recording(_Rows(traced, sites, seq, site.astype(np.int64), ops, bounds, kept))
    if not seen.born.any():
        return seen
    meant = intended(traced, ops, kept, dict(zip(numbers.tolist(), sites, strict=True)))
    return replace(seen, intended=np.isin(seq, list(meant)))


class _Rows(NamedTuple):
    traced: TracedStep
    sites: tuple[SiteRow, ...]
    seq: IntArray
    site: IntArray
    ops: Columns
    bounds: IntArray
    edges: Columns


def _recording(rows: _Rows) -> Recording:
    traced, sites, seq, site, ops, bounds, edges = rows
    formats = [FINFO.get(ran_in(row)) for row in sites]
    limit = _by_site([one.top if one else np.nan for one in formats], site)
    measured = _Measured(ops)
    smallest, largest, bad = measured.joined(bounds)
    entry = _flags([row.op in ENTRY_NODES for row in sites], site)
    sink = _flags([row.op in SINK_NODES for row in sites], site)
    links = _Links(seq, ops, edges, measured.bad)
    garbage = entry & links.only_overwritten
    smallest[garbage] = largest[garbage] = np.nan
    told = ~sink & ~garbage
    with np.errstate(invalid="ignore"):
        near = (limit - largest <= NEAR_BITS) & told
    modules, module = _modules(sites, site)
    micro_batch = ops.ints("micro_batch")[bounds[:-1]]
    return Recording(
        traced=traced,
        sites=sites,
        modules=modules,
        seq=seq,
        site=site,
        module=module,
        micro_batch=micro_batch,
        backward=_flags([row.phase in (Phase.BACKWARD, Phase.RECOMPUTE) for row in sites], site),
        forward=forward_of(sites, site, micro_batch),
        smallest=smallest,
        largest=largest,
        floor=_by_site([one.lowest if one else np.nan for one in formats], site),
        limit=limit,
        cast=_flags([row.cast != Cast.NONE for row in sites], site),
        near=near,
        nonfinite=bad & ~garbage,
        born=bad & ~links.reads_bad & told,
        intended=np.zeros(len(seq), np.bool_),
        entry=entry,
        sink=sink,
        outputs=ops,
        first_output=bounds,
        edges=edges,
        first_edge=links.first_edge,
        readers=links.readers,
        first_reader=links.first_reader,
    )


def _by_site(values: list[float], site: IntArray) -> FloatArray:
    return np.array(values, dtype=np.float64)[site]


def _flags(values: list[bool], site: IntArray) -> BoolArray:
    return np.array(values, dtype=np.bool_)[site]


def _modules(sites: tuple[SiteRow, ...], site: IntArray) -> tuple[tuple[str, ...], IntArray]:
    """Module names in order of first execution, and the index of each op's."""
    order = np.argsort(np.unique(site, return_index=True)[1])
    names = list(dict.fromkeys(sites[number].module for number in order))
    index = {name: place for place, name in enumerate(names)}
    return tuple(names), np.array([index[row.module] for row in sites], dtype=np.int64)[site]


class _Measured:
    def __init__(self, ops: Columns) -> None:
        low, high = ops.floats("min"), ops.floats("max")
        self.bad = np.isinf(low) | np.isinf(high) | _is_nan(ops, "min") | _is_nan(ops, "max")
        with np.errstate(divide="ignore", invalid="ignore"):
            finite = np.fmax(_finite_magnitude(low), _finite_magnitude(high))
            self.largest = _log2(np.fmax(ops.floats("max_finite"), finite))
            one_sided = np.where((low > 0) | (high < 0), np.fmin(np.abs(low), np.abs(high)), np.nan)
            self.smallest = _log2(np.fmin(ops.floats("min_positive"), one_sided))

    def joined(self, bounds: IntArray) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Smallest, largest and whether not finite, over all outputs of each op."""
        if len(bounds) == 1:
            return np.empty(0), np.empty(0), np.empty(0, np.bool_)
        starts = bounds[:-1]
        smallest, largest = np.fmin.reduceat(self.smallest, starts), np.fmax.reduceat(self.largest, starts)
        return smallest, largest, np.logical_or.reduceat(self.bad, starts)


class _Links:
    """Who read what, by position.

    Args:
        seq: Sequence numbers of the ops.
        ops: Their outputs.
        edges: Between ops that are there.
        bad: Which outputs are not finite.
    """

    def __init__(self, seq: IntArray, ops: Columns, edges: Columns, bad: BoolArray) -> None:
        consumer = edges.ints("seq")
        producer = edges.ints("from_seq")
        self.first_edge = _bounds(consumer, seq)
        self.readers = np.argsort(producer, kind="stable").astype(np.int64)
        self.first_reader = _bounds(producer[self.readers], seq)
        self.reads_bad = np.zeros(len(seq), np.bool_)
        carried = self._bad_edges(ops, edges, bad, producer)
        self.reads_bad[np.searchsorted(seq, consumer[carried])] = True
        self.only_overwritten = np.zeros(len(seq), np.bool_)  # memory whose old values nobody asked for
        in_place = edges.flags("in_place")
        self.only_overwritten[np.searchsorted(seq, producer[in_place])] = True
        self.only_overwritten[np.searchsorted(seq, producer[~in_place])] = False

    def _bad_edges(self, ops: Columns, edges: Columns, bad: BoolArray, producer: IntArray) -> BoolArray:
        """Edges that carried something not finite: by their own statistics, else by their producer's."""
        if not len(edges):
            return np.empty(0, np.bool_)
        outputs = _key(ops.ints("seq"), ops.ints("out"))
        found = np.searchsorted(outputs, _key(producer, edges.ints("from_out")))
        written = bad[np.minimum(found, len(outputs) - 1)]
        low, high = edges.floats("min"), edges.floats("max")
        own = np.isinf(low) | np.isinf(high) | _is_nan(edges, "min") | _is_nan(edges, "max")
        told = edges.flags("partial") & edges.known("min")
        return np.where(told, own, written)


def _key(seq: IntArray, out: IntArray) -> IntArray:
    return seq * (1 << 16) + out


def _bounds(ordered: IntArray, seq: IntArray) -> IntArray:
    """Returns where the rows of each op begin in ``ordered``, and where the last ones end."""
    return np.append(np.searchsorted(ordered, seq), len(ordered)).astype(np.int64)


def _is_nan(rows: Columns, name: str) -> BoolArray:
    """Returns a mask of the rows in which a NaN was measured, not of those in which nothing was."""
    return np.isnan(rows.floats(name)) & rows.known(name)


def _finite_magnitude(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values), np.abs(values), np.nan)


def _log2(magnitudes: FloatArray) -> FloatArray:
    usable = np.isfinite(magnitudes) & (magnitudes > 0)
    return np.where(usable, np.log2(np.where(usable, magnitudes, 1.0)), np.nan)
