"""The one place where a run's record is defined: tables, columns, units and enumerations.

A table is a ``NamedTuple`` row type; its Arrow schema is derived from the annotations, so a column is named exactly
once. Everything that writes or reads a trace goes through these types. Raise `SCHEMA_VERSION` when a column changes
its meaning or disappears; adding a nullable column does not need it.
"""

from __future__ import annotations

import types
import typing
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, NamedTuple

import pyarrow as pa

SCHEMA_VERSION = 1
MANIFEST = "run.json"

Int16 = Annotated[int, pa.int16()]
Int32 = Annotated[int, pa.int32()]
Float32 = Annotated[float, pa.float32()]
Texts = Annotated[tuple[str, ...], pa.list_(pa.string())]
Counts = Annotated[tuple[int, ...], pa.list_(pa.int64())]


class Phase(StrEnum):
    """In which part of an optimizer step an op ran."""

    FORWARD = "forward"  #: inside a watched module
    LOSS = "loss"  #: outside every watched module, before backward
    BACKWARD = "backward"
    RECOMPUTE = "recompute"  #: forward code run again inside backward by activation checkpointing
    OPTIMIZER = "optimizer"


class Node(StrEnum):
    """Pseudo-ops: where values enter a traced step and where they leave it (``sites.op``)."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    LOSS = "loss"
    GRADIENT = "gradient"
    WEIGHT_AFTER = "weight_after"  #: a parameter as the optimizer left it
    BUFFER_AFTER = "buffer_after"  #: a buffer as the step left it


#: Nodes that no op of the step wrote.
ENTRY_NODES = frozenset({Node.INPUT, Node.PARAMETER, Node.BUFFER})
#: Nodes from which the walk back to the origin starts.
SINK_NODES = frozenset({Node.LOSS, Node.GRADIENT, Node.WEIGHT_AFTER, Node.BUFFER_AFTER})


class Cast(StrEnum):
    """Why an op that only changes the dtype ran."""

    NONE = ""
    AUTOCAST = "autocast"  #: inserted by autocast (or its mirror in backward)
    EXPLICIT = "explicit"  #: asked for by a conversion such as ``.float()``
    PROMOTION = "promotion"  #: type promotion between operands, or an op's own conversion


class Source(StrEnum):
    """Which execution of a step the op rows describe; see `source_of` for runs with several optimizers."""

    LIVE = "live"
    REPLAY = "replay"
    REPLAY_FP32 = "replay:fp32"  #: everything in float32; only extremes are measured


def source_of(execution: Source, optimizer: int) -> str:
    """What the op rows of one optimizer's attempt say in ``source``.

    Every optimizer counts its own steps, so those of a GAN share their numbers: ``replay`` is that of the first
    optimizer, ``replay@1`` that of the second.
    """
    return f"{execution}@{optimizer}" if optimizer else str(execution)


class ReplayStatus(StrEnum):
    """How far the replay of an incident can be trusted."""

    EXACT = "exact"
    DIVERGED = "diverged"
    NOT_REPRODUCED = "not_reproduced"
    UNAVAILABLE = "unavailable"


class Change(StrEnum):
    """What a counterfactual replay did otherwise than the real step (``replays.change``)."""

    NONE = "none"  #: nothing: the same once more
    FP32 = "fp32"  #: every half-precision computation in float32
    BF16 = "bf16"  #: bfloat16 in place of float16
    SCALE = "scale"  #: another loss scale
    MODULES_FP32 = "modules_fp32"  #: the named modules in float32, the rest as it was
    CONVERSIONS = "conversions"  #: float32 where the code itself converts to a half dtype, autocast as it was


class Trial(StrEnum):
    """What came out of a counterfactual replay (``replays.outcome``)."""

    FINITE = "finite"  #: loss and gradients were finite: the change cures the step
    NONFINITE = "nonfinite"  #: tried, and did not help
    UNAVAILABLE = "unavailable"  #: could not be run


class Trigger(StrEnum):
    """What made a step an incident."""

    NONFINITE_GRADIENT = "nonfinite_gradient"
    NONFINITE_LOSS = "nonfinite_loss"
    NONFINITE_WEIGHT = "nonfinite_weight"
    NONFINITE_BUFFER = "nonfinite_buffer"
    ABSORBED_OVERFLOW = "absorbed_overflow"  #: an inf that vanished again before loss and gradients


class ScalerAction(StrEnum):
    """What happened to a ``GradScaler`` (``scaler_events.action``)."""

    INIT = "init"
    GROWTH = "growth"
    BACKOFF = "backoff"
    SKIP = "skip"
    UNSCALE = "unscale"
    UPDATE = "update"  #: ``update(new_scale)`` by hand
    STATE_SAVED = "state_saved"
    STATE_LOADED = "state_loaded"
    SETTER = "setter"  #: ``set_growth_factor`` and its kin; ``detail`` says which


class EventKind(StrEnum):
    """Annotations on a run's time line (``events.kind``)."""

    START = "start"
    RESUME = "resume"
    TRACED = "traced"
    NOTE = "note"
    WARNING = "warning"  #: a part of AMPscope switched itself off
    CLOSE = "close"


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
    evidence: str  #: JSON, e.g. ``{"params": ["fc1.weight"]}``


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
    conversions: Texts | None = None  #: lines that ask for a half dtype themselves and got another: ``train.py:8 code``


class FindingRow(NamedTuple):
    """Evidence of a usage mistake; analysis turns it into words."""

    step: int
    segment: Int16
    time: float
    cause: str  #: a ``misuse_...`` or ``half_params`` of `Cause`
    file: str
    line: Int32
    function: str
    code: str
    evidence: str  #: JSON


class EventRow(NamedTuple):
    """An annotation on the run's time line."""

    step: int
    segment: Int16
    time: float
    kind: str  #: `EventKind`
    text: str


class Table(StrEnum):
    """The tables of a trace; the value is the folder's name."""

    STEPS = "steps"
    SCALER_EVENTS = "scaler_events"
    PARAMS = "params"
    GRADS = "grads"
    SITES = "sites"
    OPS = "ops"
    EDGES = "edges"
    INCIDENTS = "incidents"
    REPLAYS = "replays"
    FINDINGS = "findings"
    EVENTS = "events"


Row = (
    StepRow
    | ScalerEventRow
    | ParamRow
    | GradRow
    | SiteRow
    | OpRow
    | EdgeRow
    | IncidentRow
    | ReplayRow
    | FindingRow
    | EventRow
)

ROW_TYPES: dict[Table, type[Row]] = {
    Table.STEPS: StepRow,
    Table.SCALER_EVENTS: ScalerEventRow,
    Table.PARAMS: ParamRow,
    Table.GRADS: GradRow,
    Table.SITES: SiteRow,
    Table.OPS: OpRow,
    Table.EDGES: EdgeRow,
    Table.INCIDENTS: IncidentRow,
    Table.REPLAYS: ReplayRow,
    Table.FINDINGS: FindingRow,
    Table.EVENTS: EventRow,
}

#: Stands in ``replays.modules`` for the code outside every watched module.
LOSS_CODE = "(loss)"

#: Tables that the disk budget may shorten, oldest parts first. Everything else is kept.
BULK_TABLES = (Table.OPS, Table.EDGES, Table.GRADS)

_PLAIN_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


def _field(name: str, hint: Any) -> pa.Field:
    nullable = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
        nullable = True
    if typing.get_origin(hint) is Annotated:
        return pa.field(name, hint.__metadata__[0], nullable)
    return pa.field(name, _PLAIN_TYPES[hint], nullable)


@cache
def arrow_schema(table: Table) -> pa.Schema:
    """The Arrow schema of ``table``, derived from its row type."""
    hints = typing.get_type_hints(ROW_TYPES[table], include_extras=True)
    return pa.schema([_field(name, hint) for name, hint in hints.items()])
