"""What is done about one bad step, and lasts no longer: its batch without some rows, weights without some elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.replay.cures.forms import rows_left_out
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.statistics.stats import finite
from ampscope.trace.schema import CureKind

#: Of a weight's elements, at most this share may be set to zero; a single one always may.
FEW = 0.01


class ElementsZeroed(ReplayChange):
    """Weights with zeros where they are not finite.

    Args:
        bad: Those weights.
    """

    def __init__(self, bad: list[nn.Parameter]) -> None:
        super().__init__()
        self._bad = bad
        self.weights = {id(each): nn.Parameter(_zeroed(each), each.requires_grad) for each in bad}

    def make(self) -> None:
        """Does it to the live weights."""
        with torch.no_grad():
            for each in self._bad:
                each.copy_(_zeroed(each))


class Repair(NamedTuple):
    """What may make a step finite that float32 does not."""

    kind: CureKind
    text: str  #: as a clause
    change: ReplayChange


def of_step(step: TapedStep, models: Models) -> Iterator[Repair]:
    """What may help on a step, what changes less first.

    Args:
        step: The step.
        models: The watched models.
    """
    named = {name: weight for name, weight in models.parameters.values() if not finite(weight)}
    bad = [weight for weight in named.values() if isinstance(weight, nn.Parameter) and _is_repairable(weight)]
    if bad and len(bad) == len(named):
        count = sum(int((~each.isfinite()).sum()) for each in bad)
        elements = "1 element" if count == 1 else f"{count} elements"
        text = f"{elements} of {', '.join(named)} set to zero, not finite as the step began"
        yield Repair(CureKind.WEIGHTS, text, ElementsZeroed(bad))
    without = rows_left_out.of_step(step, models) if not named else None
    if without is not None:
        text = f"{without.left_out} rows of its batch left out, which came in not finite"
        yield Repair(CureKind.ROWS_LEFT_OUT, text, without)


def _is_repairable(weight: nn.Parameter) -> bool:
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        return False
    return int((~weight.isfinite()).sum()) <= max(1, FEW * weight.numel())


def _zeroed(weight: Tensor) -> Tensor:
    return weight.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
