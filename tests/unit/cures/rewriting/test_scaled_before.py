"""A product whose factor is scaled before it, in its line or above, and one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.analysis.cures.advised_diffs import is_scaled_before
from ampscope.analysis.results import CodeLine
from ampscope.cures.rewriting.source_file import files_below


@pytest.mark.parametrize(
    ("body", "is_scaled"),
    [
        ("y = q @ k.mT", False),
        ("y = (q @ k.mT) * 0.125", False),
        ("y = (q * 0.125) @ k.mT", True),
        ("y = torch.matmul(q, k.mT / q.shape[-1] ** 0.5)", True),
        ("y = (q * self.scale) @ k.mT", True),
        ("q = q * self.scale\ny = q @ k.mT", True),
        ("q *= q.size(-1) ** -0.5\ny = q @ k.mT", True),
        ("k = k / 8\ny = q.bmm(k.transpose(-2, -1))", True),
        ("q = q * mask\ny = q @ k.mT", False),
        ("y = q @ k.mT\nq = q * 8", False),
        ("v = v * 8\ny = q @ k.mT", False),
        ("y = model(q)", False),
    ],
)
def test_a_factor_is_scaled_before_its_product(tmp_path: Path, body: str, is_scaled: bool) -> None:
    lines = ["import torch", "def attend(self, q, k, v, mask):", *(f"    {row}" for row in body.split("\n"))]
    (tmp_path / "net.py").write_text("\n".join(lines) + "\n")
    number = next(at for at, row in enumerate(lines, start=1) if row.strip().startswith("y = "))
    with files_below(tmp_path):
        assert is_scaled_before(CodeLine("net.py", number, lines[number - 1].strip())) == is_scaled


def test_without_the_file_the_line_alone_tells(tmp_path: Path) -> None:
    with files_below(tmp_path):
        assert is_scaled_before(CodeLine("gone.py", 3, "y = (q / 8) @ k.mT"))
        assert not is_scaled_before(CodeLine("gone.py", 3, "y = q @ k.mT"))
