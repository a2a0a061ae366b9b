"""Reports usage mistakes: into the trace, and once each to the terminal."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim.optimizer import Optimizer

from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.torch_support.user_line import NOWHERE
from ampscope.capture.usage.framework_habits import framework
from ampscope.capture.usage.mistake import Mistake


class MistakeReport:
    """Takes one mistake after another.

    Args:
        recorder: Where findings go.
        terminal: Where the user is told.
        step_of: Gives the number of the step an optimizer (None: the first) is working on.
    """

    def __init__(self, recorder: Recorder, terminal: Terminal, step_of: Callable[[Optimizer | None], int]) -> None:
        self._recorder = recorder
        self._terminal = terminal
        self._step_of = step_of

    def __call__(self, mistake: Mistake) -> None:
        """Writes it down, at the present step unless it has another."""
        step = self._step_of(None) if mistake.step is None else mistake.step
        where, evidence = mistake.place or NOWHERE, dict(mistake.evidence or {})
        if steps_with := framework():
            evidence["framework"] = steps_with
        self._recorder.finding(mistake.cause, step, where, form=mistake.form, evidence=evidence)
        self._terminal.mistake(mistake.cause, step, where, evidence)
