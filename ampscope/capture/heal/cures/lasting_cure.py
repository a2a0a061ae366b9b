"""Lasting cures: small objects, each of which a replay can try, and which can be done to the live model and lifted."""

from __future__ import annotations

from typing import Any

from ampscope.capture.replay.changes import ReplayChange
from ampscope.trace.schema import CureKind


class LastingCure:
    """A change of the live training, from the next step on.

    Attributes:
        kind: What it is.
        modules: Qualified names of the modules that it changes.
        by_finiteness: Whether a step that comes out finite without it needs it no more.
        fitting_scale: The loss scale with which it was proved, where that of the step was too large for it.
    """

    kind: CureKind
    modules: tuple[str, ...] = ()
    by_finiteness = True
    fitting_scale: float | None = None

    @property
    def why_lifted(self) -> str:
        """Why it cannot stay, as its first steps have shown; empty where it can."""
        return ""

    @property
    def text(self) -> str:
        """The change in words, as a clause."""
        raise NotImplementedError

    @property
    def code(self) -> str:
        """The user's code that makes it permanent."""
        raise NotImplementedError

    @property
    def detail(self) -> dict[str, Any]:
        """The data that it takes to make the change again, as JSON."""
        raise NotImplementedError

    def change(self) -> ReplayChange:
        """Makes the same change for a replay."""
        raise NotImplementedError

    def without(self) -> ReplayChange:
        """Makes the change by which a replay goes without this cure, while it is applied."""
        raise NotImplementedError

    def apply(self) -> None:
        """Makes the change to the live model.

        Raises:
            AmpscopeError: It cannot be done; nothing was changed.
        """
        raise NotImplementedError

    def lift(self) -> None:
        """Takes the change back; safe to call twice."""
        raise NotImplementedError
