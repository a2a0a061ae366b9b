"""A `Mistake` in the use of the scaler or autocast is handed on by whoever noticed it; frameworks have their habits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from ampscope.capture.torch_support.user_line import Place, user_place
from ampscope.trace.evidence import NO_EVIDENCE, FindingEvidence
from ampscope.trace.vocabulary import Cause, MistakeForm


class Mistake(NamedTuple):
    """A mistake in the use of the scaler or of autocast, and where it was made."""

    cause: Cause
    place: Place | None
    step: int | None = None  #: where it is not the present one
    form: MistakeForm | None = None  #: how it showed
    evidence: FindingEvidence = NO_EVIDENCE

    @staticmethod
    def here(cause: Cause, form: MistakeForm) -> Mistake:
        """A mistake of the user's line that runs now, which showed in this form."""
        return Mistake.at(user_place(), cause, form)

    @staticmethod
    def at(place: Place | None, cause: Cause, form: MistakeForm) -> Mistake:
        """A mistake of another line, which showed in this form."""
        return Mistake(cause, place, form=form)


#: Takes a mistake.
ReportMistake = Callable[[Mistake], None]


#: Frameworks whose strategies call the user's ``training_step`` inside an autocast region of their own.
_LIGHTNINGS = frozenset({"lightning", "pytorch_lightning"})
#: Frameworks that unscale and step for the user, and how the names of their modules begin; what runs the loop first.
_STEPPING = (
    ("transformers", ("transformers.trainer",)),
    ("lightning", ("lightning.pytorch.", "pytorch_lightning.")),
    ("fabric", ("lightning.fabric.", "lightning_fabric.")),
    ("accelerate", ("accelerate.",)),
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


def framework() -> str:
    """The framework in whose hands the present call is, and that unscales and steps for the user; empty without one."""
    found = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        found |= {name for name, of_framework in _STEPPING if module.startswith(of_framework)}
        frame = frame.f_back
    return next((name for name, _ in _STEPPING if name in found), "")
