"""Gradients that no backward has left: what ``torch.autograd.grad`` and transforms of torch.func have given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.events.calls import Through
from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.entry import EarlierResult, Entry, OutsideTensor
from ampscope.capture.replay.tape.functional import named_weights
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.models import Models


class FunctionalStep(NamedTuple):
    """A step whose gradients no backward leaves, or whose weights the loop keeps by itself, as far as it is known."""

    tape: Tape
    since: int  #: where it begins on the tape
    has_backward: bool
    models: Models

    @property
    def asked(self) -> int | None:
        """Number of the first entry that gave gradients; None without any."""
        return next((number for number, _ in self._asking()), None)

    def given(self) -> dict[str, Tensor]:
        """The gradients, by parameter, as far as they are still there; see `sources`."""
        sources = self.sources()
        alive = {(at.entry, at.leaf): tensor for tensor, at in self.tape.results.alive()} if sources else {}
        found = ((name, alive.get((source.entry, source.leaf))) for name, source in sources.items())
        return {name: gradient for name, gradient in found if gradient is not None}

    def sources(self) -> dict[str, EarlierResult]:
        """Returns what gave each parameter's gradient: those assigned, else those asked for; none after a backward."""
        if self.has_backward:
            return {}
        found = self.tape.results.assigned(self.models, self.since)
        if not found:
            for number, entry in self._asking():
                found |= {name: EarlierResult(number, leaf) for name, leaf in self._named(entry).items()}
        return found

    def _named(self, entry: Entry) -> dict[str, int]:
        """Returns which result of an entry is a parameter's gradient, by the parameter's name."""
        if entry.through is not None:
            return entry.through.leaves
        _, inputs, *_ = (*entry.arguments.args, entry.arguments.kwargs.get("inputs"), None)
        references = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        names = {key: name for key, (name, _) in self.models.parameters.items()} | self._brought()
        known = [names.get(each.identity) if isinstance(each, OutsideTensor) else None for each in references]
        return {name: leaf for leaf, name in enumerate(known) if name is not None}

    def _brought(self) -> dict[int, str]:
        """The names of the weights that the loop has brought along, by ``id``."""
        calls = (self.tape[number] for number in range(max(self.since, self.tape.start), self.tape.end))
        operands = (entry.arguments.args for entry in calls if entry.through is not None)
        known = (each for args in operands for each in named_weights.under_names(args, self.models))
        return {each.identity: name for name, each in known if isinstance(each, OutsideTensor)}

    def losses(self) -> list[Tensor]:
        """Returns the values of which gradients were asked, as far as these were seen; none after a backward."""
        asking = [] if self.has_backward else [entry for _, entry in self._asking()]
        values = [entry.through.value for entry in asking if entry.through is not None]
        asked = [loss for entry in asking if entry.through is None for loss in entry.fingerprint]
        return [value for value in values if value is not None] + asked

    def was_updated(self, through: Through | None = None) -> bool:
        """Whether the loop has updated weights of its own with the gradients that it has asked for.

        Args:
            through: What is about to call a model with weights; None where nothing is.
        """
        asked = [number for number, _ in self._asking()]
        if not asked or through is None:
            return bool(asked) and named_weights.update_was_made(self.tape, asked)
        return named_weights.were_updated(self.tape, asked, named_weights.named(through.operands, self.models))

    @property
    def latest(self) -> int:
        """Number of the last entry that gave gradients."""
        return max(number for number, _ in self._asking())

    def takes_up(self, asked: list[int], operands: Iterable[Tensor] | None) -> bool:
        """Whether what the entries ``asked`` gave is in ``operands``, or, with None, in weights of the loop's own."""
        if operands is None:
            return named_weights.update_was_made(self.tape, asked)
        return named_weights.come_of(self.tape, asked, operands)

    def weights_given(self, through: Through) -> list[Tensor]:
        """The weights that the loop gives to whatever is about to call a model."""
        return [weight for _, weight in named_weights.named(through.operands, self.models)]

    def is_over(self) -> None:
        """Ends the step: what the loop has made in it is where the next one begins, as weights or a batch."""
        self.tape.results.let_go_of_values()

    def _asking(self) -> Iterator[tuple[int, Entry]]:
        for number in range(max(self.since, self.tape.start), self.tape.end):
            entry = self.tape[number]
            if entry.call is torch.autograd.grad or (entry.through is not None and entry.through.leaves):
                yield number, entry


def leaves(result: Any, models: Models) -> dict[str, int]:
    """Finds which tensors in a transform's result are gradients of parameters: those under a parameter's name."""
    order = {id(tensor): leaf for leaf, tensor in enumerate(tensor_tree.tensors(result))}
    return {name: order[id(tensor)] for name, tensor in named_weights.named(result, models)}
