"""A real browser on the real app; where there is no browser, these tests are skipped unless they are required."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.integration.browser.watched import Watched

REQUIRED = os.environ.get("AMPSCOPE_REQUIRE_BROWSER") == "1"


def _unavailable(reason: str) -> None:
    if REQUIRED:
        pytest.fail(f"AMPSCOPE_REQUIRE_BROWSER=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """Chromium, headless."""
    try:
        from playwright.sync_api import Error

        from tests.integration.browser.driver import browse
    except ImportError:
        _unavailable("playwright is not installed: pip install playwright")
    opened = browse()
    try:
        chromium = opened.__enter__()
    except Error as error:
        _unavailable(f"no Chromium could be started: {str(error).splitlines()[0]}")
    yield chromium
    opened.__exit__(None, None, None)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every scene."""
    from tests.support.scenes import write_scenes

    return write_scenes(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def address(runs: Path, browser: object) -> Iterator[str]:
    """Where the app is served, with the real diagnosis."""
    from tests.integration.browser.driver import serve

    with serve(runs) as served:
        yield served


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    """A page whose complaints are kept."""
    from tests.integration.browser.watched import Watched

    page = browser.new_page(viewport={"width": 1280, "height": 900})
    yield Watched(page)
    page.close()
