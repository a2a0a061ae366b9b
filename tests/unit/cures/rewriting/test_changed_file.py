"""A change as a diff of a file that is at hand, and the diff applied: each line where it stood, or not at all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ampscope.analysis.cures import own_words
from ampscope.analysis.results import CodeLine, FormTried, SourceLine
from ampscope.cures.rewriting.edit import applied, file_of, first_line
from ampscope.cures.rewriting.source_file import files_below, read, source_file, statement_at
from ampscope.trace.schema import Form

PROGRAM = '''"""A program."""
from __future__ import annotations

import torch.nn as nn


class Net(nn.Module):
    def forward(self, p, m):
        if m.any(): p = p + 1
        loss = (
            p.masked_fill(m, -1e9)
            .log()  # a comment
            .mean()
        )
        return loss
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(PROGRAM)
    return tmp_path


def bound(line: int, code: str, file: str = "net.py", call: str = "log") -> FormTried:
    place = SourceLine(file=file, line=line, function="f", code=code)
    return FormTried(form=Form.OPERAND_BOUND, call=call, source=place, argument=0, value=1e-4)


def test_the_whole_statement_is_read_from_the_file(root: Path) -> None:
    with files_below(root):
        diff = own_words.of_form(bound(12, ".log()  # a comment"))
    assert diff is not None
    assert [row for row in diff.splitlines() if row[0] in "+-"][2:] == [
        "-            p.masked_fill(m, -1e9)",
        "+            p.masked_fill(m, -1e9).clamp(min=1e-4)",
    ]


def test_what_is_not_at_hand_is_a_diff_of_the_recorded_line(tmp_path: Path) -> None:
    with files_below(tmp_path):
        assert own_words.of_form(bound(12, "y = p.log()")) == (
            "--- a/net.py\n+++ b/net.py\n@@ -12 +12 @@\n-y = p.log()\n+y = p.clamp(min=1e-4).log()\n"
        )
        assert own_words.of_form(bound(12, ".log()  # a comment")) is None


def test_an_import_that_is_missing_comes_with_it(root: Path) -> None:
    place = SourceLine(file="net.py", line=11, function="f", code="p.masked_fill(m, -1e9)")
    form = FormTried(form=Form.CONSTANT, call="masked_fill", source=place, argument=2, value=-65504.0, was=-1e9)
    with files_below(root):
        diff = own_words.of_form(form)
        source = read(root / "net.py")
    assert diff is not None
    assert source is not None
    text = applied(diff, source)
    assert text is not None
    assert text.splitlines()[1:4] == ["from __future__ import annotations", "import torch", ""]
    assert "p.masked_fill(m, torch.finfo(p.dtype).min)" in text


@pytest.mark.parametrize("taken", [True, False])
def test_a_name_that_the_program_uses_is_not_taken(tmp_path: Path, taken: bool) -> None:
    (tmp_path / "net.py").write_text(f"{'operand = 1' if taken else ''}\ny = (a - b).sqrt()\n")
    place = SourceLine(file="net.py", line=2, function="f", code="y = (a - b).sqrt()")
    with files_below(tmp_path):
        diff = own_words.of_form(FormTried(form=Form.SAFE_WHERE, call="sqrt", source=place, argument=0, value=1.0))
    assert (diff is None) == taken


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_a_diff_is_applied_and_nothing_else_changes(tmp_path: Path, end: str, last: bool, encoding: str) -> None:
    cookie = "# coding: latin-1\n" if encoding == "latin-1" else "#\n"
    text = f"{cookie}ä = 1\n\n\nx = p.log()" + ("\n" if last else "")
    content = text.replace("\n", end).encode(encoding)
    (tmp_path / "net.py").write_bytes(content)
    with files_below(tmp_path):
        diff = own_words.of_form(bound(5, "x = p.log()"))
        source = read(tmp_path / "net.py")
    assert diff is not None
    assert source is not None
    changed = applied(diff, source)
    assert changed is not None
    assert changed.encode(source.encoding) == content.replace(b"p.log", b"p.clamp(min=1e-4).log")


def test_the_diff_is_one_that_git_applies(root: Path) -> None:
    with files_below(root):
        diff = own_words.of_form(bound(12, ".log()  # a comment"))
        source = read(root / "net.py")
    assert diff is not None
    assert source is not None
    subprocess.run(["git", "apply", "-"], cwd=root, input=diff.encode(), check=True)
    assert (root / "net.py").read_text() == applied(diff, source)
    assert (file_of(diff), first_line(diff)) == ("net.py", 11)


def test_a_file_by_its_absolute_path_is_named_as_git_finds_it(root: Path) -> None:
    file = str(root.resolve() / "net.py")
    with files_below(root):
        diff = own_words.of_form(bound(12, ".log()  # a comment", file))
        source = read(root / "net.py")
    assert diff is not None
    assert source is not None
    subprocess.run(["git", "apply", "-"], cwd=root, input=diff.encode(), check=True)
    assert (root / "net.py").read_text() == applied(diff, source)
    assert file_of(diff) == "net.py"


def test_a_file_outside_of_the_folder_is_named_from_the_top(tmp_path: Path) -> None:
    file = tmp_path.resolve() / "net.py"
    file.write_text("y = p.log()\n")
    (tmp_path / "elsewhere").mkdir()
    with files_below(tmp_path / "elsewhere"):
        diff = own_words.of_form(bound(1, "y = p.log()", str(file)))
    assert diff is not None
    subprocess.run(["git", "apply", "--unidiff-zero", "-"], cwd=file.anchor, input=diff.encode(), check=True)
    assert file.read_text() == "y = p.clamp(min=1e-4).log()\n"


def test_a_diff_is_not_applied_to_other_lines(root: Path) -> None:
    with files_below(root):
        diff = own_words.of_form(bound(12, ".log()  # a comment"))
        assert diff is not None
        (root / "net.py").write_text("\n" + PROGRAM)
        source = read(root / "net.py")
    assert source is not None
    assert applied(diff, source) is None
    assert applied("no diff", source) is None


@pytest.mark.parametrize(
    "name",
    [
        "../net.py",
        "/etc/passwd",
        "sub/../../net.py",
        "net.txt",
        "",
        "net.py\n+++ b/x",
        "\x1b[2Jnet.py",
        "link.py",
        "dir.py",
        "linked/net.py",
        "gone.py",
        "<stdin>",
    ],
)
def test_only_plain_source_below_the_root_is_opened(root: Path, name: str) -> None:
    below = root / "below"
    below.mkdir()
    (below / "dir.py").mkdir()
    (below / "net.txt").write_text("x = p.log()\n")
    (below / "link.py").symlink_to(root / "net.py")
    (below / "linked").symlink_to(root)
    with files_below(below):
        assert source_file(CodeLine(name, 5, PROGRAM.splitlines()[4])) is None
        assert source_file(CodeLine(name, 1, "x = p.log()")) is None


def test_a_line_that_reads_otherwise_is_not_the_recorded_one(root: Path) -> None:
    with files_below(root):
        assert source_file(CodeLine("net.py", 15, "return loss")) is not None
        assert source_file(CodeLine("net.py", 14, "return loss")) is None
        assert source_file(CodeLine("net.py", 15, "return  loss")) is None
        assert source_file(CodeLine("net.py", 5, "")) is None
        assert source_file(CodeLine("net.py", 99, "return loss")) is None
        assert source_file(CodeLine("net.py", -1, "return loss")) is None
        assert source_file(CodeLine(str(root / "net.py"), 15, "return loss")) is not None


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (9, "if m.any(): p = p + 1"),
        (15, "return loss"),
        (8, "def forward(self, p, m):"),
    ],
)
def test_a_head_and_a_line_are_statements_of_their_own(root: Path, line: int, code: str) -> None:
    with files_below(root):
        found = statement_at(CodeLine("net.py", line, code))
    assert found is not None
    assert (found.first, found.last, found.code) == (line, line, code)
