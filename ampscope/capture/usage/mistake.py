"""A mistake in the use of the scaler or of autocast, as whoever noticed it hands it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ampscope.capture.torch_support.user_line import Place, user_place
from ampscope.trace.vocabulary import Cause, MistakeForm


class Mistake(NamedTuple):
    """A mistake in the use of the scaler or of autocast, and where it was made."""

    cause: Cause
    place: Place | None
    step: int | None = None  #: where it is not the present one
    form: MistakeForm | None = None  #: how it showed
    evidence: dict[str, Any] | None = None

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
