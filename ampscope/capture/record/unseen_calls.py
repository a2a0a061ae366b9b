"""Says of a run that no call of the watched model was seen: nothing of its forward is known, whatever the rest says."""

from __future__ import annotations

from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.torch_support import dynamo
from ampscope.trace.schema import EventKind

#: Steps after which it is said.
PATIENCE = 2

_NOT_CALLED = (
    "no call of the watched model was seen: watch the object that the loop calls, and call it as model(x), "
    "not model.forward(x)"
)
_COMPILED = (
    "no call of the watched model was seen, for what runs inside a function that torch.compile compiled is hidden, and "
    "a bad step cannot be replayed: compile the model alone, model.compile(), and call it outside compiled functions"
)


class UnseenCalls:
    """Counts the steps of a segment until a call of a watched model is seen.

    Args:
        recorder: Where it is written.
        terminal: Where the user is told, once.
    """

    def __init__(self, recorder: Recorder, terminal: Terminal) -> None:
        self._recorder = recorder
        self._terminal = terminal
        self._steps = 0
        self._told = False

    def stepped(self, step: int, *, called: bool) -> None:
        """An optimizer of the run has stepped.

        Args:
            step: The next step.
            called: Whether a call of a watched model was ever seen.
        """
        self._steps += 1
        if self._told and called:
            self._told = False
            self._recorder.event(EventKind.SEEN, step, "")
        elif self._steps == PATIENCE:
            self._tell(step, called=called)

    def ended(self, step: int, *, called: bool) -> None:
        """The segment ends."""
        if 0 < self._steps < PATIENCE:
            self._tell(step, called=called)

    def _tell(self, step: int, *, called: bool) -> None:
        if not called:
            self._told = True
            text = _COMPILED if dynamo.in_use() else _NOT_CALLED
            self._recorder.event(EventKind.UNSEEN, step, text)
            self._terminal.once("unseen", text)
