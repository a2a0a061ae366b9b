"""Each op of an audited step loses by rounding its results and by the errors it is given, which have origins."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from ampscope.analysis.results import SourceLine
from ampscope.analysis.words import op_in_words
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import LOSS_CODE, AuditOpRow, EdgeRow, Node, Phase, SiteRow

#: An op cancels where the relative error of what it gives is so many times that of its operands, three bits' worth,
GROWS = 8.0
#: and so many units of rounding, four bits' worth: less is no loss to speak of.
LOUD = 16.0
#: An op is coarse whose own error is more than so many units of rounding; one that computes in float32 inside and
#: rounds once has one at most.
COARSE = 4.0
#: The layer of backward's ops that no op of the forward has: sums of gradients, their copies.
BACKWARD_CODE = "(backward)"
#: Ops that add terms up, whose sum may be far smaller than they are.
SUMS = frozenset(
    {
        *("add", "sub", "rsub", "sum", "mean", "cumsum", "addcmul", "lerp"),
        *("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "convolution"),
        *("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "var_mean"),
    }
)


class PrecisionLoss(StrEnum):
    """How an op loses precision."""

    CANCELS = "cancels"  #: its terms nearly cancel: what is left of them is mostly the error that they came with
    COARSE = "coarse"  #: its own error is far above that of rounding its results once
    ROUNDS = "rounds"  #: it rounds its results, as its dtype must
    NOTHING = "nothing"  #: its results are exact


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLoss:
    """One op at one line, over all its executions in the step; errors are relative, null where not known.

    It has many attributes because it is all that any view shows of an op, and the JSON of one.
    """

    op: str
    module: str
    layer: str  #: that it counts for: `layer_of`
    module_type: str
    phase: str
    source: SourceLine | None
    dtypes: tuple[str, ...]  #: of its operands and outputs, each once
    executions: int
    kind: PrecisionLoss
    local: float | None  #: its own error, on its own operands
    inherited: float | None  #: what its operands bring, as it appears in its result
    total: float | None  #: both, against the step in the reference dtype
    operand_error: float | None  #: the largest total error among its operands
    contribution: float | None  #: what its own errors add to the loss, to first order
    rounding: float  #: by how much its own errors may move the loss, whatever their signs
    cancelled: float  #: by how much the errors may that come through it where it cancels
    seq: int  #: of the execution that the errors are of: ``ops.seq``

    @property
    def growth(self) -> float | None:
        """How many times the relative error of its result is that of its operands."""
        if not self.operand_error or self.total is None:
            return None
        return self.total / self.operand_error


def unit(dtypes: Iterable[str]) -> float:
    """The unit of rounding of the coarsest of some dtypes: half the spacing of its numbers at 1."""
    return max((FINFO[name].eps / 2 for name in dtypes if name in FINFO), default=0.0)


def op_losses(
    rows: Sequence[AuditOpRow], sites: Mapping[int, SiteRow], let_through: Callable[[int], float] = lambda _: 0.0
) -> tuple[OpLoss, ...]:
    """Returns the rounding loss of each op, the largest first.

    Args:
        rows: Of one audited step.
        sites: The program points of its rank, by number.
        let_through: By how much the roundings may move the loss that reach it through an op alone; asked of ops that
            cancel.
    """
    of_site: dict[int, list[AuditOpRow]] = {}
    for row in rows:
        if row.site in sites and sites[row.site].op != Node.GRADIENT:
            of_site.setdefault(row.site, []).append(row)
    coarsest = unit(name for number in of_site for name in _dtypes(sites[number]))
    layers = {number: layer_of(sites[number], sites) for number in of_site}
    found = [_loss(sites[number], layers[number], each, coarsest, let_through) for number, each in of_site.items()]
    return tuple(sorted(found, key=lambda each: -weight(each.rounding, each.cancelled)))


def weight(*parts: float) -> float:
    """Errors of random signs, together."""
    return math.sqrt(math.fsum(part * part for part in parts))


def layer_of(site: SiteRow, sites: Mapping[int, SiteRow]) -> str:
    """The layer that an op counts for; in backward, that of the op of which it makes the gradient."""
    if site.module:
        return site.module
    forward = sites.get(site.forward_site) if site.forward_site is not None else None
    if site.phase == Phase.BACKWARD and forward is None:
        return BACKWARD_CODE
    return LOSS_CODE if (forward or site).phase == Phase.LOSS else ""


def leaves_out(rows: Sequence[AuditOpRow], sites: Mapping[int, SiteRow]) -> bool:
    """Whether an op on the way to the loss rounds what asks for no gradient, so that its effect is not known.

    What a checkpoint runs without one it runs again.
    """
    again = {site.module for site in sites.values() if site.phase == Phase.RECOMPUTE}
    return any(
        row.local
        and row.contribution is None
        and site.phase in (Phase.FORWARD, Phase.LOSS)
        and site.module not in again
        for row in rows
        if (site := sites.get(row.site)) is not None
    )


def own_weight(row: AuditOpRow) -> float:
    """By how much an output's own errors may move the loss: what they add up to, or would with random signs."""
    return max(abs(row.contribution or 0.0), row.spread or 0.0)


def cancels(row: AuditOpRow, site: SiteRow, coarsest: float) -> bool:
    """Whether an op made a large relative error of small ones, as a sum does whose terms nearly cancel.

    Of what the loss is made of alone: a gradient is a sum that may well be next to nothing.

    Args:
        row: One of its outputs.
        site: Where it ran.
        coarsest: The unit of rounding of the coarsest dtype in the step.
    """
    if op_in_words(site.op) not in _SUMS_IN_WORDS or not row.inherited_spread or not row.operand_error:
        return False
    return (row.inherited or 0.0) > max(GROWS * row.operand_error, LOUD * coarsest)


_SUMS_IN_WORDS = frozenset(op_in_words(f"aten.{name}.default") for name in SUMS)


def _loss(
    site: SiteRow, layer: str, rows: Sequence[AuditOpRow], coarsest: float, let_through: Callable[[int], float]
) -> OpLoss:
    own = unit(_dtypes(site))
    lost = [row for row in rows if cancels(row, site, coarsest)]
    known = [row.contribution for row in rows if row.contribution is not None]
    worst = max(lost, key=lambda row: row.inherited or 0.0) if lost else max(rows, key=lambda row: row.local or 0.0)
    kind = PrecisionLoss.CANCELS if lost else _kind(worst.local or 0.0, own)
    return OpLoss(
        op=site.op,
        module=site.module,
        layer=layer,
        module_type=site.module_type,
        phase=site.phase,
        source=SourceLine.of(site),
        dtypes=tuple(dict.fromkeys(_dtypes(site))),
        executions=len(rows),
        kind=kind,
        local=worst.local,
        inherited=worst.inherited,
        total=worst.total,
        operand_error=worst.operand_error,
        contribution=math.fsum(known) if known else None,
        rounding=weight(*map(own_weight, rows)),
        cancelled=weight(*(max(row.inherited_spread or 0.0, let_through(row.seq)) for row in lost)),
        seq=worst.seq,
    )


def _kind(local: float, unit_of_rounding: float) -> PrecisionLoss:
    if not local:
        return PrecisionLoss.NOTHING
    return PrecisionLoss.COARSE if local > COARSE * unit_of_rounding else PrecisionLoss.ROUNDS


def _dtypes(site: SiteRow) -> list[str]:
    return [name for name in (*site.in_dtypes, *site.out_dtypes) if name in FINFO]


#: Ops looked at on the way back; those that round nothing are few.
_MOST = 1000
_CAST = "aten._to_copy.default"


class Origins:
    """The way back from an op to where its operands were rounded.

    Args:
        rows: Of the audited step.
        edges: Gives its dataflow.
        sites: The program points of its rank, by number.
    """

    def __init__(
        self, rows: Iterable[AuditOpRow], edges: Callable[[], Sequence[EdgeRow]], sites: Mapping[int, SiteRow]
    ) -> None:
        self._edges = edges
        self._sites = sites
        self._rows: dict[int, list[AuditOpRow]] = {}
        for row in rows:
            self._rows.setdefault(row.seq, []).append(row)

    @cached_property
    def _before(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for edge in self._edges():
            found.setdefault(edge.seq, []).append(edge.from_seq)
        return found

    @cached_property
    def _readers(self) -> dict[int, set[int]]:
        """By op, those that read it on the way to the loss."""
        found: dict[int, set[int]] = {}
        for edge in self._edges():
            if self._phase(edge.seq) != Phase.BACKWARD:
                found.setdefault(edge.from_seq, set()).add(edge.seq)
        return found

    def rounded_in(self, seq: int) -> tuple[str, ...]:
        """The layers in which the operands of an op were last rounded; first what adds most to the loss's error."""
        found: dict[str, float] = {}
        for op in self._last_rounded(seq, alone=False):
            site = self._sites.get(self._rows[op][0].site)
            if site is not None:
                layer = layer_of(site, self._sites)
                found[layer] = max(found.get(layer, 0.0), self._own(op))
        return tuple(sorted(found, key=lambda layer: -found[layer]))

    def let_through(self, seq: int) -> float:
        """By how much the roundings may move the loss that an op is given, and that reach the loss through it alone.

        The last ones, with those of casts for the ops that made them: a weight, a bias.
        """
        last = self._last_rounded(seq, alone=True)
        casts = {
            before
            for op in last
            for before in self._before.get(op, ())
            if self._op(before) == _CAST and self._readers.get(before, set()) <= {op}
        }
        return weight(*map(self._own, {*last, *casts}))

    def _last_rounded(self, seq: int, *, alone: bool) -> list[int]:
        """The ops that last rounded what an op is given; with ``alone``, those that nothing but the op makes use of."""
        found, through = [], {seq}
        seen, waiting = {seq}, [-op for op in self._before.get(seq, ())]
        heapq.heapify(waiting)
        while waiting and len(seen) < _MOST:
            op = -heapq.heappop(waiting)  # the latest first: what reads it was looked at
            if op in seen:
                continue
            seen.add(op)
            if alone and not self._readers.get(op, set()) <= through:
                continue
            through.add(op)
            if any(row.local for row in self._rows.get(op, ())):
                found.append(op)
                continue
            for before in self._before.get(op, ()):
                heapq.heappush(waiting, -before)
        return found

    def _own(self, seq: int) -> float:
        return weight(*map(own_weight, self._rows.get(seq, ())))

    def _phase(self, seq: int) -> str:
        site = self._site(seq)
        return site.phase if site is not None else ""

    def _op(self, seq: int) -> str:
        site = self._site(seq)
        return site.op if site is not None else ""

    def _site(self, seq: int) -> SiteRow | None:
        rows = self._rows.get(seq)
        return self._sites.get(rows[0].site) if rows else None
