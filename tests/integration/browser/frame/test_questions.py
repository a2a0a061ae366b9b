"""From the verdict, every question is answered with two clicks at most."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright", reason="needs the dev extra: pip install 'ampscope[dev]'")

from playwright.sync_api import expect

from tests.integration.browser.driver import goto
from tests.integration.browser.frame.questions import QUESTIONS, Question
from tests.integration.browser.watched import Watched

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("question", [pytest.param(each, id=each.asked.replace(" ", "-")) for each in QUESTIONS])
def test_it_is_answered_with_two_clicks(watched: Watched, address: str, question: Question) -> None:
    page = watched.page
    goto(page, address, "", run=question.run)
    for click in question.clicks:
        click(page).click(timeout=30_000)
    expect(question.shown(page)).to_be_visible(timeout=30_000)
    assert len(question.clicks) <= 2
    assert watched.complaints == []
