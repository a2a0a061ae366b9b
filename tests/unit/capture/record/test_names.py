"""Names of files and folders: each is one on every system, Windows' among them."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest

from ampscope.capture.record import run_folder
from ampscope.trace.files.folder_lock import LOCK_FILE
from ampscope.trace.files.layout import TEMPORARY_SUFFIX, Span, journal_path, span_path, table_folder
from ampscope.trace.files.saved_operands import operands_path
from ampscope.trace.schema import MANIFEST, Table

#: Of a run in the longest folder that Windows lets one have without being asked for more, the longest path.
LONGEST = 260
NAMES = [
    Path(MANIFEST),
    Path("rank=0", LOCK_FILE),
    *(table_folder(Path(), 131_071, table) for table in Table),
    journal_path(table_folder(Path(), 131_071, Table.SCALER_EVENTS), 999_999),
    span_path(table_folder(Path(), 131_071, Table.SCALER_EVENTS), Span(999_998, 999_999, 3)),
    operands_path(Path(), 131_071, 999_999, 999_999),
]


def is_a_name(name: str) -> bool:
    """Whether a file may be called so on Windows."""
    is_plain = not any(each in '<>:"/\\|?*' or ord(each) < 32 for each in name)
    return is_plain and name == name.rstrip(". ") and not PureWindowsPath(name).is_reserved()


@pytest.mark.parametrize("path", NAMES, ids=str)
def test_of_a_run(path: Path) -> None:
    assert all(is_a_name(part) for part in PurePosixPath(path).parts)
    assert len(str(path)) + len(TEMPORARY_SUFFIX) < LONGEST // 2


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("GPT", "GPT"),
        ("Wrapped[GPT, int]", "Wrapped-GPT-int"),
        ("../../etc", "etc"),
        ("a:b\\c*?", "a-b-c"),
        ("Netz\u00e4", "Netz\u00e4"),
        ("...", "model"),
        ("", "model"),
        ("x" * 500, "x" * 60),
    ],
)
def test_of_a_runs_folder(model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_folder._in_a_name(model) == name
    monkeypatch.chdir(tmp_path)
    folder = run_folder._claimed(run_folder._in_a_name(model))
    assert is_a_name(folder.name)
    assert folder.parent == run_folder.DEFAULT_FOLDER


@pytest.mark.parametrize("name", ["con", "NUL.txt", "a:b", "a.", "a ", "tab\t"])
def test_a_name_that_is_none_is_found(name: str) -> None:
    assert not is_a_name(name)
