"""Turns what was measured of an audited step into the rows of its ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ampscope.capture.step.ending.looks.audit.differences import Numbers, difference, norm
from ampscope.capture.step.ending.looks.audit.op_errors import MeasuredOutput, OpErrors, same_draws
from ampscope.capture.step.ending.looks.audit.reference import sampled
from ampscope.capture.torch_support.local_shards import local
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.trace.schema import AuditOpRow, Node, OpRow

OTHER_DRAWS = (
    "the random numbers of the step came out otherwise in the reference dtype, so what its ops inherited is not known"
)


class Errors(NamedTuple):
    """The errors that were measured of an audited step, on the host."""

    rows: list[AuditOpRow]
    explained: float | None  #: sum of all contributions to the loss's error
    same_draws: bool  #: random numbers were the same as in the reference


def errors_of(
    measured: OpErrors, traced: TracedRows, pairs: Mapping[str, tuple[Tensor | None, Tensor]], scale: float
) -> Errors:
    """The rows of an audited step; waits for the device.

    Args:
        measured: Its ops.
        traced: Its trace.
        pairs: By parameter, a sample of the reference's gradient, and the gradient.
        scale: The loss scale.
    """
    of_gradients = Numbers()
    ends = {name: _norms(*pair, of_gradients) for name, pair in pairs.items()}
    norms, gradients = measured.numbers.read(), of_gradients.read()
    same = same_draws(norms, measured.draws)
    making = _Making(norms, scale, measured.is_comparable if same else lambda _: False)
    step, source = (traced.ops[0].step, traced.ops[0].source) if traced.ops else (0, "")
    rows = [making.row(each, step, source) for each in measured.outputs]
    totals = {name: _ratio(gradients, each) if same else None for name, each in ends.items()}
    rows += _of_gradients(traced, {(row.seq, row.out): row.local for row in rows}, totals)
    given = [row.contribution for row in rows if row.contribution is not None]
    return Errors(rows, math.fsum(given) if given else None, same)


class _Making:
    """Makes the rows, in order of execution: what an op inherits is what those before it came to.

    Args:
        norms: What was measured, by number.
        scale: The loss scale.
        is_comparable: What the reference step has at the place of an output can be compared with it.
    """

    def __init__(self, norms: list[float], scale: float, is_comparable: Callable[[MeasuredOutput], bool]) -> None:
        self._norms = norms
        self._scale = scale
        self._is_comparable = is_comparable
        self._known: dict[int, float] = {}  # by op, the largest error of what it gave

    def row(self, output: MeasuredOutput, step: int, source: str) -> AuditOpRow:
        """The row of one output."""
        compared = self._is_comparable(output)
        total = _ratio(self._norms, output.total) if compared else None
        local = 0.0 if output.is_exact else _ratio(self._norms, output.local)
        given = [self._known[seq] for seq in output.writers if seq in self._known]
        before = max(given, default=0.0 if compared and not output.writers else None)
        error = total
        if output.is_cast and compared:
            error = max([before or 0.0, local or 0.0])
        if error is not None:
            self._known[output.seq] = max(self._known.get(output.seq, 0.0), error)
        sums = [(self._norms[one], self._norms[other]) for one, other in output.contributions]
        drifts = [self._norms[number] * each for number, each in output.inherited_squares] if compared else []
        return AuditOpRow(
            step,
            source,
            output.seq,
            output.out,
            output.site,
            output.micro_batch,
            local,
            _ratio(self._norms, output.inherited) if compared else None,
            total,
            before,
            _finite(sum(one for one, _ in sums) / self._scale) if sums else None,
            _finite(math.sqrt(sum(other for _, other in sums)) / self._scale) if sums else None,
            _finite(math.sqrt(sum(drifts)) / self._scale) if drifts else None,
        )


def _of_gradients(
    traced: TracedRows, local: Mapping[tuple[int, int], float | None], totals: Mapping[str, float | None]
) -> Iterator[AuditOpRow]:
    """A row for each parameter's gradient, as backward left it."""
    made_by = {edge.seq: (edge.from_seq, edge.from_out) for edge in traced.edges}
    for row in traced.ops:
        site = traced.sites.row(row.site)
        if site.op == Node.GRADIENT:
            own = local.get(made_by.get(row.seq, (-1, 0)))
            yield _of_gradient(row, own, totals.get(site.name))


def _of_gradient(row: OpRow, local: float | None, total: float | None) -> AuditOpRow:
    nothing = (None,) * 4
    return AuditOpRow(row.step, row.source, row.seq, row.out, row.site, row.micro_batch, local, None, total, *nothing)


def _norms(known: Tensor | None, gradient: Tensor, into: Numbers) -> tuple[int, int] | None:
    ours = sampled(local(gradient))
    if known is None or ours is None or ours.shape != known.shape:
        return None
    error, of = difference(ours, known)
    return into.put(norm(error)), into.put(norm(of))


def _ratio(norms: Sequence[float], pair: tuple[int, int] | None) -> float | None:
    """A relative error; None where that of which it is one is zero, or where it is not finite."""
    if pair is None:
        return None
    error, of = norms[pair[0]], norms[pair[1]]
    if not error:
        return 0.0
    return _finite(error / of) if of else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
