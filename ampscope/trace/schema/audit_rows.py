"""The rows of audits; see `ampscope.trace.schema.rows` for how a row type is written."""

from __future__ import annotations

from typing import NamedTuple

from ampscope.trace.schema.column_types import Float32, Int16, Int32, Texts


class AuditRow(NamedTuple):
    """An audit of a healthy step: it was run again as it was, and in a wider dtype, and its ops were compared."""

    step: int
    optimizer: Int16
    segment: Int16
    time: float  #: unix time, seconds
    dtype: str  #: the wider dtype, the reference: ``float32`` or ``float64``
    status: str  #: `AuditStatus`
    reason: str  #: why it is not all there, or in what the replay differs from the step, in words
    source: str  #: of its op rows: a `Source`; empty where it could not be made
    loss: float | None  #: sum of the unscaled losses that backward was called on; null where one has several elements
    reference_loss: float | None  #: the same in the reference dtype
    explained: float | None  #: sum of what the ops contribute to the loss's error, to first order; not of values
    #: that ask for no gradient, as the batch by its own cast
    ops: Int32  #: how many ops were run again, each on its own operands
    not_measured: Int32  #: how many could not be
    not_measured_ops: Texts  #: the names of those
    seconds: Float32  #: how long it took


class AuditOpRow(NamedTuple):
    """One output of one op of an audited step: the error that the op made, and the one that it inherited.

    Errors are relative, the norm of the difference over that of the reference; null where not known. Elements in the
    outer half of their dtype's range, which stand for masks, are left out.
    """

    step: int
    source: str  #: a `Source`: with ``seq`` and ``out`` the row of ``ops``
    seq: Int32  #: execution order within the traced step
    out: Int16  #: which output
    site: Int32  #: the program point: ``sites.site``; of a parameter's gradient a `Node.GRADIENT`
    micro_batch: Int16  #: which backward of the step it led to, or belongs to, from 0
    local: Float32 | None  #: the op's own: its output against what the reference dtype gives on the same operands; of
    #: a parameter's gradient, that of the op which made it
    inherited: Float32 | None  #: that result against the one of the reference step; of a sample of the elements
    total: Float32 | None  #: its output against the reference step's; of the same sample
    operand_error: Float32 | None  #: the largest ``total`` of its operands; of a cast's result its ``local``, if larger
    contribution: float | None  #: what its own error adds to the loss, to first order: the product of error and
    #: gradient, summed; null of what has no gradient
    spread: float | None  #: the same, had each element's error a random sign: the root of the sum of squares
    inherited_spread: float | None  #: likewise, of the error that it inherited, by the sample
