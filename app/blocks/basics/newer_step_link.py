"""A way to what was traced since the page was drawn; the step that the reader looks at stays on screen until then."""

from __future__ import annotations

from collections.abc import Callable

from data.run_results import pulse_of
from data.run_snapshot import RunSnapshot


def newer_step_link(run: RunSnapshot, *, shown: int, link: Callable[[int, str], None]) -> None:
    """Offer the newest traced step where it is not among those on the page.

    Args:
        run: The run, as it is now.
        shown: The newest traced step on the page.
        link: Draws a link to a step, with these words.
    """
    last = pulse_of(run).last_traced
    if last is not None and last > shown:
        link(last, f"Step {last:,} has been traced since: show it")
