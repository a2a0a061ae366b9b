"""What one element of a page weighs on its way to the browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from state import Page
from tests.support.page_reading import Show, Shown

#: Bytes of an element, at most: a figure, a table, a step's track.
MOST = 300_000
#: The largest sample.
SAMPLE = "attention-overflow"


def sizes(block: Any) -> Iterator[tuple[int, str]]:
    """Of each element below ``block``, how large its message is and what it is."""
    for child in getattr(block, "children", {}).values():
        proto = getattr(child, "proto", None)
        if proto is not None:
            yield proto.ByteSize(), child.type
        yield from sizes(child)


def heaviest(shown: Shown) -> tuple[int, str]:
    """The largest element of a page, its side bar included."""
    return max(each for block in (shown.test.main, shown.test.sidebar) for each in sizes(block))


@pytest.mark.parametrize("page", Page, ids=lambda page: page.stem)
def test_nothing_on_a_page_of_a_sample_is_heavy(show: Show, page: Page) -> None:
    size, what = heaviest(show(SAMPLE, page.stem, real=True))
    assert 0 < size <= MOST, what


def test_a_heavy_element_would_be_found(show: Show) -> None:
    shown = show(SAMPLE, "overview", real=True)
    figure = next(element for element in shown.test.get("plotly_chart"))
    figure.proto.spec += " " * MOST
    assert heaviest(shown)[0] > MOST
