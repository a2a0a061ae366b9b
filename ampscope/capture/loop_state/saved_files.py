"""Files that the loop saves its state to are taken down, with the step after which it did so."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.hooks.saving_calls import path_of
from ampscope.capture.loop_state.optimizer_numbers import OptimizerNumbers
from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.tensor_tree import tensors
from ampscope.capture.torch_support.torch_private import storage_key
from ampscope.trace.schema import EventKind
from ampscope.trace.vocabulary import HELD_OPTIMIZER, HELD_WEIGHTS

#: Tensors that a file may hold; one with more (a data set) is not looked at, for the loop waits.
MOST_TENSORS = 1 << 15


class SavedFiles:
    """Files that hold the state of a run; told by whose memory was saved, never by its values.

    Args:
        models: The watched models.
        optimizers: Which optimizers are the run's, and their steps.
        recorder: Where rows go.
        guard: Catches faults in looking at what was saved.
    """

    def __init__(self, models: Models, optimizers: OptimizerNumbers, recorder: Recorder, guard: Guard) -> None:
        self._models, self._optimizers, self._recorder = models, optimizers, recorder
        self._guard = guard

    def saved(self, held: object, target: object, *, within_step: bool) -> None:
        """Takes down a file, if it has a path and holds any state of the run.

        Args:
            held: What was saved.
            target: Where to.
            within_step: A step is in progress, which may have moved weights already.
        """
        if self._guard.broken:
            return
        with self._guard:
            path = path_of(target)
            if path is not None and (held_of := self._held_of(held)):
                numbers = sorted({0, *self._optimizers.by_number()})
                after = {number: self._optimizers.step_at(number) - 1 for number in numbers}
                told = {"path": path, "holds": [*held_of], "after": after, "open": within_step}
                told["whole"] = [kind for kind, is_all in held_of.items() if is_all]
                self._recorder.event(EventKind.SAVED, self._optimizers.step_of(None), json.dumps(told))

    def _held_of(self, held: object) -> dict[str, bool]:
        """Names what is held of the run's own state, and whether all of it is."""
        looked_at = list(islice(_tensors(held), MOST_TENSORS + 1))
        saved = {storage_key(each) for each in looked_at if _has_memory(each)}
        if not saved or len(looked_at) > MOST_TENSORS:
            return {}
        kinds = {HELD_WEIGHTS: self._models.trained(), HELD_OPTIMIZER: self._optimizer_state()}
        found = {kind: {storage_key(each) in saved for each in own} for kind, own in kinds.items()}
        return {kind: False not in among for kind, among in found.items() if True in among}

    def _optimizer_state(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers.by_number().values():
            for state in OptimizerView(optimizer).state.values():
                yield from filter(_has_memory, tensors(state))


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _tensors(held: object) -> Iterator[Tensor]:
    """Yields the tensors of what was saved, and of each of its parts: a model, an optimizer, their states."""
    for part in held.values() if isinstance(held, Mapping) else (held,):
        if isinstance(part, nn.Module):
            yield from part.parameters()
        elif isinstance(part, Optimizer):
            yield from _of_each(part.state.values())
        elif isinstance(part, Mapping) and isinstance(part.get("state"), Mapping):  # as ``Optimizer.state_dict`` gives
            yield from _of_each(part["state"].values())
        else:
            yield from tensors(part)


def _of_each(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        yield from tensors(value)
