"""Runs are found below folders and URLs, at any depth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ampscope.trace.read.find import runs_below
from tests.support.stores.buckets import memory_bucket, put_run
from tests.support.verdicts.fleet_builder import Trained, build


@pytest.fixture
def url() -> Iterator[str]:
    with memory_bucket() as bucket:
        yield bucket


def test_of_a_url_they_are_found_as_of_a_folder(url: str, tmp_path: Path) -> None:
    folder = build(tmp_path / "fleet", [Trained(), Trained(day=1)])
    (run, other) = runs_below([folder])
    put_run(run, f"{url}/a/b/c/d/one")
    put_run(other, f"{url}/two")
    one, two = f"{url}/a/b/c/d/one", f"{url}/two"
    assert [*map(str, runs_below([Path(url)]))] == [one, two]
    assert [*map(str, runs_below([Path(one), Path(url), folder]))] == [str(run), str(other), one, two]


def test_what_lies_in_a_run_is_no_run(tmp_path: Path) -> None:
    (run,) = runs_below([build(tmp_path, [Trained()])])
    build(run / "rank=0", [Trained()])
    assert runs_below([tmp_path]) == [run]
