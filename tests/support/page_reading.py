"""Reads what a page says, as a person would: the words, not the elements."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from typing import Any

from streamlit.testing.v1 import AppTest

from tests.support.paths import APP

_TAG = re.compile(r"<(style>.*?</style|[^>]*)>", re.DOTALL)


class Shown:
    """A page after it was run."""

    def __init__(self, test: AppTest) -> None:
        self.test = test
        assert not test.exception, [one.message for one in test.exception]

    @classmethod
    def of(cls, page: str, query: dict[str, str]) -> Shown:
        test = AppTest.from_file(APP / "workbench.py", default_timeout=30)
        for name, value in query.items():
            test.query_params[name] = value
        test.run()
        if page != "overview":
            for name, value in query.items():  # a change of page drops them, a link sets them
                test.query_params[name] = value
            test.switch_page(f"app_pages/{page}.py").run()
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


def _words_of(element: Any) -> Iterator[str]:
    proto = getattr(element, "proto", None)
    for name in ("label", "body", "code_text"):
        text = getattr(proto, name, None)
        if isinstance(text, str) and text:
            yield html.unescape(_TAG.sub(" ", text)) if element.type == "html" else text
