"""The layers of an audited step, by what they lose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampscope.analysis.precision.audit.op_losses import Loss, OpLoss, weight
from ampscope.trace.schema import AuditOpRow, Node, SiteRow

#: The gravest first.
_GRAVITY = (Loss.CANCELS, Loss.COARSE, Loss.ROUNDS, Loss.NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoss:
    """What a module lost in the step, without the modules inside it."""

    module: str  #: empty for the model itself; ``(loss)`` for the code outside every module, with its backward, and
    #: ``(backward)`` for what backward does for none
    module_type: str
    kind: Loss  #: the gravest of its ops'
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
