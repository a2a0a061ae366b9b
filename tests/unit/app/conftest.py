"""Pages are run without a browser on the scenes, with verdicts written by hand unless a test asks for the real ones."""

from __future__ import annotations

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


@pytest.fixture
def show(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Run a page: ``show("overflow", "incident", incident=...)``."""
    from data import run_results

    monkeypatch.setenv("AMPSCOPE_RUNS", str(runs))
    st.cache_resource.clear()

    def page(run: str | None = None, page: str = "overview", *, real: bool = False, **query: str) -> Shown:
        if not real:
            monkeypatch.setattr(run_results, "diagnose", lambda run: diagnosis_of(run.path))
        return Shown.of(page, {**query, **({"run": run} if run else {})})

    return page
