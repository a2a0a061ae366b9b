"""The rows of a trace, one type a table; a field's annotation gives its Arrow type, the comment its unit and meaning.

`docs/trace-format.md` is made from these types and comments.
"""

from __future__ import annotations

from typing import NamedTuple

from ampscope.trace.schema.column_types import Counts, Float32, Int16, Int32, LineNumbers, Texts


class StepRow(NamedTuple):
    """One optimizer step attempt. ``step`` counts attempts of its optimizer from 0 over all segments of the run."""

    step: int
    optimizer: Int16
    segment: Int16  #: 0, and one more for each resume into the same folder
    time: float  #: unix time at the end of the step, seconds
    loss: float | None  #: mean of the unscaled losses that backward was called on
    scale: float | None  #: loss scale in use during the step; null without a scaler
    growth_tracker: Int32 | None
    found_inf: bool | None
    skipped: bool
    grad_norm: float | None  #: L2 norm of the unscaled gradients, before clipping
    lr: float | None  #: learning rate of the first parameter group when the step was attempted
    micro_batches: Int16  #: backward calls in the step
    duration_s: Float32
    observing_s: Float32  #: time AMPscope itself took within the step
    traced: str  #: a `Source`, or empty


class ScalerEventRow(NamedTuple):
    """One change of a ``GradScaler`` or one call to it."""

    step: int
    segment: Int16
    time: float
    scaler: Int16
    optimizer: Int16 | None
    action: str  #: `ScalerAction`
    scale_before: float | None
    scale_after: float | None
    growth_tracker: Int32 | None  #: after the event
    detail: str  #: JSON: the arguments of a setter, the constructor's, the loaded state
    file: str
    line: Int32
    function: str
    code: str


class ParamRow(NamedTuple):
    """A parameter or buffer of a watched model."""

    param: Int32
    kind: str  #: ``parameter`` or ``buffer``
    name: str  #: qualified name
    module: str  #: qualified name of the owner
    shape: str  #: ``512x64``
    dtype: str
    numel: int
    requires_grad: bool


class GradRow(NamedTuple):
    """A parameter's gradient at one step."""

    step: int
    optimizer: Int16
    param: Int32
    max_abs: Float32 | None  #: largest unscaled magnitude; null when it is not finite
    nonfinite: bool
    underflow: Float32 | None  #: share of elements that are exactly zero
    unchanged: Float32 | None = None  #: share of a half parameter's elements that the step left as they were, of those
    #: with a gradient (a sample)


class SiteRow(NamedTuple):
    """A program point: everything about an op that does not change from step to step."""

    site: Int32
    op: str  #: ATen overload (``aten.bmm.default``) or a `Node`
    name: str  #: for a `Node`: which input, parameter, buffer or gradient
    module: str
    module_type: str
    phase: str  #: `Phase`
    file: str
    line: Int32
    function: str
    code: str
    in_dtypes: Texts
    in_shapes: Texts  #: ``8x128x512``; empty for a scalar tensor
    out_dtypes: Texts
    out_shapes: Texts
    scalars: str  #: JSON object of the op's non-tensor arguments by name, e.g. ``{"eps": 1e-08}``
    autocast: str  #: dtype of the enclosing autocast region, empty outside
    cast: str  #: `Cast`
    grad_fn: str  #: in backward: the autograd node, e.g. ``SqrtBackward0``
    forward_site: Int32 | None  #: in backward: the site of the forward op


class OpRow(NamedTuple):
    """One output of one executed op (or one `Node`) of a traced step, with its statistics."""

    step: int
    source: str  #: `Source`
    seq: Int32  #: execution order within the traced step
    out: Int16  #: which output
    site: Int32
    micro_batch: Int16
    numel: int
    min: Float32 | None  #: NaN if any element is NaN; null when not measured
    max: Float32 | None
    nan: int | None  #: counts; measured in replays only
    posinf: int | None
    neginf: int | None
    zeros: int | None
    subnormals: int | None  #: non-zero elements below the dtype's smallest normal
    max_finite: Float32 | None  #: largest finite magnitude
    min_positive: Float32 | None  #: smallest non-zero magnitude
    exp_low: Int16 | None  #: base-2 exponent of the first bin of ``exp_counts``
    exp_counts: Counts | None  #: elements with ``2**e <= abs(x) < 2**(e+1)``, e = exp_low, exp_low + 1, ...


class EdgeRow(NamedTuple):
    """One dataflow edge of a traced step: an operand and the op that last wrote it."""

    step: int
    source: str
    seq: Int32  #: the consumer
    arg: Int16  #: position among the consumer's tensor operands
    from_seq: Int32
    from_out: Int16
    in_place: bool  #: the consumer overwrites this operand
    partial: bool  #: the operand is a part of what was written; its own statistics follow
    min: Float32 | None
    max: Float32 | None


class IncidentRow(NamedTuple):
    """A step that went wrong."""

    step: int
    optimizer: Int16
    segment: Int16
    time: float
    trigger: str  #: `Trigger`
    loss: float | None
    scale: float | None
    replay: str  #: `ReplayStatus`
    replay_reason: str  #: why the replay is not exact, in words
    replay_s: Float32
    bad_params: Texts  #: names of the parameters whose gradient, or whose new value, was not finite
    over_budget: bool  #: not replayed, because replays had used up their share of the run's time
    evidence: str  #: JSON: under ``rows``, of each input that was not finite, which rows; under ``ops``, for
    #: `Trigger.ABSORBED_OVERFLOW`, what gave the inf


class ReplayRow(NamedTuple):
    """A counterfactual replay of an incident's step: what was changed and what came out."""

    step: int
    optimizer: Int16
    segment: Int16
    time: float
    change: str  #: `Change`
    modules: Texts  #: those that ran in float32; ``(loss)`` for the code outside every module
    scale: float | None  #: the loss scale it ran with; null without a scaler
    outcome: str  #: `Trial`
    reason: str  #: why it could not be run, in words
    loss: float | None  #: mean of the unscaled losses
    seconds: Float32
    op_min: Float32 | None  #: what the op at the incident's origin gave this time; null where it did not run
    op_max: Float32 | None
    #: Lines that ask for a half dtype themselves and got another: one entry each, in the order they ran. Null where it
    #: was not recorded.
    conversion_files: Texts | None = None
    conversion_lines: LineNumbers | None = None
    conversion_codes: Texts | None = None


class FindingRow(NamedTuple):
    """Evidence of a usage mistake; analysis turns it into words."""

    step: int
    segment: Int16
    time: float
    cause: str  #: a ``misuse_...`` or ``half_params`` of `Cause`
    form: str  #: a `MistakeForm`, or empty
    file: str
    line: Int32
    function: str
    code: str
    evidence: str  #: JSON object of numbers: the scales ``was`` and ``starts``, or ``optimizer_steps``


class EventRow(NamedTuple):
    """An annotation on the run's time line."""

    step: int
    segment: Int16
    time: float
    kind: str  #: `EventKind`
    text: str
