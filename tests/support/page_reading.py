"""Reads what a page says, as a person would: the words, not the elements."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from streamlit.testing.v1 import AppTest

from tests.support.paths import APP

_TAG = re.compile(r"<(style>.*?</style|[^>]*)>", re.DOTALL)


def _read_as(tag: re.Match[str]) -> str:
    """What separates words; where a line may break is no such place."""
    return "" if tag[1] == "wbr" else " "


class Shown:
    """A page after it was run."""

    def __init__(self, test: AppTest) -> None:
        self.test = test
        assert not test.exception, [one.message for one in test.exception]

    @classmethod
    def of(cls, page: str, query: dict[str, str]) -> Shown:
        """Draws a page as a link to it does that is opened in a new tab: no other page is drawn before."""
        test = AppTest.from_file(APP / "workbench.py", default_timeout=60)
        for name, value in query.items():
            test.query_params[name] = value
        if page != "overview":
            test.switch_page(f"app_pages/{page}.py")
        test.run()
        return cls(test)

    @property
    def raw(self) -> list[str]:
        """The HTML that the page inserts, as it is."""
        return [str(one.proto.body) for one in self._of("html")]

    @property
    def words(self) -> str:
        """Everything that can be read on the page, in order."""
        return "\n".join(self._words(self.test.main))

    @property
    def side(self) -> str:
        """Everything that can be read in the side bar."""
        return "\n".join(self._words(self.test.sidebar))

    @property
    def figures(self) -> list[str]:
        """The figures as JSON."""
        return [str(one.proto.spec) for one in self._of("plotly_chart")]

    @property
    def tables(self) -> dict[str, list[dict[str, str]]]:
        """The rows of each table, in words, by what it shows."""
        return {
            table["label"]: [dict(zip(table["columns"], map(_cell_words, row), strict=True)) for row in table["rows"]]
            for table in self._tables()
        }

    @property
    def ways(self) -> dict[str, dict[str, str]]:
        """Of each table, where its rows lead, by their first cell; the first of several."""
        return {
            table["label"]: {
                _cell_words(row[0]): way for row, way in reversed([*zip(table["rows"], table["links"], strict=False)])
            }
            for table in self._tables()
        }

    def _tables(self) -> Iterator[dict[str, Any]]:
        return (table for table in map(_table_of, self._of("bidi_component")) if table)

    @property
    def address(self) -> dict[str, str]:
        """The query of the page's address."""
        query = self.test.query_params.items()
        return {name: value[0] if isinstance(value, list) else value for name, value in query}

    @property
    def links(self) -> dict[str, str]:
        """The query of each link on the page, by its label."""
        return {one.proto.label: one.proto.query_string for one in self.test.main.get("page_link")}

    @property
    def pages(self) -> dict[str, str]:
        """The query of each page's link in the side bar, by its title."""
        return {one.proto.label: one.proto.query_string for one in self.test.sidebar.get("page_link")}

    def _of(self, kind: str) -> list[Any]:
        return list(self.test.get(kind))

    def _words(self, block: Any) -> Iterator[str]:
        for child in block:
            yield from _words_of(child)


#: ``show("overflow", "incident", incident=...)`` runs a page.
Show = Callable[..., Shown]


def _table_of(element: Any) -> dict[str, Any]:
    """What a table of ours was given; empty for another component."""
    told = json.loads(element.proto.json) if element.proto.json else None
    return told if isinstance(told, dict) and "columns" in told and "folds" in told else {}


def _cell_words(cell: str | list[Any]) -> str:
    return cell if isinstance(cell, str) else str(cell[0])


def _words_of(element: Any) -> Iterator[str]:
    proto = getattr(element, "proto", None)
    if element.type == "bidi_component" and (table := _table_of(element)):
        yield " ".join(table["columns"])
        yield from (" ".join(map(_cell_words, row)) for row in table["rows"])
    for name in ("label", "body", "code_text"):
        text = getattr(proto, name, None)
        if isinstance(text, str) and text:
            yield html.unescape(_TAG.sub(_read_as, text)) if element.type == "html" else text
