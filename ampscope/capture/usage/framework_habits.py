"""What a framework does around the user's code by design: the user can neither see it nor change it."""

from __future__ import annotations

import sys
from types import FrameType

#: Frameworks whose strategies call the user's ``training_step`` inside an autocast region of their own.
_LIGHTNINGS = frozenset({"lightning", "pytorch_lightning"})
#: Frameworks with a trainer, and how the names of its modules begin.
_TRAINERS = (
    ("lightning", ("lightning.pytorch.", "pytorch_lightning.")),
    ("transformers", ("transformers.trainer",)),
)


def holds_autocast() -> bool:
    """Whether a framework has entered the present autocast region and has called the user's code in it.

    Lightning's manual optimization does: backward and the optimizer run in ``training_step``, which mixed precision
    wraps as a whole. Its region keeps no cast weights (``cache_enabled=False``), so that none of them is used too long.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "training_step":
            home = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if home in _LIGHTNINGS:
                plugin = getattr(frame.f_locals.get("self"), "precision_plugin", None)
                return hasattr(plugin, "autocast_context_manager")
        frame = frame.f_back
    return False


def trainer() -> str:
    """The framework whose trainer runs the user's loop, and unscales and steps for it; empty where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        for name, of_trainer in _TRAINERS:
            if module.startswith(of_trainer):
                return name
        frame = frame.f_back
    return ""
