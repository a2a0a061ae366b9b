"""The places of a program whose ranges are told: sites that only differ in their shapes are one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ampscope.analysis.numerics.dtypes import plain
from ampscope.analysis.origin.step_graph import public_phase, source_line
from ampscope.analysis.results import SourceLine
from ampscope.provenance import meant
from ampscope.trace.dtypes import FINFO, PARTS, FloatInfo
from ampscope.trace.json_columns import details
from ampscope.trace.schema import Node, Phase, SiteRow


class Group(StrEnum):
    """What kind of values a place holds."""

    FORWARD = "forward"  #: results of ops of forward and loss, and what they are given from outside
    BACKWARD = "backward"  #: results of ops of backward, which carry the loss scale
    GRADIENTS = "gradients"  #: of parameters, as backward leaves them
    WEIGHTS = "weights"  #: parameters and buffers
    STATE = "state"  #: what optimizers keep of parameters


_GROUPS = {
    Node.GRADIENT: Group.GRADIENTS,
    Node.STATE_AFTER: Group.STATE,
    **dict.fromkeys((Node.PARAMETER, Node.WEIGHT_AFTER, Node.BUFFER, Node.BUFFER_AFTER), Group.WEIGHTS),
    **dict.fromkeys((Node.INPUT, Node.LOSS, Node.CARRIED, Node.CARRIED_AFTER), Group.FORWARD),
}
_NODES = frozenset(Node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
    def group(self) -> Group:
        """What kind of values it holds."""
        if self.is_node:
            return _GROUPS[Node(self.op)]
        return Group.BACKWARD if self.phase == Phase.BACKWARD else Group.FORWARD

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


def place_of(site: SiteRow, out: int, optimizer: int) -> Place | None:
    """The place of one output of a site; None where that holds no floating-point numbers."""
    given = plain(site.out_dtypes[out]) if 0 <= out < len(site.out_dtypes) else ""
    dtype = PARTS.get(given, given)
    if dtype not in FINFO:
        return None
    return Place(
        module=site.module,
        op=site.op,
        phase=public_phase(site.phase),
        dtype=dtype,
        name=site.name,
        optimizer=optimizer,
        source=source_line(site),
        is_bounded=meant.is_bounded(site.op, lambda: details(site.scalars)),
    )


def numbered(places: Iterable[Place | None]) -> tuple[list[Place], list[int]]:
    """Each different place once, and the number of each that was given; -1 for none."""
    known: dict[Place, int] = {}
    numbers = [-1 if place is None else known.setdefault(place, len(known)) for place in places]
    return list(known), numbers
