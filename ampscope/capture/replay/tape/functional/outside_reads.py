"""Notes what a transform reads besides its arguments: results of earlier calls that its function has closed over."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ampscope.capture.events.calls import Through
from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.entry import CalledThrough, EarlierResult
from ampscope.capture.replay.tape.functional import named_weights
from ampscope.capture.torch_support.models import Models


def called(through: Through, tape: Tape, models: Models) -> CalledThrough:
    """Describes for the tape what calls a model in the loop's place; its reads from outside are noted as it runs."""
    models.stand_ins.lend(named_weights.named(through.operands, models))
    found = CalledThrough(through.call, through.inputs, lends=not through.is_transform)
    through.reads = reader(tape, found.reads) if through.is_transform else None
    return found


def reader(tape: Tape, reads: dict[int, EarlierResult]) -> Callable[[Tensor], Tensor]:
    """Makes a function that is shown each tensor that a call reads, notes it in ``reads`` by ``id``, and returns it."""

    def read(tensor: Tensor) -> Tensor:
        if id(tensor) not in reads:
            source = tape.earlier_result(tensor, overwrites=False)
            if source is not None:
                reads[id(tensor)] = source
        return tensor

    return read
