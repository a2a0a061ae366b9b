"""A way to what was traced since the page was drawn; the step that the reader looks at stays on screen until then."""

from __future__ import annotations

from collections.abc import Callable

from data.loader import Loaded


def newer(run: Loaded, *, shown: int, link: Callable[[int, str], None]) -> None:
    """Offer the newest traced step where it is not among those on the page.

    Args:
        run: The run, as it is now.
        shown: The newest traced step on the page.
        link: Draws a link to a step, with these words.
    """
    last = run.pulse().last_traced
    if last is not None and last > shown:
        link(last, f"Step {last:,} has been traced since: show it")
