"""Reports usage mistakes: into the trace, and once each to the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer

from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.torch_support.user_line import NOWHERE, Place
from ampscope.trace.vocabulary import Cause, MistakeForm


class MistakeReport:
    """Takes one mistake after another; see `ampscope.capture.usage.mistake.ReportMistake`.

    Args:
        recorder: Where findings go.
        terminal: Where the user is told.
        step_of: Gives the number of the step an optimizer (None: the first) is working on.
    """

    def __init__(self, recorder: Recorder, terminal: Terminal, step_of: Callable[[Optimizer | None], int]) -> None:
        self._recorder = recorder
        self._terminal = terminal
        self._step_of = step_of

    def __call__(
        self,
        cause: Cause,
        place: Place | None,
        evidence: dict[str, Any],
        step: int | None = None,
        form: MistakeForm | None = None,
    ) -> None:
        """Writes it down, at the present step unless another is given."""
        step, where = self._step_of(None) if step is None else step, place or NOWHERE
        self._recorder.finding(cause, step, where, form=form, evidence=evidence)
        self._terminal.mistake(cause, step, where, evidence)
