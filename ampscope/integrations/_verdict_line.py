"""The verdict on a run in one line, for the end of a framework's training."""

from __future__ import annotations

from pathlib import Path

import ampscope
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.trace.read.find import from_here


def verdict_line(folder: Path) -> str:
    """Returns one line with the verdict of ``ampscope diagnose`` on the run in ``folder``, and how to see the rest.

    Where the run cannot be diagnosed, the line says why: the training has ended well all the same.
    """
    look = f"Look: ampscope diagnose {from_here(folder)}"
    with Suppressed() as suppressed:
        diagnosis = ampscope.diagnose(folder)
        return f"{diagnosis.verdict.replace('_', ' ')}: {diagnosis.summary} {look}"
    return f"the run has no verdict ({suppressed.error}). {look}"
