"""Writes down in which order the parts of capture are called while a loop trains.

A part's method is replaced by a descriptor that notes the access and hands out the method itself: nothing of a test
stands between capture and the user's frame, which capture looks for on the stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import pytest

from ampscope.capture.events import StepObserver
from ampscope.capture.loop_state.held_state import WrittenState
from ampscope.capture.step.incidents import Incidents
from ampscope.capture.step.live_trace import LiveTrace
from ampscope.capture.step.step_rows import StepRows
from ampscope.capture.tape.step_tape import StepTape
from ampscope.capture.usage.usage_watch import UsageWatch

#: Each part, its name in the golden files, and what its methods are called there where that differs.
SEAMS: tuple[tuple[type, str, dict[str, str]], ...] = (
    (
        StepTape,
        "tape",
        {
            "step_began": "begin",
            "call_began": "enter",
            "call_ended": "leave",
            "call_lost": "lost",
            "backward_began": "backward",
            "backward_ended": "after_backward",
            "abandoned": "abandon",
        },
    ),
    (
        LiveTrace,
        "live",
        {
            "step_began": "start",
            "call_began": "enter_call",
            "backward_began": "enter_backward",
            "backward_ended": "next_micro_batch",
            "gradients_complete": "before_optimizer",
        },
    ),
    (UsageWatch, "usage", {}),
    (WrittenState, "buffers", {}),
    (StepRows, "rows", {}),
    (Incidents, "incidents", {}),
)
#: Called once for each torch function: how often is nobody's promise.
_UNCOUNTED = frozenset({"saw_function"})
#: Events that a part answers by calling another of its own methods, which is noted; and how it keeps from listening.
_ANSWERED = {
    "tape": {"scaler_call_ended", "stop", "unheard", "steps_aside", "optimizer_comes", "learn_edits", "write_edits"},
    "live": {"call_lost", "abandoned", "not_finite"},
    "buffers": {"step_began", "attempt_began"},
    "rows": {"optimizer_steps", "step_ended"},
    "incidents": {"look_at_weights", "absorbed"},
    "usage": {name for name in vars(StepObserver) if not name.startswith("_")},
}
#: The call with which a step begins.
_FIRST = "tape.begin"


class _Noted:
    """A method whose every use is noted."""

    def __init__(self, function: Callable[..., Any], name: str, calls: list[str]) -> None:
        self._function = function
        self._name = name
        self._calls = calls

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        self._calls.append(self._name)
        return self._function.__get__(instance, owner)


@contextlib.contextmanager
def noted(calls: list[str]) -> Iterator[None]:
    """Notes in ``calls`` what is called of every part while the body runs."""
    with pytest.MonkeyPatch.context() as patch:
        for part, label, names in SEAMS:
            for name, value in list(vars(part).items()):
                if (
                    callable(value)
                    and not name.startswith("_")
                    and name not in _UNCOUNTED | _ANSWERED.get(label, set())
                ):
                    patch.setattr(part, name, _Noted(value, f"{label}.{names.get(name, name)}", calls))
        yield


def in_steps(calls: list[str]) -> str:
    """The calls as text: a paragraph a step, headed by how many steps in a row went like it."""
    steps: list[list[str]] = [[]]
    for call in calls:
        if call == _FIRST:
            steps.append([])
        steps[-1].append(call)
    told = [(len(list(same)), step) for step, same in groupby(list(_shortened(step)) for step in steps if step)]
    return "\n".join(f"{count} x\n" + "".join(f"  {call}\n" for call in step) for count, step in told)


def _shortened(step: list[str]) -> Iterator[str]:
    for call, same in groupby(step):
        count = len(list(same))
        # of replays there are as many as fit into their seconds, and each sweeps
        yield call if count == 1 or call == "live.sweep" else f"{call} ({count} times)"
