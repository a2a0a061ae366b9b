"""Notes what a transform reads besides its arguments: results of earlier calls that its function has closed over."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.entry import EarlierResult


def reader(tape: Tape, reads: dict[int, EarlierResult]) -> Callable[[Tensor], Tensor]:
    """What is shown each tensor that a call reads, notes it in ``reads`` by its ``id``, and gives it back."""

    def read(tensor: Tensor) -> Tensor:
        if id(tensor) not in reads:
            source = tape.earlier_result(tensor, overwrites=False)
            if source is not None:
                reads[id(tensor)] = source
        return tensor

    return read
