"""An audit tells what a healthy step's layers lose by their dtypes, how the loss's error divides, and what helps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ampscope.analysis.precision.op_losses import (
    BACKWARD_CODE,
    OpLoss,
    Origins,
    PrecisionLoss,
    leaves_out,
    op_losses,
    unit,
    weight,
)
from ampscope.analysis.words import op_in_words
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.dtypes import FINFO
from ampscope.trace.read.run import Run
from ampscope.trace.schema import LOSS_CODE, AuditOpRow, AuditRow, AuditStatus, Node, SiteRow, Table

#: The gravest first.
_GRAVITY = (PrecisionLoss.CANCELS, PrecisionLoss.COARSE, PrecisionLoss.ROUNDS, PrecisionLoss.NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoss:
    """Describes the rounding loss of a module in the step, without the modules inside it."""

    module: str  #: empty for the model itself; ``(loss)`` for the code outside every module, with its backward, and
    #: ``(backward)`` for what backward does for none
    module_type: str
    kind: PrecisionLoss  #: the gravest of its ops'
    moves_loss: float  #: by how much the errors may move the loss that it makes, and those that it lets through by
    #: cancelling, whatever their signs
    contribution: float | None  #: what its own errors add to the loss, to first order
    share: float | None  #: of what all ops add; negative where it takes away
    absolute: float  #: the sum of its ops' contributions, each without its sign
    worst: OpLoss | None  #: of its ops, the one that lost most; of those of the gravest kind
    gradient: str = ""  #: of its parameters, the one whose gradient is farthest from the reference's
    gradient_error: float | None = None  #: how far
    gradient_local: float | None = None  #: the own error of the op that made it


def layer_losses(
    ops: Sequence[OpLoss], rows: Iterable[AuditOpRow], sites: Mapping[int, SiteRow]
) -> tuple[LayerLoss, ...]:
    """The layers of a step, those that lost most first.

    Args:
        ops: What its ops lost.
        rows: Its rows, for the gradients of its parameters.
        sites: The program points of its rank, by number.
    """
    by_layer: dict[str, list[OpLoss]] = {}
    for op in ops:
        by_layer.setdefault(op.layer, []).append(op)
    gradients = _gradients(rows, sites)
    explained = math.fsum(op.contribution for op in ops if op.contribution is not None)
    found = [_layer(name, each, gradients.get(name), explained) for name, each in by_layer.items()]
    return tuple(sorted(found, key=lambda each: (-each.moves_loss, _GRAVITY.index(each.kind))))


def _layer(name: str, ops: Sequence[OpLoss], gradient: tuple[str, AuditOpRow] | None, explained: float) -> LayerLoss:
    known = [op.contribution for op in ops if op.contribution is not None]
    contribution = math.fsum(known) if known else None
    kind = min((op.kind for op in ops), key=_GRAVITY.index)
    alike = [op for op in ops if op.kind is kind]
    worst = max(alike, key=lambda op: (weight(op.rounding, op.cancelled), op.local or 0.0))
    return LayerLoss(
        module=name,
        module_type=worst.module_type,
        kind=kind,
        moves_loss=weight(*(part for op in ops for part in (op.rounding, op.cancelled))),
        contribution=contribution,
        share=contribution / explained if contribution is not None and explained else None,
        absolute=math.fsum(map(abs, known)),
        worst=worst,
        gradient=gradient[0] if gradient is not None else "",
        gradient_error=gradient[1].total if gradient is not None else None,
        gradient_local=gradient[1].local if gradient is not None else None,
    )


def _gradients(rows: Iterable[AuditOpRow], sites: Mapping[int, SiteRow]) -> dict[str, tuple[str, AuditOpRow]]:
    """By module, the parameter whose gradient is farthest from the reference's."""
    found: dict[str, tuple[str, AuditOpRow]] = {}
    for row in rows:
        site = sites.get(row.site)
        if site is None or site.op != Node.GRADIENT or row.total is None:
            continue
        before = found.get(site.module)
        if before is None or row.total > (before[1].total or 0.0):
            found[site.module] = site.name, row
    return found


#: What stands out beside what every op does.
GRAVE = (PrecisionLoss.CANCELS, PrecisionLoss.COARSE)
#: Layers that are no modules.
_OUTSIDE = {
    "": "The model's own forward",
    LOSS_CODE: "The code of the loss",
    BACKWARD_CODE: "Backward outside the layers",
}


def unavailable(reason: str) -> str:
    """States why a step could not be audited."""
    return f"The step could not be audited: {reason}."


def sentence(layers: Sequence[LayerLoss], before: Sequence[str], coarsest: str, measured: int, unknown: int) -> str:
    """States which layer loses most to rounding, and how.

    Args:
        layers: Those that lost most first.
        before: Where its worst op cancels, the layers in which its operands were last rounded.
        coarsest: The coarsest dtype in the step; empty where nothing was rounded.
        measured: How many ops the audit measured, whether or not their rows are still there.
        unknown: And how many it could not.
    """
    if not layers and measured:
        return "The rows of the step's ops are missing from the run: which layer loses what is not known."
    if not layers or not coarsest:
        if unknown:
            return "Nothing that could be measured in the step is rounded to less than the reference."
        return "Nothing in the step is rounded to less than the reference: there is nothing to lose."
    first = layers[0]
    if first.kind in GRAVE and first.worst is not None:
        return f"{in_words(first)} loses most: {_how(first.worst, first.module, before)}"
    most = f"{in_words(first)} moves the loss most." if first.moves_loss else ""
    grave = next((each for each in layers if each.kind in GRAVE), None)
    if grave is None or grave.worst is None:
        return f"No layer stands out: every op rounds as {coarsest} must. {most}".strip()
    return f"{most} Less for the loss, in {_inside(grave)}: {_how(grave.worst, grave.module, ())}".strip()


def code(layers: Sequence[LayerLoss], before: Sequence[str]) -> str:
    """Returns code that keeps in float32 the layer that loses most, and those whose results cancel in it."""
    if not layers or layers[0].kind not in GRAVE:
        return ""
    names = [name for name in dict.fromkeys([layers[0].module, *before]) if name not in _OUTSIDE]
    listed = ", ".join('"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"' for name in names)
    return f"ampscope.keep_fp32(model, [{listed}])" if names else ""


def in_words(layer: LayerLoss) -> str:
    """A layer at the beginning of a sentence."""
    return _OUTSIDE.get(layer.module, layer.module)


def _inside(layer: LayerLoss) -> str:
    return in_words(layer)[:1].lower() + in_words(layer)[1:] if layer.module in _OUTSIDE else layer.module


def _how(op: OpLoss, layer: str, before: Sequence[str]) -> str:
    where = f" at {op.source.file}:{op.source.line}" if op.source is not None else ""
    name = f"{op_in_words(op.op)}{where}"
    if op.kind is PrecisionLoss.CANCELS:
        elsewhere = [each for each in before if each != layer]
        rounded = f", rounded in {' and '.join(elsewhere[:3])}," if elsewhere else ""
        return (
            f"the terms of {name} nearly cancel, and their error{rounded} grows from {share(op.operand_error)} "
            f"to {share(op.inherited)} of what is left."
        )
    times = (op.local or 0.0) / (unit(op.dtypes) or 1.0)
    return (
        f"{name} is off by {share(op.local)} on its own operands, {times:,.0f} times what one rounding to "
        f"{max(op.dtypes, key=lambda each: unit([each]))} takes."
    )


def share(error: float | None) -> str:
    """A relative error, as a percentage with two digits."""
    if error is None:
        return "an unknown share"
    percent = 100 * error
    return f"{percent:,.0f} %" if percent >= 10 else f"{percent:.2g} %"


#: Of the ops of a step, so many are told, those that lost most first.
MOST_OPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedStep:
    """An audit that was made, or that could not be."""

    step: int
    optimizer: int
    dtype: str  #: what it was compared with
    status: str  #: an `AuditStatus`
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport(NotebookRepr):
    """The audit of one step; no step where a run has none.

    It has many attributes because it is all that any view shows of an audit, and the JSON of one.
    """

    rank: int = 0
    audited: tuple[AuditedStep, ...] = ()  #: all audits of the rank, in the order in which they were made
    step: int | None = None
    optimizer: int = 0
    source: str = ""  #: of its op rows
    dtype: str = ""  #: the reference
    status: str = ""  #: an `AuditStatus`
    reason: str = ""  #: why it is not all there, or in what the replay differs from the step
    sentence: str = ""  #: what it says
    code: str = ""  #: what to paste; empty where nothing stands out, or where no module can be named
    computes_in: str = ""  #: the coarsest dtype in the step
    loss: float | None = None
    reference_loss: float | None = None
    loss_error: float | None = None  #: the difference
    explained: float | None = None  #: of it, what the ops add by their own errors, to first order
    leaves_out: bool = False  #: not what is lost of values that ask for no gradient, as of the batch by its cast
    in_float8: bool = False  #: some ops, also in the reference: the loss's error is without what that loses
    rows_missing: bool = False  #: some ops that were measured have no row in the run
    measured: int = 0  #: ops that were run again on their own operands
    not_measured: int = 0  #: and those that could not be
    not_measured_ops: tuple[str, ...] = ()
    rounded_in: tuple[str, ...] = ()  #: where the worst op cancels, the layers in which its operands were last rounded
    layers: tuple[LayerLoss, ...] = ()  #: those that lost most first
    ops: tuple[OpLoss, ...] = ()  #: likewise, the first of them
    seconds: float = 0.0  #: how long it took


def audit(run: Run, *, step: int | None = None, rank: int | None = None) -> AuditReport | None:
    """Returns the results of one audit of a run.

    Args:
        run: The run.
        step: Which; by default the newest that could be made.
        rank: Whose; by default the first that was audited.

    Returns:
        None where that step was not audited.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    if rank is None:
        rank = next((each for each in run.ranks if run.stamp(Table.AUDITS, rank=each)), min(run.ranks, default=0))
    rows = run.rows(Table.AUDITS, rank=rank)
    audited = tuple(
        AuditedStep(step=row.step, optimizer=row.optimizer, dtype=row.dtype, status=row.status, reason=row.reason)
        for row in rows
    )
    if not rows and step is None:
        return AuditReport(rank=rank)
    chosen = _chosen(rows, step)
    return None if chosen is None else _of(run, rank, chosen, audited)


def _chosen(rows: Sequence[AuditRow], step: int | None) -> AuditRow | None:
    asked = [row for row in rows if step is None or row.step == step]
    made = [row for row in asked if row.status != AuditStatus.UNAVAILABLE]
    return next(reversed(made or asked), None)


def _of(run: Run, rank: int, row: AuditRow, audited: tuple[AuditedStep, ...]) -> AuditReport:
    known = row.loss is not None and row.reference_loss is not None
    found = AuditReport(
        rank=rank,
        audited=audited,
        step=row.step,
        optimizer=row.optimizer,
        source=row.source,
        dtype=row.dtype,
        status=row.status,
        reason=row.reason,
        loss=row.loss,
        reference_loss=row.reference_loss,
        loss_error=(row.loss or 0.0) - (row.reference_loss or 0.0) if known else None,
        explained=row.explained,
        measured=row.ops,
        not_measured=row.not_measured,
        not_measured_ops=tuple(row.not_measured_ops),
        seconds=row.seconds,
    )
    if row.status == AuditStatus.UNAVAILABLE:
        return replace(found, sentence=unavailable(row.reason))
    sites = {site.site: site for site in run.rows(Table.SITES, rank=rank)}
    of_ops = run.rows(Table.AUDIT_OPS, step=row.step, source=row.source, rank=rank)
    origins = Origins(of_ops, lambda: run.rows(Table.EDGES, step=row.step, source=row.source, rank=rank), sites)
    missing = row.ops > len({each.seq for each in of_ops if each.site in sites})
    ops = op_losses(of_ops, sites, origins.let_through)
    layers = layer_losses(ops, of_ops, sites)
    rounded = {name for each in ops for name in each.dtypes if each.kind is not PrecisionLoss.NOTHING}
    coarsest = max(rounded & FINFO.keys(), key=lambda name: unit([name]), default="")
    worst = layers[0].worst if layers else None
    before = origins.rounded_in(worst.seq) if worst is not None and worst.kind is PrecisionLoss.CANCELS else ()
    return replace(
        found,
        layers=layers,
        ops=ops[:MOST_OPS],
        rows_missing=missing,
        in_float8=any(name.startswith("float8") for each in ops for name in each.dtypes),
        leaves_out=leaves_out(of_ops, sites),
        computes_in=coarsest,
        rounded_in=before,
        sentence=sentence(layers, before, coarsest, row.ops, row.not_measured),
        code=code(layers, before),
    )
