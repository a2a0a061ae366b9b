"""How a run is named: so that it can be typed, and told from the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.trace.location import location
from ampscope.trace.read.find import from_here, told_name


@pytest.mark.parametrize("name", ["ampscope", "_ampscope", "ampscope-2"])
def test_a_name_that_a_callback_gave_has_the_folder_around_it(name: str) -> None:
    assert told_name(Path("/logs/version_0") / name) == f"version_0/{name}"
    assert told_name(location("s3://bucket/version_0") / name) == f"version_0/{name}"


def test_any_other_is_told_as_it_was_given(tmp_path: Path) -> None:
    assert told_name(tmp_path / "gpt") == "gpt"
    assert told_name(tmp_path / "ampscope", "gpt") == "gpt"


def test_a_bare_name_is_told_as_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_here(tmp_path / "ampscope") == from_here(Path("ampscope")) == "./ampscope"
    assert from_here(tmp_path / "logs" / "ampscope") == "logs/ampscope"
    assert from_here(Path("/elsewhere/ampscope")) == "/elsewhere/ampscope"
    assert from_here(location("s3://bucket/ampscope")) == "s3://bucket/ampscope"
