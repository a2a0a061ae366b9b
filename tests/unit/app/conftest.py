"""Pages are run without a browser on the scenes, with verdicts written by hand unless a test asks for the real ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.support.page_reading import Show, Shown
from tests.support.scenes import write_scenes
from tests.support.verdicts.of_scenes import diagnosis_of

st = pytest.importorskip("streamlit", reason="needs the app's extra: pip install 'ampscope[app]'")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every scene; tests only read it."""
    return write_scenes(tmp_path_factory.mktemp("runs"))


@dataclass
class Drawn:
    """What this process has drawn for tests that only read."""

    pages: dict[tuple[object, ...], Shown] = field(default_factory=dict)  #: by what was asked for
    real: bool | None = None  #: whose verdicts the app's results are made of; None where a test may have left others


@pytest.fixture(scope="session")
def drawn() -> Drawn:
    return Drawn()


@pytest.fixture
def show(runs: Path, drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Run a page: ``show("overflow", "incident", incident=...)``."""
    monkeypatch.setenv("AMPSCOPE_RUNS", str(runs))
    st.cache_resource.clear()
    drawn.real = None
    return partial(_draw, monkeypatch)


@pytest.fixture
def seen(runs: Path, drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Is `show` for tests that only read a page of a scene: what was drawn for one of them is not drawn again."""
    monkeypatch.setenv("AMPSCOPE_RUNS", str(runs))

    def page(run: str, page: str = "overview", *, real: bool = False, **query: str) -> Shown:
        asked = (run, page, real, *sorted(query.items()))
        if asked not in drawn.pages:
            if drawn.real is not real:
                st.cache_resource.clear()
                drawn.real = real
            drawn.pages[asked] = _draw(monkeypatch, run, page, real=real, **query)
        return drawn.pages[asked]

    return page


def _draw(
    patch: pytest.MonkeyPatch, run: str | None = None, page: str = "overview", *, real: bool = False, **query: str
) -> Shown:
    from data import run_results

    if not real:
        patch.setattr(run_results, "diagnose", lambda run: diagnosis_of(run.path))
    return Shown.of(page, {**query, **({"run": run} if run else {})})
