"""The questions that people open the app with: where each begins, the clicks to its answer, and what that says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from playwright.sync_api import Locator, Page

Click = Callable[[Page], Locator]


@dataclass(frozen=True, slots=True)
class Question:
    """What somebody wants to know, looking at the verdict on a run."""

    asked: str
    run: str
    clicks: tuple[Click, ...]
    answer: str  #: a regular expression of what is to be read then

    def shown(self, page: Page) -> Locator:
        """Where the answer stands, once it does."""
        return page.get_by_test_id("stMain").get_by_text(re.compile(self.answer)).locator("visible=true").first


def side(title: str) -> Click:
    """A page, by the side bar."""
    return lambda page: page.get_by_test_id("stSidebar").get_by_test_id("stPageLink-NavLink").filter(has_text=title)


def tab(name: str) -> Click:
    """A tab of the page."""
    return lambda page: page.get_by_role("tab", name=name, exact=True)


def copy(page: Page) -> Locator:
    """The button that copies the best remedy, which stands first."""
    return page.get_by_test_id("stCode").filter(has_text="q.float() @ k").get_by_role("button").first


def cell(page: Page) -> Locator:
    """The newest cell of the layer that is closest to overflow."""
    return page.locator(".map .row .cells i").first


_FAILED = "attention-overflow"
QUESTIONS = (
    Question("which change cures it", _FAILED, (copy,), r"tried on this step: cures it"),
    Question("is my loss scale right", "healthy", (side("Scale"),), r"^Is the loss scale right\? As far as .* tell"),
    Question("what ran in float32, and why", "healthy", (side("Precision"),), r"% in float32\."),
    Question("which layer is closest to overflow", "healthy", (), r"The closest value: \w+ in "),
    Question("how did this layer evolve", "healthy", (cell,), r"One place close up"),
    Question("which rank", "ranks", (side("Ranks"),), r"[Rr]ank 1\b"),
    Question("what changed since the last good step", _FAILED, (side("Incident"),), r"Last good step: 293"),
    Question("did this commit change numbers", "healthy", (side("Compare"),), r"^(Different|The same|.* apart)$"),
    Question("would bfloat16 do", "healthy", (side("Plan"),), r"bfloat16 would do for"),
    Question("what was tried", _FAILED, (side("Incident"), tab("What was tried")), r"everything in float32"),
    Question("what does watching cost", "healthy", (), r"of the time spent on observing"),
    Question("where is the report", "healthy", (), r"Report to send on"),
)
