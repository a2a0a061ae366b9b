"""What README and guides show runs: each block in a folder of its own, as it stands there."""

from __future__ import annotations

import contextlib
import io
import runpy
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ampscope.cli import view
from ampscope.cli.main import app
from ampscope.trace.read.find import find_runs
from tests.docs.blocks import Block, blocks, blocks_of
from tests.docs.setups import SCRIPTS, SETUPS

BLOCKS = blocks()
RUN = [block for block in BLOCKS if block.how == "setup" or not block.how]
#: Exit codes of a command that has done what it is for.
DONE = (0, 1)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # frameworks warn of much, to everybody


def test_every_block_says_how_it_is_run() -> None:
    assert [str(block) for block in BLOCKS if not block.how] == []
    assert [str(block) for block in RUN if block.what not in SETUPS] == []
    assert [str(block) for block in BLOCKS if block.how == "sample" and not (SCRIPTS / block.what).exists()] == []


def test_few_are_not_run_and_each_has_a_reason() -> None:
    left = Counter(block.how for block in BLOCKS)
    assert left["not run"] * 5 < len(BLOCKS)
    assert [str(block) for block in BLOCKS if block.how == "not run" and len(block.what) < 10] == []


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with cleaned_up(names):
        names.update(SETUPS[block.what]())
        if block.language == "bash":
            for line in block.text.splitlines():
                command(shlex.split(line, comments=True), monkeypatch)
        elif block.what == "pytest":
            as_test(block.text, names)
        else:
            Path("block.py").write_text(block.text, "utf-8")
            names.update(runpy.run_path("block.py", init_globals=names))


def command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a line of a shell does, in this process."""
    if not words:
        return
    if words[0] == "python":
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(words[1])
        close_all()
        return
    assert words[0] == "ampscope", words
    shown: list[Path | None] = []
    monkeypatch.setattr(view, "open_app", lambda folder, port: shown.append(folder))
    result = CliRunner().invoke(app, words[1:])
    assert isinstance(result.exception, SystemExit | None), f"{words}: {result.exception}"
    assert result.exit_code in DONE, f"{words}: {result.output}"
    assert words[1] != "view" or (len(shown) == 1 and find_runs(shown[0] or Path("ampscope_runs")))


def as_test(text: str, names: dict[str, Any]) -> None:
    """A test that is shown, run as one: the names that it leaves to the reader come before it."""
    here = f"import sys; globals().update(sys.modules[{__name__!r}].given)\n"
    globals()["given"] = {key: value for key, value in names.items() if not key.startswith("_")}
    Path("test_shown.py").write_text(here + text, "utf-8")
    options = ["-q", "-n0", "-p", "no:cacheprovider", "-c", "none.ini", "--rootdir", ".", "test_shown.py"]
    Path("none.ini").write_text("[pytest]\n", "utf-8")
    assert pytest.main(options) == 0


@contextlib.contextmanager
def cleaned_up(names: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    finally:
        close_all()
        names.get("close", lambda: None)()


def close_all() -> None:
    """Ends what a script has left to the end of its process."""
    from ampscope.capture.scope import open_scopes

    for scope in open_scopes():
        scope.close()


def test_a_block_without_a_comment_is_seen() -> None:
    (block,) = blocks_of("page.md", "text\n\n```python\nx\n```\n\n```text\ny\n```\n")
    assert (block.how, block.line, block.text) == ("", 4, "x\n")


def test_a_command_that_fails_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="There is no run"):
        command(["ampscope", "diagnose"], monkeypatch)
