"""One op of a recording is found by kind or search, and told: what it read and wrote, who wrote and who read it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from ampscope.analysis.arrays import BoolArray, IntArray
from ampscope.analysis.replay.recording import STATISTICS, Recording
from ampscope.analysis.results import Operand, SourceLine
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ENTRY_NODES, UNMEASURED, Cast, SiteRow, Statistics, Table, said
from ampscope.trace.schema.tables import details


class OpKind(StrEnum):
    """Names the kinds of ops that can be jumped to."""

    CAST = "cast"
    NEAR = "near"  #: within `ampscope.analysis.replay.recording.NEAR_BITS` of the dtype's limit
    NONFINITE = "nonfinite"  #: where NaN or infinity begins that is not intended: nothing that the op read was so


def marked(seen: Recording, kind: OpKind) -> IntArray:
    """The positions of every op of ``kind``, ascending."""
    return np.flatnonzero(_flags(seen, kind))


def find(seen: Recording, words: str) -> IntArray:
    """The positions of the ops in whose name, module, dtype, file or line of code each of ``words`` occurs.

    Case does not count; no words find every op.
    """
    wanted = words.casefold().split()
    if not wanted:
        return np.arange(len(seen))
    hits = [all(word in _text(site) for word in wanted) for site in seen.sites]
    return np.flatnonzero(np.array(hits, dtype=np.bool_)[seen.site])


def neighbourhood(places: IntArray, position: int, count: int) -> IntArray:
    """Returns the ascending ``places`` nearest to ``position`` by rank, ``count`` on either side where there are."""
    middle = int(np.searchsorted(places, position))
    start = max(min(middle - count, len(places) - 2 * count - 1), 0)
    return places[start : start + 2 * count + 1]


def twins(seen: Recording, position: int) -> tuple[int, ...]:
    """The ops of backward that an op of forward led to, or the op of forward that one of backward belongs to."""
    forward = int(seen.forward[position])
    return (forward,) if forward >= 0 else tuple(np.flatnonzero(seen.forward == position).tolist())


def _text(site: SiteRow) -> str:
    told = (site.op, site.name, site.module, site.module_type, site.file, site.code, *site.out_dtypes)
    return "\n".join(told).casefold()


def _flags(seen: Recording, kind: OpKind) -> BoolArray:
    if kind is OpKind.CAST:
        return seen.cast
    if kind is OpKind.NEAR:
        return seen.near & ~seen.entry
    return seen.born & ~seen.intended


#: Neighbours told one by one; a weight shared by thousands of ops has more readers than anyone looks at.
MAX_NEIGHBOURS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandMagnitudes:
    """Sets values against the range of their dtype; exponents of 2, None where not known."""

    smallest: float | None = None
    largest: float | None = None
    floor: float | None = None  #: smallest subnormal
    limit: float | None = None  #: where the dtype overflows

    @property
    def peak(self) -> float | None:
        """The largest magnitude as a number."""
        return None if self.largest is None else 2.0**self.largest

    @property
    def headroom(self) -> float | None:
        """Doublings left before the dtype overflows."""
        return None if self.limit is None or self.largest is None else self.limit - self.largest


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLine:
    """An executed op as a line of a list."""

    position: int
    seq: int
    op: str
    name: str  #: of an input, parameter or gradient
    module: str
    phase: str
    dtype: str
    role: str = ""  #: what it is to the op in whose list it stands
    magnitudes: OperandMagnitudes
    is_cast: bool
    is_near: bool
    is_finite: bool
    is_born: bool  #: not finite though nothing it read was
    is_intended: bool  #: not finite because the code wants it so, as a mask

    @property
    def is_alarming(self) -> bool:
        """Whether something is not finite that nobody wanted so."""
        return not self.is_finite and not self.is_intended


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDetail:
    """Everything about one executed op."""

    line: OpLine
    module_type: str
    source: SourceLine | None
    autocast: str  #: dtype of the region, empty outside
    cast: Cast
    scalars: tuple[tuple[str, str], ...]  #: arguments that are no tensors, by name
    micro_batch: int
    grad_fn: str
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    producers: tuple[OpLine, ...]
    readers: tuple[OpLine, ...]
    reader_count: int
    twins: tuple[OpLine, ...]  #: the other half of a forward and backward pair


def op_line(seen: Recording, position: int, role: str = "") -> OpLine:
    """The op at ``position`` as a line."""
    site = seen.site_of(position)
    return OpLine(
        position=position,
        seq=int(seen.seq[position]),
        op=site.op,
        name=site.name,
        module=site.module,
        phase=site.phase,
        dtype=next(iter(site.out_dtypes), ""),
        role=role,
        magnitudes=OperandMagnitudes(
            smallest=known(seen.smallest[position]),
            largest=known(seen.largest[position]),
            floor=known(seen.floor[position]),
            limit=known(seen.limit[position]),
        ),
        is_cast=bool(seen.cast[position]),
        is_near=bool(seen.near[position]),
        is_finite=not seen.nonfinite[position],
        is_born=bool(seen.born[position]),
        is_intended=bool(seen.intended[position]),
    )


def op_lines(seen: Recording, positions: Iterable[int]) -> tuple[OpLine, ...]:
    """The ops at ``positions`` as lines."""
    return tuple(op_line(seen, position) for position in positions)


def op_detail(seen: Recording, position: int) -> OpDetail:
    """Everything about the op at ``position``; histograms apart, which `with_histograms` fetches."""
    site = seen.site_of(position)
    readers = _readers(seen, position)
    known = said(Cast, site.cast, Cast.NONE)
    return OpDetail(
        line=op_line(seen, position),
        module_type=site.module_type,
        source=SourceLine.of(site),
        autocast=site.autocast,
        cast=known,
        scalars=tuple((name, str(value)) for name, value in details(site.scalars).items()),
        micro_batch=int(seen.micro_batch[position]),
        grad_fn=site.grad_fn,
        reads=tuple(operand for operand, _ in _reads(seen, position)),
        writes=tuple(_writes(seen, position)),
        producers=tuple(line for _, line in _reads(seen, position)),
        readers=tuple(op_line(seen, each) for each in readers[:MAX_NEIGHBOURS]),
        reader_count=len(readers),
        twins=op_lines(seen, twins(seen, position)[:MAX_NEIGHBOURS]),
    )


def with_histograms(run: Run, seen: Recording, position: int) -> tuple[Operand, ...]:
    """Returns the results of the op at ``position``, with exponent histograms where the trace holds them."""
    where = {"step": seen.traced.step, "source": seen.traced.source, "rank": seen.traced.rank}
    rows = run.rows(Table.OPS, seq=int(seen.seq[position]), **where)
    return tuple(_writes(seen, position, {row.out: row.statistics for row in rows}))


def _reads(seen: Recording, position: int) -> Iterator[tuple[Operand, OpLine]]:
    site = seen.site_of(position)
    for edge in map(seen.edges.row, range(seen.first_edge[position], seen.first_edge[position + 1])):
        place = seen.position(edge["from_seq"])
        producer = seen.site_of(place)
        arg = edge["arg"]
        named = producer.op in ENTRY_NODES and producer.name
        role = producer.name if named else f"input {arg}"
        dtype, shape = next(iter(site.in_dtypes[arg : arg + 1]), ""), next(iter(site.in_shapes[arg : arg + 1]), "")
        own = Statistics(edge["min"], edge["max"])
        operand = Operand(role=role, dtype=dtype, shape=shape, statistics=own)
        if not edge["partial"]:
            operand = _described(seen, _output_row(seen, place, edge["from_out"]), operand)
        yield operand, op_line(seen, place, role)


def _writes(seen: Recording, position: int, measured: dict[int, Statistics] | None = None) -> Iterator[Operand]:
    site = seen.site_of(position)
    start, stop = int(seen.first_output[position]), int(seen.first_output[position + 1])
    for row in range(start, stop):
        out = int(seen.outputs.arrays["out"][row])
        dtype, shape = next(iter(site.out_dtypes[out : out + 1]), ""), next(iter(site.out_shapes[out : out + 1]), "")
        known = (measured or {}).get(out, UNMEASURED)
        named = Operand(role=f"output {out}", dtype=dtype, shape=shape, statistics=known)
        yield _described(seen, row, named)


def _output_row(seen: Recording, place: int, out: int) -> int:
    """The row of an op's output ``out``; of its first where that one was not recorded."""
    start, stop = int(seen.first_output[place]), int(seen.first_output[place + 1])
    outs = seen.outputs.arrays["out"][start:stop].tolist()
    return start + (outs.index(out) if out in outs else 0)


def _described(seen: Recording, row: int, operand: Operand) -> Operand:
    """``operand`` with the statistics of a row of the outputs."""
    values = seen.outputs.row(row)
    statistics = operand.statistics._replace(**{name: values[name] for name in STATISTICS})
    return replace(operand, numel=values["numel"], statistics=statistics)


def _readers(seen: Recording, position: int) -> list[int]:
    """Positions of the ops that read what this one wrote, each once."""
    start, stop = int(seen.first_reader[position]), int(seen.first_reader[position + 1])
    rows = seen.readers[start:stop]
    consumers = seen.edges.arrays["seq"][rows] if len(rows) else ()
    return sorted({seen.position(int(seq)) for seq in consumers})


def known(value: float) -> float | None:
    """None for NaN, which stands for what is not known in an array."""
    return None if math.isnan(value) else float(value)
