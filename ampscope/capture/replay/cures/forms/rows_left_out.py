"""A replay without the rows of its batch that came in not finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.replay.results import FormUsed
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.user_line import NOWHERE
from ampscope.capture.tracing.statistics.stats import finite
from ampscope.trace import schema
from ampscope.trace.schema import Form


class RowsLeftOut(ReplayChange):
    """The step without some rows of its batch: of all that comes from outside and has as many rows as the batch.

    Args:
        of: How many rows the batch has.
        kept: The numbers of those that stay.
        whole: What has no rows, whatever its size, by ``id``: each parameter and buffer.
    """

    kind = schema.Change.FORM

    def __init__(self, of: int, kept: Tensor, whole: frozenset[int]) -> None:
        super().__init__()
        self._of = of
        self._kept = kept
        self._whole = whole

    @property
    def left_out(self) -> str:
        """How many rows do not stay, in words."""
        return f"{self._of - len(self._kept)} of {self._of}"

    @property
    def used(self) -> FormUsed:
        """See `OtherForm.used`: it is the form of no call."""
        return FormUsed(Form.ROWS_LEFT_OUT, "", NOWHERE)

    def given(self, original: Tensor, read: Tensor) -> Tensor:
        """See `ReplayChange.given`."""
        if not self._cuts(original):
            return read
        with self._unseen():
            kept = read.detach().index_select(0, self._kept.to(read.device))
        return kept.requires_grad_(read.requires_grad)

    def rivals(self, step: TapedStep) -> Iterator[RowsLeftOut]:
        """Yields changes that leave one more tensor whole, which may be a table with as many rows as the batch."""
        read = (each.tensor for _, entry in step.entries() for each in entry.arguments.outside)
        others = {id(tensor): tensor for tensor in read if self._cuts(tensor) and finite(tensor)}
        return (RowsLeftOut(self._of, self._kept, self._whole | {key}) for key in others)

    def _cuts(self, tensor: Tensor) -> bool:
        return id(tensor) not in self._whole and tensor.dim() > 0 and len(tensor) == self._of


def of_step(step: TapedStep, models: Models) -> RowsLeftOut | None:
    """Makes the change that leaves out rows which are not finite.

    Returns:
        The change; None where there are no such rows, no others, or such rows in batches of several sizes.
    """
    weights = frozenset((*models.parameters, *(id(buffer) for _, _, buffer in models.buffers())))
    outside = (read for _, entry in step.entries() for read in entry.arguments.outside)
    bad: dict[int, Tensor] = {}
    for read in outside:
        tensor = read.tensor.detach()
        if (
            read.identity in weights
            or not tensor.dim()
            or not tensor.is_floating_point()
            or tensor.is_sparse
            or tensor.is_nested
        ):
            continue
        rows = (tensor.isnan() | tensor.isposinf()).flatten(1).any(1) if tensor.dim() > 1 else tensor.isnan()
        if rows.any():
            bad[len(rows)] = bad[len(rows)] | rows if len(rows) in bad else rows
    if len(bad) != 1:
        return None
    ((of, rows),) = bad.items()
    kept = torch.arange(of)[~rows.cpu()]
    return RowsLeftOut(of, kept, weights) if len(kept) else None
