"""Does to the average of the replays' gradients what the loop did to its own once they were averaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from ampscope.capture.heal.cured_step import CuredStep
from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.replay.tape.entry import UnscaledGradients
from ampscope.capture.replay.tape.taped_step import TapedStep
from ampscope.capture.torch_support.models import Models


class FromGradients(ReplayChange):
    """A replay that begins after the last backward, with these gradients.

    Args:
        gradients: By parameter.
    """

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._gradients = gradients

    def change_modules(self, models: Models) -> None:
        """See `ReplayChange.change_modules`."""
        for module in models.modules:
            for leaf, parameter in module._parameters.items():
                gradient = self._gradients.get(".".join(filter(None, (models.names[id(module)], leaf))))
                if parameter is not None and gradient is not None:
                    parameter.grad = gradient.clone()


def as_averaged(step: TapedStep) -> TapedStep:
    """The step to its last backward: what the loop did after that, it did to the average."""
    return step._replace(edits=(), given=MappingProxyType({}), edited=False) if step.edited else step


def edited(step: TapedStep, averaged: CuredStep, run: Callable[[TapedStep, ReplayChange], CuredStep]) -> CuredStep:
    """An averaged step with what the loop did to its gradients; itself where that was no more than unscaling.

    Args:
        step: With what the loop did.
        averaged: The step as it came out of the replays, with the average of all.
        run: Runs a step with a change.
    """
    edits = (step.tape[number] for number in step.edits)
    if not step.given and all(isinstance(entry.arguments, UnscaledGradients) for entry in edits):
        return averaged  # the scale comes off as they are handed over
    rest = run(step._replace(since=step.gradients_at + 1), FromGradients(averaged.gradients))
    return dataclasses.replace(rest, buffers=averaged.buffers, hooked=averaged.hooked)
