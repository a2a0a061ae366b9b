"""Measures each op of a faithful replay: the error it makes, the one it inherited, and what both do to the loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.checks import audit_reference
from ampscope.capture.checks.audit_reference import (
    SAMPLE,
    Key,
    Numbers,
    Positions,
    ReferenceSamples,
    difference,
    is_cast,
    norm,
    precise,
    sampled,
)
from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.sharding import local
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.exponent_histogram import sample
from ampscope.capture.tracing.operand_keeper import ExecutedCall
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.traced_rows import TracedRows
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import AuditOpRow, Node, OpRow

#: Random numbers of two executions are the same if they differ by no more than their rounding: of ones and zeros by
#: nothing, of others by this share.
_SAME_NUMBERS = 0.02


@dataclass(slots=True)
class MeasuredOutput:
    """One output of an op; numbers of scalars that are still on their device, None where there is none.

    It has many attributes because they are those of a row.
    """

    seq: int
    out: int
    site: int
    micro_batch: int
    is_cast: bool
    writers: tuple[int, ...]  #: of its operands
    key: Key | None  #: where it ran
    local: tuple[int, int] | None = None  #: norms of the error and of what it is an error of
    inherited: tuple[int, int] | None = None
    total: tuple[int, int] | None = None
    is_exact: bool = False  #: it computes in the reference dtype
    contributions: tuple[tuple[int, int], ...] = ()  #: sums of products with the gradient, and of their squares
    inherited_squares: tuple[tuple[int, float], ...] = ()  #: likewise of a sample, and how many elements one stands for


@dataclass(slots=True)
class _Awaited:
    """An output whose gradient backward will bring."""

    tensor: Tensor
    output: MeasuredOutput
    error: Tensor | None  #: its own, in bfloat16; None where there is none
    drift: Tensor | None  #: a sample of the inherited one


class OpErrors:
    """Listens to the faithful replay.

    Args:
        tracer: Of that replay.
        samples: Of the reference execution; None where there is none to compare with.
        reference: The dtype of the reference.
        guard: Catches faults of what runs in backward.

    Attributes:
        outputs: What was measured, in order of execution.
        not_measured: How many ops of a name could not be run again.
        rerun: How many were.
        draws: Numbers of the scalars that tell how far random numbers lie apart.
        counts: Gradients that come are those of the loss.
    """

    def __init__(self, tracer: Tracer, samples: ReferenceSamples | None, reference: torch.dtype, guard: Guard) -> None:
        self._guard = guard
        self.numbers = Numbers()
        self.outputs: list[MeasuredOutput] = []
        self.not_measured: Counter[str] = Counter()
        self.rerun = 0
        self.draws: list[tuple[int, int]] = []
        self.counts = False
        self._positions = Positions(tracer)
        self._samples = samples
        self._reference = reference
        self._before: dict[int, Tensor] = {}
        self._written: list[Tensor] = []  # kept, so that an id stays that of its tensor
        self._awaited: list[_Awaited] = []

    def before(self, operator: Operator, args: Any, kwargs: Any) -> None:
        """See `OpListener`."""
        self.settle()
        self._written = operators.written_tensors(operator, args, kwargs)
        self._before = {id(each): each.detach().clone() for each in self._written}

    def after(self, executed: ExecutedCall, results: Sequence[Tensor], writers: Sequence[int]) -> None:
        """See `OpListener`."""
        self.settle()
        before, self._before = self._before, {}
        key = self._positions.of(executed, results)
        if audit_reference.draws_numbers(executed):
            self._compare_draws(results, self._samples.drawn(key) if self._samples is not None else [])
        elif any(map(_has_values, results)) and not audit_reference.only_reshapes(executed):
            concerned = audit_reference.concerns(executed, results, self._reference)
            wide = audit_reference.run_widened(executed, before, self._reference) if concerned else None
            if concerned:
                self._count(executed, wide, results)
            known = self._samples.of(key) if self._samples is not None else []
            for out, result in enumerate(results):
                if _has_values(result):
                    output = MeasuredOutput(
                        executed.seq,
                        out,
                        executed.site,
                        self._positions.micro_batch,
                        is_cast(executed, results),
                        tuple(writers),
                        key,
                        is_exact=not concerned,
                    )
                    self.outputs.append(output)
                    self._measure(output, result, _at(wide, out, result), _at(known, out))
        self._written = []

    def is_comparable(self, output: MeasuredOutput) -> bool:
        """Whether the reference step has the same op at the same place."""
        return self._samples is not None and self._samples.ran_as_often(output.key, self._positions)

    def settle(self) -> None:
        """Has backward tell the gradients of what the last op gave, to which autograd has given its history by now."""
        if self._awaited and not self._guard.broken:
            with self._guard:
                self._settle()

    def _settle(self) -> None:
        awaited, self._awaited = self._awaited, []
        for each in awaited:
            if each.tensor.grad_fn is not None:
                arrives = partial(self._arrives, each.output, each.error, each.drift)
                each.tensor.register_hook(arrives)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def release(self) -> None:
        """Lets go of every tensor."""
        self._awaited, self._written, self._before, self._samples = [], [], {}, None
        self.numbers = Numbers()

    def _count(self, executed: ExecutedCall, wide: list[Tensor] | None, results: Sequence[Tensor]) -> None:
        pairs = zip(wide or (), results, strict=False)
        fits = bool(wide) and all(each.shape == of.shape for each, of in pairs if _has_values(of))
        self.rerun += fits
        if not fits:
            self.not_measured[executed.operator.name] += 1

    def _measure(self, output: MeasuredOutput, result: Tensor, wide: Tensor | None, known: Tensor | None) -> None:
        """Takes the norms of all errors of an output.

        Args:
            output: Is told them.
            result: What the op gave.
            wide: What it gives in the reference dtype; None where that is not known.
            known: A sample of what the reference step has there; likewise.
        """
        error = drift = None
        if wide is not None:
            error, of = difference(result, wide)
            output.local = self._norms(error, of)
            error = error.to(torch.bfloat16)
        ours = sampled(result) if known is not None else None
        if known is not None and ours is not None and known.shape == ours.shape:
            reference = known.to(self._reference)
            output.total = self._norms(*difference(ours, reference))
            meant = sampled(wide) if wide is not None else ours if output.is_exact else None
            if meant is not None:
                drift, of = difference(meant.to(self._reference), reference)
                output.inherited = self._norms(drift, of)
        if error is not None or drift is not None:
            self._awaited.append(_Awaited(result, output, error, drift))

    def _norms(self, error: Tensor, of: Tensor) -> tuple[int, int]:
        return self.numbers.put(norm(error)), self.numbers.put(norm(of))

    def _compare_draws(self, results: Sequence[Tensor], known: Sequence[Tensor | None]) -> None:
        for out, result in enumerate(results):
            ours, theirs = sampled(result), _at(known, out)
            if ours is not None and theirs is not None and ours.shape == theirs.shape:
                ours, theirs = (each.to(precise(each.device)) for each in (ours, theirs))
                self.draws.append(self._norms(ours - theirs, theirs))

    def _arrives(self, output: MeasuredOutput, error: Tensor | None, drift: Tensor | None, gradient: Any) -> None:
        """The gradient of an output comes; None where it is zero."""
        is_known = isinstance(gradient, Tensor) and gradient.layout is torch.strided
        if self.counts and is_known and not self._guard.broken:
            with self._guard:
                self._arrived(output, error, drift, gradient)

    def _arrived(self, output: MeasuredOutput, error: Tensor | None, drift: Tensor | None, gradient: Tensor) -> None:
        past_dispatch, past_functions = torch_private.past_modes()
        with past_dispatch, past_functions, torch.no_grad():
            dtype = precise(gradient.device)
            if error is not None and error.shape == gradient.shape:
                products = gradient.to(dtype) * error
                numbers = self.numbers.put(products.sum()), self.numbers.put(products.square().sum())
                output.contributions += (numbers,)
            if drift is not None:
                of_sample = sample(gradient.detach(), SAMPLE)
                if of_sample.shape == drift.shape:
                    squares = self.numbers.put((of_sample.to(dtype) * drift).square().sum())
                    output.inherited_squares += ((squares, gradient.numel() / len(drift)),)


def same_draws(norms: list[float], draws: Sequence[tuple[int, int]]) -> bool:
    """Whether random numbers came out as in the reference, but for their rounding."""
    return all(norms[apart] <= _SAME_NUMBERS * norms[of] for apart, of in draws)


def _at(values: Sequence[Tensor | None] | None, out: int, like: Tensor | None = None) -> Tensor | None:
    """One of several outputs, if it is there and, where that is asked, has the shape of another."""
    value = values[out] if values is not None and out < len(values) else None
    return value if value is not None and (like is None or value.shape == like.shape) else None


def _has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds real floating-point numbers that can be compared."""
    is_real = tensor.dtype.is_floating_point
    return is_real and tensor.layout is torch.strided and not tensor.is_nested and tensor.numel() > 0


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
