"""Where the parts of an incident lead."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from blocks import verdict
from blocks.page_links import Way
from blocks.verdict import rank_chips
from state import Page
from tests.support.verdicts.of_scenes import OVERFLOW


def way_to(page: Page, **query: object) -> Way:
    return Way(page, {name: str(value) for name, value in query.items()})


def test_each_rank_that_went_bad_has_a_chip_that_leads_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "way_to", way_to)
    ranked = replace(OVERFLOW, rank=1, also_on=(3,), received_by=(0, 2), world=4)
    assert re.findall(r'rank=(\d)"[^>]*>rank (\d): ([a-z ]+)<', rank_chips(ranked)) == [
        ("1", "1", "failed itself"),
        ("3", "3", "failed itself"),
        ("0", "0", "received it"),
        ("2", "2", "received it"),
    ]
    assert "and 989 more" in rank_chips(replace(ranked, received_by=tuple(range(4, 1003)), world=1003))
    assert rank_chips(OVERFLOW) == ""
