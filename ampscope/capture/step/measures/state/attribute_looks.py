"""Finds the tensors in plain attributes of the modules that a step has written, or put there anew."""

from __future__ import annotations

import weakref

from torch import Tensor

from ampscope.capture.replay.state.attribute_tensors import AttributeTensor
from ampscope.capture.torch_support.torch_private import version_counter


class AttributeLooks:
    """Looks at the tensors in plain attributes of the modules once a step; keeps none of them alive."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # and its change counter then

    def changed(self, held: list[AttributeTensor]) -> list[AttributeTensor]:
        """Returns those of ``held`` that were not there at the look before, or were written since."""
        before = self._seen
        self._seen = {each.name: (weakref.ref(each.tensor), version_counter(each.tensor)) for each in held}
        return [each for each in held if not _is_same(before.get(each.name), each.tensor)]

    def left_there(self, held: list[AttributeTensor]) -> dict[int, str]:
        """Names of those of ``held`` that were there at the latest look, by ``id``: no loop has brought them since."""
        seen = {id(tensor) for reference, _ in self._seen.values() if (tensor := reference()) is not None}
        return {id(each.tensor): each.name for each in held if id(each.tensor) in seen}


def _is_same(known: tuple[weakref.ref[Tensor], int] | None, tensor: Tensor) -> bool:
    return known is not None and known[0]() is tensor and known[1] == version_counter(tensor)
