"""Where the errors come from that an op of an audited step is given: the ops before it that round."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from ampscope.analysis.precision.audit.op_losses import layer_of, own_weight, weight
from ampscope.trace.schema import AuditOpRow, EdgeRow, Phase, SiteRow

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
