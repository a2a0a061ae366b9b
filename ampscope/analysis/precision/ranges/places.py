"""The places whose ranges are told are sites that only differ in shapes; sampled steps say how large they got."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from ampscope.analysis.arrays import IntArray
from ampscope.analysis.results import SourceLine
from ampscope.analysis.rounding import plain
from ampscope.analysis.step_graph import public_phase
from ampscope.analysis.tables.traced_steps import traced_rows
from ampscope.provenance import large_values
from ampscope.trace.dtypes import FINFO, PARTS, FloatInfo
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Node, Phase, ReplayStatus, SiteRow, Source, Table, execution_of, source_of
from ampscope.trace.schema.tables import details


class ValueKind(StrEnum):
    """Names the kinds of values that a place may hold."""

    FORWARD = "forward"  #: results of ops of forward and loss, and what they are given from outside
    BACKWARD = "backward"  #: results of ops of backward, which carry the loss scale
    GRADIENTS = "gradients"  #: of parameters, as backward leaves them
    WEIGHTS = "weights"  #: parameters and buffers
    STATE = "state"  #: what optimizers keep of parameters


_GROUPS = {
    Node.GRADIENT: ValueKind.GRADIENTS,
    Node.STATE_AFTER: ValueKind.STATE,
    **dict.fromkeys((Node.PARAMETER, Node.WEIGHT_AFTER, Node.BUFFER, Node.BUFFER_AFTER), ValueKind.WEIGHTS),
    **dict.fromkeys((Node.INPUT, Node.LOSS, Node.CARRIED, Node.CARRIED_AFTER), ValueKind.FORWARD),
}
_NODES = frozenset(Node)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlace:
    """An op of a module at a line, in one phase and dtype; a parameter; a gradient."""

    module: str
    op: str  #: ATen overload, or a `Node`
    phase: str  #: as `Incident.phase`
    dtype: str  #: of complex numbers, that of their parts
    name: str = ""  #: of a `Node`
    optimizer: int = 0  #: whose steps they were
    source: SourceLine | None = None
    is_bounded: bool = False  #: whether what the op gives cannot grow, whatever it is given

    @property
    def format(self) -> FloatInfo:
        """The facts of its dtype."""
        return FINFO[self.dtype]

    @property
    def key(self) -> str:
        """A short name for it, the same in each run of the same code."""
        line = f"{self.source.file}:{self.source.line}" if self.source else ""
        told = (self.module, self.op, self.phase, self.dtype, self.name, str(self.optimizer), line)
        return hashlib.blake2s("\0".join(told).encode("utf-8", "replace"), digest_size=6).hexdigest()

    @property
    def group(self) -> ValueKind:
        """The kind of values that the place holds."""
        if self.is_node:
            return _GROUPS[Node(self.op)]
        return ValueKind.BACKWARD if self.phase == Phase.BACKWARD else ValueKind.FORWARD

    @property
    def is_gradient(self) -> bool:
        """Whether its values carry the loss scale: those of backward, and what it leaves of parameters' gradients."""
        return self.op == Node.GRADIENT or (self.phase == Phase.BACKWARD and not self.is_node)

    @property
    def is_node(self) -> bool:
        """Whether it is no op, but where values enter a step or leave it."""
        return self.op in _NODES

    @property
    def is_read(self) -> bool:
        """Whether any op read it: what one only fills with numbers of its own is garbage before."""
        return self.op != Node.INPUT or self.name.removeprefix("an operand of ") not in _FILLS


#: Ops that overwrite their only tensor without reading it.
_FILLS = frozenset(
    {
        *("aten.bernoulli_.float", "aten.uniform_.default", "aten.normal_.default", "aten.exponential_.default"),
        *("aten.random_.default", "aten.random_.from", "aten.random_.to", "aten.geometric_.default"),
        *("aten.log_normal_.default", "aten.cauchy_.default", "aten.zero_.default", "aten.fill_.Scalar"),
    }
)


def place_of(site: SiteRow, out: int, optimizer: int) -> OpPlace | None:
    """The place of one output of a site; None where that holds no floating-point numbers."""
    given = plain(site.out_dtypes[out]) if 0 <= out < len(site.out_dtypes) else ""
    dtype = PARTS.get(given, given)
    if dtype not in FINFO:
        return None
    return OpPlace(
        module=site.module,
        op=site.op,
        phase=public_phase(site.phase),
        dtype=dtype,
        name=site.name,
        optimizer=optimizer,
        source=SourceLine.of(site),
        is_bounded=large_values.is_bounded(site.op, lambda: details(site.scalars)),
    )


def numbered(places: Iterable[OpPlace | None]) -> tuple[list[OpPlace], list[int]]:
    """Each different place once, and the number of each that was given; -1 for none."""
    known: dict[OpPlace, int] = {}
    numbers = [-1 if place is None else known.setdefault(place, len(known)) for place in places]
    return list(known), numbers


#: Steps that a course is drawn through: all of up to so many, else these many of the newest, of the newest tenth and
#: of all.
ALL, EACH_SCALE = 72, 24
_NEWEST_PART = 10


@dataclass(frozen=True, slots=True)
class SampledStretch:
    """Sampled steps that are told together: one alone, or of very many those that are neighbours."""

    first: int
    last: int
    steps: int = 1  #: how many there are


@dataclass(frozen=True, slots=True)
class SampledExecutions:
    """The executions of one rank that are looked at."""

    live: frozenset[int]  #: steps that were traced as they ran
    optimizers: dict[str, int]  #: by the text in ``ops.source``
    unlike: tuple[int, ...]  #: steps whose replay came out differently, and says nothing of them
    course: tuple[int, ...]  #: steps that a course is drawn through
    stretches: tuple[SampledStretch, ...]  #: all steps, in at most `ALL` stretches that are equally wide
    bits: int = 0  #: the base-2 logarithm of that width, in steps of the run: a shift is quicker than a division
    mixed: tuple[int, ...] = ()  #: steps of which more was recorded than the first optimizer's step as it ran

    @property
    def count(self) -> int:
        """Steps in all."""
        return sum(each.steps for each in self.stretches)

    @property
    def stretch(self) -> str:
        """The number of a row's stretch, in the query engine's words."""
        return f"(step >> {self.bits})"

    def last_of(self, numbers: IntArray) -> IntArray:
        """The last step that the stretches with these numbers may hold."""
        return ((numbers + 1) << self.bits) - 1

    @property
    def where(self) -> str:
        """The rows of these executions, in the query engine's words; of no source at all where there are none."""
        sources = ", ".join(f"'{source}'" for source in self.optimizers) or "''"
        told = f"source IN ({sources}) AND out >= 0"  # a damaged table says anything
        if self.unlike:
            told += f" AND NOT (source LIKE '{Source.REPLAY}%' AND step IN ({_listed(self.unlike)}))"
        return told

    @property
    def where_plain(self) -> str:
        """The condition for rows of steps that need no look at their source: the first optimizer's as it ran."""
        return f"out >= 0 AND step NOT IN ({_listed(self.mixed) or -1})"

    @property
    def where_mixed(self) -> str:
        """The condition for the executions' rows of all other steps."""
        return f"{self.where} AND step IN ({_listed(self.mixed) or -1})"


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


def sampled_steps(run: Run, rank: int) -> SampledExecutions:
    """Returns a rank's traced steps as they were: as they ran, or in a replay that came out the same."""
    whole = traced_rows(run, rank)
    traced = [each for each in whole if execution_of(each.source)[0] in (Source.LIVE, Source.REPLAY)]
    unlike = {row.step for row in run.rows(Table.INCIDENTS, rank=rank) if row.replay != ReplayStatus.EXACT}
    sources = {each.source for each in traced}
    live = {each.step for each in traced if execution_of(each.source)[0] == Source.LIVE}
    steps = sorted({each.step for each in traced})
    bits = 0 if len(steps) <= ALL else _width(steps[0], steps[-1])
    return SampledExecutions(
        live=frozenset(live),
        optimizers={source: int(execution_of(source)[1] or 0) for source in sorted(sources) if _is_plain(source)},
        unlike=tuple(sorted(unlike & {each.step for each in traced})),
        course=_course(steps),
        stretches=tuple(_stretches(steps, bits)),
        bits=bits,
        mixed=tuple(sorted({each.step for each in whole if each.source != source_of(Source.LIVE, 0)})),
    )


def _width(first: int, last: int) -> int:
    """The least power of two that leaves no more than so many stretches."""
    return next(bits for bits in range(64) if (last >> bits) - (first >> bits) < ALL)


def _stretches(steps: Sequence[int], bits: int) -> Iterator[SampledStretch]:
    for _, own in groupby(steps, key=lambda step: step >> bits):
        first, *others = own
        yield SampledStretch(first, others[-1] if others else first, 1 + len(others))


def _is_plain(source: str) -> bool:
    """Whether a source says what AMPscope writes there, and may stand in a query."""
    execution, optimizer = execution_of(source)
    return execution in (Source.LIVE, Source.REPLAY) and (not optimizer or optimizer.isdecimal())


def _course(steps: list[int]) -> tuple[int, ...]:
    """The newest steps all, those before ever fewer: what began lately is seen as well as what has lasted."""
    if len(steps) <= ALL:
        return tuple(steps)
    newest = steps[-max(1, len(steps) // _NEWEST_PART) :]
    return tuple(sorted({*steps[-EACH_SCALE:], *_spread(newest), *_spread(steps)}))


def _spread(steps: list[int]) -> list[int]:
    """Some of the steps, evenly, the first and the last among them."""
    if len(steps) <= EACH_SCALE:
        return steps
    return [steps[number * (len(steps) - 1) // (EACH_SCALE - 1)] for number in range(EACH_SCALE)]
