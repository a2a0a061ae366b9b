"""The rows that tracing one execution of a step gives, with their program points."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ampscope import provenance
from ampscope.capture.tracing import light_statistics
from ampscope.capture.tracing.dataflow import Dataflow, StepOutputs
from ampscope.capture.tracing.executions import Made
from ampscope.capture.tracing.sampled_shapes import together
from ampscope.capture.tracing.sites import Sites
from ampscope.trace.files.arrow_arrays import ColumnBlock
from ampscope.trace.schema import UNMEASURED, EdgeRow, OpRow, Phase, SiteRow, Statistics

#: Columns that extremes alone do not fill; and those of them that are magnitudes.
_SHAPE = Statistics._fields[2:]
_MAGNITUDES = frozenset({"max_finite", "min_positive"})
_LISTS = frozenset({"exp_counts", "top_values", "block_falls"})


class TracedRows(NamedTuple):
    """Ops and edges of one execution of a step, and the sites that they number."""

    ops: list[OpRow]
    edges: list[EdgeRow]
    sites: Sites

    def graph(self) -> provenance.Graph:
        """The rows as a graph, to walk back from what is not finite."""
        return provenance.Graph(self.ops, self.edges, self.sites.row)

    def site_rows(self) -> dict[int, SiteRow]:
        """The sites at which its ops ran, by number."""
        return {number: self.sites.row(number) for number in {row.site for row in self.ops}}

    def bytes_written(self) -> int:
        """Size of everything the forward's ops wrote, were it float32: a bound on what another run keeps."""
        kept = (Phase.FORWARD, Phase.LOSS)
        forward = {number for number, site in self.site_rows().items() if site.phase in kept}
        return sum(4 * row.numel for row in self.ops if row.site in forward)

    def forward_bytes(self) -> int:
        """Bytes that the forward's ops wrote, each in its own dtype."""
        sites = self.site_rows()
        forward = {
            number: [getattr(torch, dtype).itemsize for dtype in site.out_dtypes]
            for number, site in sites.items()
            if site.phase in (Phase.FORWARD, Phase.LOSS) and "." in site.op
        }
        return sum(forward[row.site][row.out] * row.numel for row in self.ops if row.site in forward)

    def labelled(self, step: int, source: str) -> tuple[list[OpRow], list[EdgeRow]]:
        """The rows as those of a step and of one of its executions."""
        ops = [row._replace(step=step, source=source) for row in self.ops]
        return ops, [edge._replace(step=step, source=source) for edge in self.edges]

    def agrees(self, other: TracedRows) -> bool:
        """Whether another execution gave the same results, as far as their extremes tell."""
        if len(self.ops) != len(other.ops):
            return False
        pairs = zip(self.ops, other.ops, strict=True)
        return all(_same(ours.min, theirs.min) and _same(ours.max, theirs.max) for ours, theirs in pairs)


def rows(outputs: StepOutputs, dataflow: Dataflow, step: int, source: str) -> tuple[list[OpRow], list[EdgeRow]]:
    """The trace's rows; waits for the device to have written what was measured."""
    measured: dict[int | None, Statistics] = {None: UNMEASURED, **dict(enumerate(outputs.measured()))}
    sums = dict(zip(outputs.checksums, light_statistics.read_checksums(list(outputs.checksums.values())), strict=True))
    places = [(seq, out) for seq, made in enumerate(outputs.ops) for out in range(len(made.numels))]
    batch = -1
    ops = []
    for row, (seq, out) in enumerate(places):
        while batch + 1 < len(outputs.micro_batches) and row >= outputs.micro_batches[batch + 1]:
            batch += 1
        made = outputs.ops[seq]
        known = measured[outputs.measurements[row]]
        ops.append(OpRow(step, source, seq, out, made.site, batch, made.numels[out], sums.get(row), known))
    readers = [(seq, *edge) for seq, made in enumerate(outputs.ops) for edge in made.edges]
    edges = []
    for place, ((seq, arg, in_place), writer) in enumerate(zip(readers, dataflow.read_from, strict=True)):
        part = dataflow.parts.get(place)
        own = None if part is None else measured[part]
        low, high = (own.min, own.max) if own is not None else (None, None)
        edges.append(EdgeRow(step, source, seq, arg, *places[writer], in_place, own is not None, low, high))
    return ops, edges


class TraceLayout:
    """The part of a trace that two executions with the same ops share: all but what was measured.

    Args:
        ops: What each op leaves in the trace besides its numbers.
    """

    def __init__(self, ops: list[Made]) -> None:
        self.ops = ops
        outputs = [
            (seq, out, made.site, made.numels[out]) for seq, made in enumerate(ops) for out in range(len(made.numels))
        ]
        edges = [(seq, *edge) for seq, made in enumerate(ops) for edge in made.edges]
        self.seq, self.out, self.site, self.numel = np.array(outputs, np.int64).reshape(-1, 4).T
        self.reader, self.arg, in_place = np.array(edges, np.int64).reshape(-1, 3).T
        self.in_place = in_place.astype(bool)


class BadFlow(NamedTuple):
    """All that tells what becomes of a step's values that are not finite: where two are equal, so are the answers."""

    ops: list[Made]
    measurements: list[int | None]  #: of each output, its number
    read_from: list[int]  #: of each operand, the output that it was
    parts: dict[int, int | None]  #: of operands that are parts of one, the numbers of their measurements
    kinds: bytes  #: of each measurement, whether its ends are finite, NaN or which infinity

    @staticmethod
    def of(outputs: StepOutputs, dataflow: Dataflow) -> BadFlow | None:
        """Takes the graph of a step; None where all is finite. Waits for the device."""
        spans = outputs.spans()
        kinds = np.isposinf(spans) + 2 * np.isneginf(spans) + 4 * np.isnan(spans)
        if not kinds.any():
            return None
        told = kinds.astype(np.int8).tobytes()
        return BadFlow(outputs.ops, outputs.measurements, dataflow.read_from, dict(dataflow.parts), told)


def columns(
    outputs: StepOutputs, dataflow: Dataflow, layout: TraceLayout, step: int, source: str
) -> tuple[ColumnBlock, ColumnBlock]:
    """Returns the trace's rows as columns; waits for the device.

    Args:
        outputs: The outputs of the step.
        dataflow: Who read them.
        layout: Of its ops.
        step: The step's number.
        source: Which of its executions this is.
    """
    spans, count = outputs.spans(), len(layout.seq)
    numbers = np.array([-1 if number is None else number for number in outputs.measurements], np.intp)
    measured = numbers >= 0
    low, high = np.concatenate([spans, [(np.nan, np.nan)]])[numbers].T
    sums = zip(outputs.checksums, light_statistics.read_checksums(list(outputs.checksums.values())), strict=True)
    summed = {output: value for output, value in sums if value is not None}
    checksum, has_checksum = np.zeros(count, np.int64), np.zeros(count, bool)
    checksum[list(summed)], has_checksum[list(summed)] = list(summed.values()), True
    shapes, has_shape = _shape_columns(outputs, numbers, low, high)
    ops = ColumnBlock(
        count,
        {
            "step": step,
            "source": source,
            "seq": layout.seq,
            "out": layout.out,
            "site": layout.site,
            "micro_batch": np.searchsorted(outputs.micro_batches, np.arange(count), side="right") - 1,
            "numel": layout.numel,
            "checksum": checksum,
            "min": low,
            "max": high,
            **shapes,
        },
        {"checksum": has_checksum, "min": measured, "max": measured, **has_shape},
    )
    return ops, _edge_columns(dataflow, layout, spans, step, source)


def _shape_columns(
    outputs: StepOutputs, numbers: NDArray[np.intp], low: NDArray[np.float64], high: NDArray[np.float64]
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.bool_]]]:
    """Returns the samples' statistics as columns, with masks of the rows that have them; empty without samples."""
    sampled, count = outputs.sampled(), len(numbers)
    each = zip(numbers.tolist(), low.tolist(), high.tolist(), strict=True)
    given = [(row, *known) for row, known in enumerate(each) if known[0] in sampled]
    rows = [row for row, *_ in given]
    seen = [together(Statistics(least, greatest), sampled[number]) for _, number, least, greatest in given]
    found: dict[str, NDArray[Any]] = {}
    known: dict[str, NDArray[np.bool_]] = {}
    for name in _SHAPE if rows else ():
        values = [getattr(one, name) for one in seen]
        there = [(row, value) for row, value in zip(rows, values, strict=True) if value is not None]
        kind = object if name in _LISTS else float if name in _MAGNITUDES else np.int64
        found[name], known[name] = np.full(count, None if kind is object else 0, kind), np.zeros(count, bool)
        for row, value in there:
            found[name][row], known[name][row] = value, True
    return found, known


def _edge_columns(
    dataflow: Dataflow, layout: TraceLayout, spans: NDArray[np.float64], step: int, source: str
) -> ColumnBlock:
    read_from, count = np.array(dataflow.read_from, np.intp), len(dataflow.read_from)
    partial, own = np.zeros(count, bool), np.full((count, 2), np.nan)
    for place, number in dataflow.parts.items():
        if number is not None:
            partial[place], own[place] = True, spans[number]
    columns: dict[str, NDArray[Any] | str | int] = {
        "step": step,
        "source": source,
        "seq": layout.reader,
        "arg": layout.arg,
        "from_seq": layout.seq[read_from],
        "from_out": layout.out[read_from],
        "in_place": layout.in_place,
        "partial": partial,
        "min": own[:, 0],
        "max": own[:, 1],
    }
    return ColumnBlock(count, columns, {"min": partial, "max": partial})


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))
