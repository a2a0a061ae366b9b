"""An audit of a run: what the layers of one healthy step lose by their dtypes, and how the loss's error divides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampscope.analysis.precision.audit import told
from ampscope.analysis.precision.audit.layer_losses import LayerLoss, layer_losses
from ampscope.analysis.precision.audit.op_losses import Loss, OpLoss, leaves_out, op_losses, unit
from ampscope.analysis.precision.audit.origins import Origins
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.dtypes import FINFO
from ampscope.trace.read.run import Run
from ampscope.trace.schema import AuditRow, AuditStatus, Table

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
class Audit(NotebookRepr):
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


def audit(run: Run, *, step: int | None = None, rank: int | None = None) -> Audit | None:
    """What an audit of a run found.

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
        return Audit(rank=rank)
    chosen = _chosen(rows, step)
    return None if chosen is None else _of(run, rank, chosen, audited)


def _chosen(rows: Sequence[AuditRow], step: int | None) -> AuditRow | None:
    asked = [row for row in rows if step is None or row.step == step]
    made = [row for row in asked if row.status != AuditStatus.UNAVAILABLE]
    return next(reversed(made or asked), None)


def _of(run: Run, rank: int, row: AuditRow, audited: tuple[AuditedStep, ...]) -> Audit:
    known = row.loss is not None and row.reference_loss is not None
    found = Audit(
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
        return replace(found, sentence=told.unavailable(row.reason))
    sites = {site.site: site for site in run.rows(Table.SITES, rank=rank)}
    of_ops = run.rows(Table.AUDIT_OPS, step=row.step, source=row.source, rank=rank)
    origins = Origins(of_ops, lambda: run.rows(Table.EDGES, step=row.step, source=row.source, rank=rank), sites)
    missing = row.ops > len({each.seq for each in of_ops if each.site in sites})
    ops = op_losses(of_ops, sites, origins.let_through)
    layers = layer_losses(ops, of_ops, sites)
    rounded = {name for each in ops for name in each.dtypes if each.kind is not Loss.NOTHING}
    coarsest = max(rounded & FINFO.keys(), key=lambda name: unit([name]), default="")
    worst = layers[0].worst if layers else None
    before = origins.rounded_in(worst.seq) if worst is not None and worst.kind is Loss.CANCELS else ()
    return replace(
        found,
        layers=layers,
        ops=ops[:MOST_OPS],
        rows_missing=missing,
        in_float8=any(name.startswith("float8") for each in ops for name in each.dtypes),
        leaves_out=leaves_out(of_ops, sites),
        computes_in=coarsest,
        rounded_in=before,
        sentence=told.sentence(layers, before, coarsest, row.ops, row.not_measured),
        code=told.code(layers, before),
    )
