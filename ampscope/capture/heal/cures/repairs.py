"""Repairs of one bad step, which last no longer: its batch without some rows, weights without some elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.replay.cures.forms import rows_left_out
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.torch_support.local_shards import local
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.tracing.statistics.stats import finite
from ampscope.trace.schema import CureKind

#: Of a weight's elements, at most this share may be set to zero; a single one always may.
FEW = 0.01


class ElementsZeroed(ReplayChange):
    """Weights with zeros where they are not finite.

    Args:
        bad: Those weights, each with which of its elements are bad.
    """

    def __init__(self, bad: list[tuple[nn.Parameter, Tensor]]) -> None:
        super().__init__()
        self._bad = bad
        zeroed = ((each, each.detach().masked_fill(where, 0.0)) for each, where in bad)
        self.weights = {id(each): nn.Parameter(values, each.requires_grad) for each, values in zeroed}

    def is_all_of(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps all of them: as it writes into them, no graph is used that has read them."""
        own = set(map(id, OptimizerView(optimizer).parameters))
        return all(id(each) in own for each, _ in self._bad)

    def make(self) -> None:
        """Zeroes the elements in the live weights, whatever has become of others since."""
        with torch.no_grad():
            for each, where in self._bad:
                each.masked_fill_(where, 0.0)


def make(due: list[ElementsZeroed]) -> None:
    """Zeroes the elements that had to wait for the end of a step: other losses might still have gone backward."""
    while due:
        due.pop().make()


class Repair(NamedTuple):
    """A change that may make a step finite that float32 does not."""

    kind: CureKind
    text: str  #: as a clause
    change: ReplayChange
    rivals: Iterable[ReplayChange] = ()  #: with each of which the step must fail, or none is known to be right


def of_step(step: TapedStep, models: Models) -> Iterator[Repair]:
    """Lists what may help on a step, the smaller changes first."""
    named = {name: weight for name, weight in models.parameters.values() if is_bad(weight)}
    plain = (each for each in named.values() if type(each) is nn.Parameter and each.layout is torch.strided)
    bad = [(weight, _elements(weight)) for weight in plain]
    few = all(int(where.sum()) <= max(1, FEW * where.numel()) for _, where in bad)
    if bad and few and len(bad) == len(named):
        count = sum(int(where.sum()) for _, where in bad)
        elements = "1 element" if count == 1 else f"{count} elements"
        text = f"{elements} of {', '.join(named)} set to zero, not finite as the step began"
        yield Repair(CureKind.WEIGHTS, text, ElementsZeroed(bad))
    without = rows_left_out.of_step(step, models) if not named else None
    if without is not None:
        text = f"{without.left_out} rows of its batch left out, which came in not finite"
        yield Repair(CureKind.ROWS_LEFT_OUT, text, without, without.rivals(step))


def is_bad(weight: Tensor) -> bool:
    """Whether a weight holds what it never should: one that is frozen may hold infinities, as masks do."""
    return not finite(weight) and (weight.requires_grad or bool(local(weight).detach().isnan().any()))


def _elements(weight: nn.Parameter) -> Tensor:
    return ~weight.detach().isfinite() if weight.requires_grad else weight.detach().isnan()
