"""Several changes of one file as one diff, wherever they stand; none where they touch."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.cures.rewriting.edit import applied, diff_of, joined
from ampscope.cures.rewriting.source_file import files_below, read

TEXT = "import os\na = 1\nb = 2\nc = 3\n"


def together(root: Path, *texts: str | None, file: str = "net.py") -> str | None:
    """The file with all the changes that make these of it."""
    (root / "net.py").write_text(TEXT)
    diffs = [diff_of(TEXT, text, file) if text is not None else None for text in texts]
    with files_below(root):
        diff, source = joined(diffs), read(root / "net.py")
    assert source is not None
    return applied(diff, source) if diff else None


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        ([("a = 1", "a = 10")], "import os\na = 10\nb = 2\nc = 3\n"),
        ([("a = 1", "a = 10"), ("b = 2", "b = 20")], "import os\na = 10\nb = 20\nc = 3\n"),
        (
            [("c = 3", "c = 30"), ("import os", "import os\nimport torch")],
            "import os\nimport torch\na = 1\nb = 2\nc = 30\n",
        ),
        (
            [("a = 1", "a = 10"), ("import os", "import torch\nimport os"), ("import os", "import torch\nimport os")],
            "import torch\nimport os\na = 10\nb = 2\nc = 3\n",
        ),
        ([("a = 1", "a = 10"), ("a = 1", "a = 11")], None),
        ([("a = 1\nb = 2", "x = 0"), ("b = 2", "b = 20")], None),
    ],
)
def test_changes_that_are_apart_are_made_together(
    tmp_path: Path, changes: list[tuple[str, str]], after: str | None
) -> None:
    assert together(tmp_path, *(TEXT.replace(was, now) for was, now in changes)) == after


def test_one_that_is_missing_leaves_none(tmp_path: Path) -> None:
    assert together(tmp_path, TEXT.replace("1", "10"), None) is None
    assert together(tmp_path, None) is None
    assert together(tmp_path) is None


def test_a_file_that_is_not_at_hand_is_not_guessed(tmp_path: Path) -> None:
    other = [TEXT.replace("1", "10"), TEXT.replace("2", "20")]
    assert together(tmp_path, *other, file="elsewhere.py") is None
