"""The rows of a trace, one type a table; a field's annotation gives its Arrow type, the comment its unit and meaning.

A field without a comment means what the first field of that name means. ``docs/trace-format.md`` is made from these
types and comments by ``make docs``.
"""

from __future__ import annotations

import math
import types
import typing
from typing import Annotated, Any, NamedTuple

import pyarrow as pa

Int16 = Annotated[int, pa.int16()]
Int32 = Annotated[int, pa.int32()]
Float32 = Annotated[float, pa.float32()]
Texts = Annotated[tuple[str, ...], pa.list_(pa.string())]
Magnitudes = Annotated[tuple[float, ...], pa.list_(pa.float32())]
Counts = Annotated[tuple[int, ...], pa.list_(pa.int64())]
LineNumbers = Annotated[tuple[int, ...], pa.list_(pa.int32())]

_PLAIN_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


def arrow_field(name: str, annotation: Any) -> pa.Field:
    """The Arrow field of a column that is annotated so; ``X | None`` makes it nullable."""
    nullable = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (arg for arg in typing.get_args(annotation) if arg is not types.NoneType)
        nullable = True
    if typing.get_origin(annotation) is Annotated:
        return pa.field(name, annotation.__metadata__[0], nullable)
    return pa.field(name, _PLAIN_TYPES[annotation], nullable)


class StepRow(NamedTuple):
    """One optimizer step attempt."""

    step: int  #: counts the attempts of its optimizer from 0, over all segments of the run
    optimizer: Int16  #: number of the optimizer, in the order in which they first stepped
    segment: Int16  #: 0, and one more for each resume into the same folder
    time: float  #: unix time at the end of the step, seconds
    loss: float | None  #: mean of the unscaled losses that backward was called on
    scale: float | None  #: loss scale in use during the step; null without a scaler
    growth_tracker: Int32 | None  #: finite steps in a row since the scale last changed; null without a scaler
    found_inf: bool | None  #: whether the scaler found a gradient that is not finite; null without a scaler
    skipped: bool  #: whether the weights were left as they were
    grad_norm: float | None  #: L2 norm of the unscaled gradients, before clipping
    lr: float | None  #: learning rate of the first parameter group when the step was attempted
    micro_batches: Int16  #: backward calls in the step
    duration_s: Float32  #: seconds from the first forward of the step to its end
    observing_s: Float32  #: seconds that AMPscope itself took within the step
    traced: str  #: a `Source`, or empty
    averaged: Int32 | None = None  #: of an old step that the disk budget has left without values of its own (``loss``,
    #: ``grad_norm`` and ``lr`` are null): over how many steps its durations are the mean; ``time`` is a later one's
    lrs: str | None = None  #: JSON object: the learning rate of each of the first 64 parameter groups by its number,
    #: from 0, and its ``name`` where it has one, as ``"1 head"``; null where all have that of the first
    clipped_grad_norm: float | None = None  #: L2 norm of what the optimizer was given, where the loop was seen to have
    #: clipped or changed its unscaled gradients; null where it was not


class ScalerEventRow(NamedTuple):
    """One change of a ``GradScaler`` or one call to it."""

    step: int  #: the step attempt during or before which it happened
    segment: Int16
    time: float  #: unix time, seconds
    scaler: Int16  #: number of the scaler
    optimizer: Int16 | None  #: the optimizer concerned; null where it is none or all of them
    action: str  #: `ScalerAction`
    scale_before: float | None  #: loss scale; null where it is not known
    scale_after: float | None  #: loss scale; null where it is not known
    growth_tracker: Int32 | None  #: after the event
    detail: str  #: JSON: the arguments of a setter, the constructor's, the loaded state
    file: str  #: of the user's line that led there, relative to the working directory; empty when unknown
    line: Int32  #: its number, from 1
    function: str  #: the qualified name of its function
    code: str  #: its text, stripped


class ParamRow(NamedTuple):
    """A parameter or buffer of a watched model."""

    param: Int32  #: number of the parameter or buffer
    kind: str  #: `Node.PARAMETER` or `Node.BUFFER`
    name: str  #: qualified name
    module: str  #: qualified name of the owner
    shape: str  #: ``512x64``
    dtype: str  #: torch's name, e.g. ``float16``
    numel: int  #: elements
    requires_grad: bool  #: whether it is trained


class GradRow(NamedTuple):
    """A parameter's gradient at one step."""

    step: int
    optimizer: Int16
    param: Int32  #: the parameter: ``params.param``
    max_abs: Float32 | None  #: largest unscaled magnitude; null when it is not finite
    nonfinite: bool  #: whether any element is inf or NaN
    underflow: Float32 | None  #: share of elements that are exactly zero
    unchanged: Float32 | None = None  #: share of a half parameter's elements that the step left as they were, of those
    #: with a gradient (a sample)


class SiteRow(NamedTuple):
    """A program point: everything about an op that does not change from step to step."""

    site: Int32  #: number of the program point
    op: str  #: ATen overload (``aten.bmm.default``) or a `Node`
    name: str  #: for a `Node`: which input, parameter, buffer or gradient
    module: str  #: qualified name of the module that ran it; empty for the model itself and outside every model
    module_type: str  #: class name of the module; empty outside every watched module
    phase: str  #: `Phase`
    file: str
    line: Int32
    function: str
    code: str
    in_dtypes: Texts  #: of each tensor operand, in order
    in_shapes: Texts  #: ``8x128x512``; empty for a scalar tensor
    out_dtypes: Texts  #: of each output
    out_shapes: Texts  #: of each output
    scalars: str  #: JSON object of the op's non-tensor arguments by name, e.g. ``{"eps": 1e-08}``; of one that
    #: communicates: ``group``, ``group_size``, ``rank`` (this one's place), ``ranks`` (not all), ``reduce``, ``root``
    autocast: str  #: dtype of the enclosing autocast region, empty outside
    cast: str  #: `Cast`
    grad_fn: str  #: in backward: the autograd node, e.g. ``SqrtBackward0``
    forward_site: Int32 | None  #: in backward: the site of the forward op


#: Elements that share a scale in an MX format.
BLOCK = 32
#: Powers of two below the largest of a block that are told apart, what lies farther with the last: a format of blocks
#: flushes all that lies 34 below.
BLOCK_FALLS = 40
#: How many of a tensor's largest magnitudes are recorded one by one.
TOP_VALUES = 16


class Statistics(NamedTuple):
    """Holds the statistics of a tensor's values; null where not measured. Each is a column of the table that holds it.

    Written out here and nowhere else: to add one, declare it here, measure it in `ampscope.capture.tracing.statistics`
    and show it where a person wants to see it.
    """

    min: Float32 | None = None  #: NaN if any element is NaN; null when not measured. Of complex numbers, the least
    #: of all real and imaginary parts; a finite number beyond float32's range is kept as its end
    max: Float32 | None = None  #: as ``min``
    nan: int | None = None  #: counts of elements, also of complex ones; this and what follows is measured in replays,
    #: and in sampled healthy steps of some tensors
    posinf: int | None = None  #: how many elements are +inf
    neginf: int | None = None  #: how many elements are -inf
    zeros: int | None = None  #: how many elements are exactly zero
    subnormals: int | None = None  #: non-zero elements below the dtype's smallest normal
    max_finite: Float32 | None = None  #: largest finite magnitude
    min_positive: Float32 | None = None  #: smallest non-zero magnitude
    exp_low: Int16 | None = None  #: base-2 exponent of the first bin of ``exp_counts``
    exp_counts: Counts | None = None  #: elements with ``2**e <= abs(x) < 2**(e+1)``, e = exp_low, exp_low + 1, ...;
    #: a complex element counts half for each of its parts
    top_values: Magnitudes | None = None  #: the largest finite magnitudes, descending, at most 16: of tensors of at
    #: most 4,096 elements, in sampled healthy steps; null elsewhere
    block_falls: Counts | None = None  #: elements that are not zero, by how many powers of two they lie below the
    #: largest of the 32 beside each other (in the order of elements) that they are among: 0, 1, 2, ...; in such steps
    flushed: int | None = None  #: how many elements are zero though the same op, given the same, is not in float32; of
    #: results in half precision, in such steps; null of ops of which that is not known, as products of matrices

    @property
    def finite(self) -> bool | None:
        """Whether every element is finite; None when not measured."""
        if self.min is None or self.max is None:
            return None
        return math.isfinite(self.min) and math.isfinite(self.max)


UNMEASURED = Statistics()


class OpRow(NamedTuple):
    """One output of one executed op (or one `Node`) of a traced step, with its statistics."""

    step: int
    source: str  #: a `Source`; for another optimizer than the first with its number, as ``replay@1``
    seq: Int32  #: execution order within the traced step
    out: Int16  #: which output
    site: Int32  #: the program point: ``sites.site``
    micro_batch: Int16  #: which backward of the step it led to, or belongs to, from 0
    numel: int  #: elements of the output
    checksum: int | None = None  #: sum of the elements' bits, of what came into the step from outside and of random
    #: numbers: where two executions of a step have the same, they were given the same; null for everything else
    statistics: Statistics = UNMEASURED

    @property
    def min(self) -> float | None:
        """The smallest element; NaN if any is NaN."""
        return self.statistics.min

    @property
    def max(self) -> float | None:
        """The largest element; NaN if any is NaN."""
        return self.statistics.max


class EdgeRow(NamedTuple):
    """One dataflow edge of a traced step: an operand and the op that last wrote it."""

    step: int
    source: str
    seq: Int32  #: the consumer: ``ops.seq``
    arg: Int16  #: position among the consumer's tensor operands
    from_seq: Int32  #: the op that wrote the operand: ``ops.seq``
    from_out: Int16  #: which of its outputs: ``ops.out``
    in_place: bool  #: the consumer overwrites this operand
    partial: bool  #: the operand is a part of what was written; its own statistics follow
    min: Float32 | None  #: of a partial operand: smallest element, NaN if any is NaN; null when not measured
    max: Float32 | None  #: as ``min``


class IncidentRow(NamedTuple):
    """A step that went wrong."""

    step: int  #: the step attempt that went wrong
    optimizer: Int16
    segment: Int16
    time: float  #: unix time, seconds
    trigger: str  #: `Trigger`
    loss: float | None
    scale: float | None
    replay: str  #: `ReplayStatus`
    replay_reason: str  #: why the replay is not exact, in words
    replay_s: Float32  #: seconds that the faithful replay took
    bad_params: Texts  #: names of the parameters whose gradient, or whose new value, was not finite; or whose
    #: gradient lost its mass
    over_budget: bool  #: not replayed, because replays had used up their share of the run's time
    evidence: str  #: JSON, in which a key is left out where nothing of it was seen: under ``rows``, of each input that
    #: was not finite, which rows; under ``compiled``,
    #: whether `torch.compile` was in use; under ``called_from``, the user's lines that call the models (``file``,
    #: ``line``, ``function``, ``code``), the dtype of the ``autocast`` region there, empty outside, and how many
    #: ``tensors`` the call returned, one or a tuple of them, 0 for anything else; under ``made_before``, of each input
    #: that the loop computes before the step, unheard, the ``calls`` (``name``, ``dtype``, line)
    #: that made it at the earlier ``step`` given there; under ``ops``,
    #: for `Trigger.ABSORBED_OVERFLOW`, the ``ops.seq`` of what gave the inf, and under ``hidden``, where the code
    #: itself took it for a number, pairs of those with the ``ops.seq`` of what did; ``gradients_apart`` and
    #: ``loss_apart`` are then the distances from float32, as shares of what that has; under ``lost``, for
    #: `Trigger.LOST_GRADIENT`, of each parameter the share of its gradient's mass that is missing; under ``exception``,
    #: for `Trigger.EXCEPTION`, what is known of the call that raised; under ``distinct``, for
    #: `Trigger.INFORMATION_LOST`, by the ``ops.seq`` of each cast how many different values a sample of its operand
    #: has, and how many that of its result, and under ``changed`` how many of its elements are another number after
    #: it, and how many there are; under ``cast_before`` of those that came from a cast before the step, that
    #: cast and the first step that read such values; under ``in_float32``, for `Trigger.NONFINITE_CARRIED`, the `Trial`
    #: of the same calls in float32


class ReplayRow(NamedTuple):
    """A counterfactual replay of an incident's step: what was changed and what came out."""

    step: int
    optimizer: Int16
    segment: Int16
    time: float  #: unix time, seconds
    change: str  #: `Change`
    modules: Texts  #: those that ran in float32; ``(loss)`` for the code outside every module
    scale: float | None  #: the loss scale it ran with; null without a scaler
    outcome: str  #: `Trial`
    reason: str  #: why it could not be run, in words
    loss: float | None  #: mean of the unscaled losses
    seconds: Float32  #: how long it took
    op_min: Float32 | None  #: what the op at the incident's origin gave this time; null where it did not run
    op_max: Float32 | None  #: as ``op_min``
    conversion_files: Texts | None = None  #: of each line that asks for a half dtype itself and got another, in the
    #: order they ran, its file; null where that was not recorded
    conversion_lines: LineNumbers | None = None  #: their numbers
    conversion_codes: Texts | None = None  #: their texts, stripped
    form: str | None = None  #: `Form`, where ``change`` is ``form``; null elsewhere, as in the other columns of a form
    form_call: str | None = None  #: the torch function in whose place it stood, as code spells it: ``log``, ``div``
    form_file: str | None = None  #: of the user's line that calls it
    form_line: Int32 | None = None  #: its number
    form_function: str | None = None  #: the function that it is in
    form_code: str | None = None  #: its text, stripped
    form_argument: Int16 | None = None  #: the operand that was changed; 0 is the first, of a method the tensor itself
    form_value: float | None = None  #: the number that went in
    form_was: float | None = None  #: the number that stood there; null where none did
    good_change: Float32 | None = None  #: largest relative change of what the call gave where it was finite before, in
    #: units of its dtype's eps; null where it was not measured
    extra_time: Float32 | None = None  #: what the change adds to the step's duration, as a share; null: not measured
    extra_bytes: int | None = None  #: bytes that the step's ops write more; null where it was not measured
    followed: int | None = None  #: later bad steps that the same change made finite


class FindingRow(NamedTuple):
    """Evidence of a usage mistake; analysis turns it into words."""

    step: int  #: the step attempt in which it was first seen
    segment: Int16
    time: float  #: unix time, seconds
    cause: str  #: a usage mistake of `Cause`: ``misuse_...``, ``half_params``, ``nothing_trains`` and others
    form: str  #: a `MistakeForm`, or empty
    file: str
    line: Int32
    function: str
    code: str
    evidence: str  #: JSON object: the scales ``was`` and ``starts``, or ``optimizer_steps``; ``kept_by``, the line that
    #: made of scaled gradients what an earlier iteration has kept; ``framework``, the one that unscales and steps for
    #: the user, where one does; ``parameters`` (the first) and their ``count``, ``attempts``, whether it ``learns``;
    #: ``ranks``; the ``device`` of a region, and of the ``tensors``, and whether the ``scaler_is_off``; how many of an
    #: optimizer's parameters are ``half``, ``of`` how many, and whether they were ``cast`` since the scaler took them


class EventRow(NamedTuple):
    """An annotation on the run's time line."""

    step: int  #: the step attempt during or before which it happened
    segment: Int16
    time: float  #: unix time, seconds
    kind: str  #: `EventKind`
    text: str  #: what it says; for ``traced``, a `Source`; for ``spike``, ``cure`` and ``cure_lifted``, JSON; for
    #: ``start`` and ``resume``, torch's version


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
