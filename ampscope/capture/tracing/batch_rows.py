"""Rows of a batch are told apart: those that are not finite, that make its gradient, and that stand out in an input."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.tracing import light_statistics
from ampscope.capture.tracing.light_statistics import numbers

#: Rows that are named; of more, only the first.
MOST_ROWS = 16


def bad_rows(tensor: Tensor) -> list[int]:
    """Returns at most `MOST_ROWS` first-dimension indices where ``tensor`` is not finite; waits for the device."""
    if tensor.dim() == 0 or not light_statistics.can_be_bad(tensor) or not light_statistics.measurable(tensor):
        return []
    elements = (tensor if tensor.is_complex() else numbers(tensor)).detach().isfinite()
    bad = ~elements.flatten(1).all(1) if tensor.dim() > 1 else ~elements
    found: list[int] = bad.nonzero().flatten()[:MOST_ROWS].tolist()
    return found


#: Rows that few are among: a batch of fewer says nothing.
LEAST_ROWS = 8
#: Few rows, as a share of the batch,
FEW = 1 / 8
#: make the gradient if this share of it is theirs.
MOST_OF_IT = 0.9
#: A row of an input stands out if its largest magnitude is this many times that of the middle row.
STANDS_OUT = 10.0


class RowShare(NamedTuple):
    """The few rows of one call's batch that make nearly all of the gradient at its outputs."""

    rows: tuple[int, ...]
    of: int  #: rows in the batch
    share: float  #: of the sum of the rows' gradient norms, over all calls of the step


class BatchRows:
    """Follows the rows of one replayed step.

    Args:
        unseen: Leaves out of the trace what is computed here.
    """

    def __init__(self, unseen: Callable[[], AbstractContextManager[None]]) -> None:
        self._unseen = unseen
        self._norms: list[Tensor] = []  # of each output's gradient: the norm of each row
        self.standing_out: dict[str, list[int]] = {}  #: of each input with rows that stand out, these

    def given(self, name: str, tensor: Tensor) -> None:
        """The step reads a tensor; of those from outside, the rows are compared. Waits for the device."""
        if tensor.requires_grad or not tensor.is_floating_point() or not _has_rows(tensor):
            return
        with self._unseen():
            sizes = tensor.detach().reshape(len(tensor), -1).float().abs().amax(1)
            middle = float(sizes.median())
            rows = (sizes > STANDS_OUT * middle).nonzero().flatten().tolist() if middle > 0 else []
        if 0 < len(rows) <= FEW * len(tensor):
            self.standing_out.setdefault(name, rows[:MOST_ROWS])

    def returned(self, result: Any) -> None:
        """A call of a watched module has returned; the gradients of its outputs are still to come."""
        for tensor in tensor_tree.tensors(result):
            if tensor.requires_grad and tensor.grad_fn is not None and _has_rows(tensor):
                tensor.register_hook(self._of_gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _of_gradient(self, gradient: Tensor) -> None:
        if not _has_rows(gradient):
            return
        with self._unseen(), torch.no_grad():
            self._norms.append(gradient.detach().reshape(len(gradient), -1).abs().float().norm(dim=1))

    def few(self) -> RowShare | None:
        """The few rows that make the gradient; None where many do, or nothing is known. Waits for the device."""
        norms = [each.tolist() for each in self._norms]
        total = sum(map(sum, norms))
        if not total > 0:
            return None
        largest = max(norms, key=sum)
        order = sorted(range(len(largest)), key=lambda row: -largest[row])
        few = order[: min(MOST_ROWS, max(1, int(FEW * len(largest))))]
        chosen: list[int] = []
        for row in few:
            chosen.append(row)
            share = sum(largest[each] for each in chosen) / total
            if share >= MOST_OF_IT:
                return RowShare(tuple(sorted(chosen)), len(largest), share)
        return None


def _has_rows(tensor: Tensor) -> bool:
    """Whether a tensor is a batch of enough rows, with values that can be looked at."""
    return light_statistics.measurable(tensor) and tensor.dim() > 0 and len(tensor) >= LEAST_ROWS
