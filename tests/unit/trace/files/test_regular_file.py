"""What a folder from elsewhere may hold in place of files: nothing of it makes a reader wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.overview.run_list import run_summaries
from ampscope.errors import RunDamaged
from ampscope.trace.files.folder_lock import LOCK_FILE
from ampscope.trace.files.layout import MOST_RANKS, rank_folder, ranks, table_folder
from ampscope.trace.files.saved_operands import read_operands
from ampscope.trace.files.whole_files import open_regular, read_regular
from ampscope.trace.manifest import Manifest, Segment, read_manifest, write_manifest
from ampscope.trace.read.run import find_runs, open_run, status_of
from ampscope.trace.schema import MANIFEST, Table
from tests.support.saved_operands import save
from tests.support.trace_builder import TraceBuilder

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs there")

Special = Callable[[Path], None]
SPECIALS: dict[str, Special] = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
}


@pytest.fixture(params=SPECIALS)
def special(request: pytest.FixtureRequest) -> Special:
    """Puts something that is no regular file into the place of a file."""

    def put(path: Path) -> None:
        path.unlink(missing_ok=True)
        SPECIALS[request.param](path)

    return put


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one step."""
    builder = TraceBuilder(tmp_path / "runs" / "one")
    builder.step()
    return builder.close()


def test_only_regular_files_are_opened(tmp_path: Path, special: Special) -> None:
    path = tmp_path / "it"
    special(path)
    with pytest.raises(OSError, match="no regular file"):
        open_regular(path)


def test_a_link_to_a_regular_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(b"content")
    (tmp_path / "link").symlink_to("it")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"


def test_what_is_larger_than_asked_for_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(b"12345")
    assert read_regular(tmp_path / "it", 5) == b"12345"
    with pytest.raises(OSError, match="larger than the 4 bytes"):
        read_regular(tmp_path / "it", 4)


def test_a_manifest(run: Path, special: Special) -> None:
    special(run / MANIFEST)
    with pytest.raises(RunDamaged, match="no regular file"):
        read_manifest(run)
    (summary,) = run_summaries(find_runs(run.parent))
    assert "no regular file" in summary.problem


@pytest.mark.parametrize("name", ["part-000000.parquet", "journal-000001.arrow"])
def test_a_table(run: Path, special: Special, name: str) -> None:
    special(table_folder(run, 0, Table.STEPS) / name)
    with pytest.raises(RunDamaged, match=f"{name} cannot be read .it is no regular file"):
        diagnose(run)
    (summary,) = run_summaries([run])
    assert "no regular file" in summary.problem


def test_a_lock(run: Path, special: Special) -> None:
    special(rank_folder(run, 0) / LOCK_FILE)
    manifest = Manifest(segments=(Segment(started=1.0, pid=1),))
    assert status_of(run, manifest) == "interrupted"


def test_operands(run: Path, special: Special) -> None:
    path = save(run)
    saved = read_operands(path)
    special(path)
    for read in (saved.content, lambda: read_operands(path)):
        with pytest.raises(RunDamaged, match="no regular file"):
            read()


def test_a_file_where_a_table_belongs(run: Path) -> None:
    table_folder(run, 0, Table.GRADS).write_text("not a folder")
    with pytest.raises(RunDamaged, match="grads is no folder that can be read"):
        diagnose(run)


def test_only_folders_of_possible_ranks_are_ranks(run: Path) -> None:
    for name in (f"rank={MOST_RANKS}", "rank=99999999999999", "rank=\u0661", "rank=01", "rank=x"):
        (run / name).mkdir()
    (run / "rank=1").write_text("not a folder")
    (run / "rank=2").symlink_to("rank=2")
    (run / f"rank={MOST_RANKS - 1}").mkdir()
    assert ranks(run) == [0, MOST_RANKS - 1]


@pytest.mark.parametrize("size", [0, -1, MOST_RANKS + 1, 10**12])
def test_a_world_that_cannot_be(run: Path, size: int) -> None:
    write_manifest(run, Manifest(world_size=size))
    with pytest.raises(RunDamaged, match=f"'world_size' is not between 1 and {MOST_RANKS}"):
        open_run(run)
