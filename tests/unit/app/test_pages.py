from __future__ import annotations

from state import Page
from tests.support.paths import APP

#: A later page may come between two of these.
READ_IN_THIS_ORDER = ["Overview", "Incident", "Replay", "Scale", "Precision", "Usage", "Runs"]


def test_pages_stand_in_the_order_in_which_they_are_read() -> None:
    assert [page.title for page in Page if page.title in READ_IN_THIS_ORDER] == READ_IN_THIS_ORDER


def test_each_page_is_a_file_and_each_file_a_page() -> None:
    assert {APP / page.file for page in Page} == set((APP / "app_pages").glob("*.py"))
