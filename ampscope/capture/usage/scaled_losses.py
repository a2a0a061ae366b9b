"""Finds out from autograd's graph which losses a scaler has scaled, and how often."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ampscope.capture.torch_support.calls.backward_call import factor_of
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.torch_private import node_sequence_number

#: Nodes of loss code looked at between a loss and the scaling that it may come from.
_MOST_NODES = 500

ScalerNumbers = frozenset[int | None]  #: numbers of scalers; None for a loss that no scaler scaled

UNSCALED: ScalerNumbers = frozenset({None})


class ScaledLosses:
    """Knows which scaler has scaled the loss that a backward starts from."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._by_number: dict[int, int] = {}  # of the autograd node that multiplied by the scale -> scaler
        self._waiting: set[int] = set()  # the nodes of which no gradients were asked since

    def scaled(self, scaler: int, outputs: Iterable[Tensor]) -> None:
        """A scaler returned these outputs."""
        for tensor in outputs:
            if tensor.grad_fn is not None:
                number = node_sequence_number(tensor.grad_fn)
                self._by_number[number] = scaler
                self._waiting.add(number)

    def clear(self) -> None:
        """A step is over."""
        self._by_number.clear()
        self._waiting.clear()

    def has_scaled(self, scaler: int, losses: Iterable[Tensor]) -> bool:
        """Whether ``losses`` come from one that this scaler has scaled, and that is no further than that.

        After a backward a loss may be made of gradients, whose scale was divided out.
        """
        return bool(self._waiting) and scaler in self._leading_to(losses, self._waiting)

    def scalers_of(self, roots: Iterable[Tensor]) -> ScalerNumbers:
        """The scalers whose scaling leads to ``roots``, which a backward begins from; `UNSCALED` without any."""
        self._waiting.clear()
        return frozenset(self._leading_to(roots, self._by_number)) or UNSCALED

    def reached_unscaled(self, roots: Iterable[Tensor]) -> int | None:
        """A parameter (its ``id``) that a backward from ``roots`` reaches past every scaling, for sure."""
        front = [root.grad_fn for root in roots if root.grad_fn is not None]
        seen = set(front)
        while front and len(seen) < _MOST_NODES:
            node = front.pop()
            key = id(getattr(node, "variable", None))  # only the nodes that accumulate gradients have one
            if key in self._models.parameters:
                return key
            if node_sequence_number(node) not in self._by_number and not _may_scale(node):
                new = {each for each, _ in node.next_functions if each is not None} - seen
                seen |= new
                front += new
        return None

    def _leading_to(self, tensors: Iterable[Tensor], scalings: Collection[int]) -> set[int]:
        """The scalers whose ``scalings`` lead to ``tensors``.

        A node's number is larger than those of the nodes it leads to, so only what the loop did after scaling is
        walked.
        """
        found: set[int] = set()
        if not scalings:
            return found
        earliest = min(scalings)
        front = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        visited: set[int] = set()
        while front and len(visited) < _MOST_NODES:
            node = front.pop()
            number = node_sequence_number(node)
            if number in scalings:
                found.add(self._by_number[number])
            elif number >= earliest and number not in visited:
                visited.add(number)
                front += [each for each, _ in node.next_functions if each is not None and each.next_functions]
        return found


def _may_scale(node: Any) -> bool:
    """Whether a node may multiply gradients by the scale, or by zero: by anything but a number that can be seen."""
    if isinstance(node, BackwardCFunction):  # a function of the user's
        return True
    if not node.name().startswith("MulBackward") or all(each is not None for each, _ in node.next_functions):
        return False
    return not factor_of(node)
