"""Recognises gradients that are float16 themselves, since their parameters are: no scaler unscales those."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.user_line import user_place
from ampscope.capture.usage.mistake import Mistake
from ampscope.trace.vocabulary import Cause


class HalfGradients:
    """Looks at the gradients of each optimizer once."""

    def __init__(self) -> None:
        self._checked: set[int] = set()  # ids of optimizers

    def check(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> Mistake | None:
        """The mistake, when an optimizer's gradients are looked at for the first time and any is float16."""
        if id(optimizer) in self._checked:
            return None
        self._checked.add(id(optimizer))
        half = [p for p in parameters if p.grad is not None and p.grad.dtype is torch.float16]
        return Mistake(Cause.HALF_PARAMS, user_place(), evidence={"parameters": len(half)}) if half else None
