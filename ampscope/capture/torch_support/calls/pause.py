"""Says whether the calls that come now are left alone: AMPscope's own, and those that go into a CUDA graph."""

from __future__ import annotations

import time

import torch

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.calls.modes_aside import OthersAside


class Pause:
    """One switch for all that hears of a run's calls: it is turned dozens of times a step.

    Attributes:
        on: The calls that come now are AMPscope's own.
        glanced: Seconds that glances have taken.
        cuda: CUDA was in use when the latest step began; only then may anybody be capturing a graph.
    """

    __slots__ = ("_began", "cuda", "glanced", "on", "others")

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self.others = OthersAside(lambda _: False)  #: modes of other people, which glances are to go past
        self.glanced = 0.0
        self._began = 0.0
        self.look_for_cuda()

    def look_for_cuda(self) -> bool:
        """A step begins; in between nobody asks, for these calls are many."""
        self.cuda = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self.cuda

    def captures(self) -> bool:
        """Whether what is called now goes into a CUDA graph, which a query, a copy or a wait would spoil."""
        return self.cuda and torch.cuda.is_current_stream_capturing()

    def begin(self) -> None:
        """Own work begins within a call of the loop's: too short, and too often, to be set apart as other work is.

        Dispatch modes do not see it. Function modes cannot: torch has taken them off for the call.
        """
        self.on = True
        if torch_private.dispatch_stack.length():
            self.others.__enter__()

    def end(self) -> None:
        """Ends AMPscope's own work; the loop goes on."""
        if self.others.are_aside:
            self.others.__exit__()
        self.on = False

    def begin_glance(self) -> None:
        """A glance at one function of the loop's begins: as `begin`, and timed."""
        self._began = time.perf_counter()
        self.on = True
        if torch_private.dispatch_stack.length():
            self.others.__enter__()

    def end_glance(self) -> None:
        """Ends a glance, and adds its time to `glanced`."""
        if self.others.are_aside:
            self.others.__exit__()
        self.on = False
        self.glanced += time.perf_counter() - self._began

    def begin_aside(self) -> None:
        """Begins a glance between two calls of the loop, with its modes set aside; `end_glance` ends it."""
        self.others.__enter__()
        self.begin_glance()
