"""Whether the first remedy that AMPscope writes into a program cures it: each case trained, fixed, and trained again.

    python benchmarks/cures.py FOLDER_OR_FILE...

A case is a file with a function ``train(watch)`` that builds a model, calls ``watch(model, scaler)`` and trains; it may
fail by raising. It is copied into a folder of its own, trained there in a process of its own, and diagnosed. The first
remedy that is a change of its lines (`ampscope fix --apply`) is made mechanically in the copy, which is trained and
diagnosed again. Cases in which nothing is wrong are left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

#: Stands beside the copy: the call of ``watch`` is part of the program, too.
_RUNNER = """import contextlib
import importlib
import sys

import ampscope

case = importlib.import_module(sys.argv[1])


def watch(model, scaler):
    case.scope = ampscope.watch(model, scaler, dir=sys.argv[2])


with contextlib.suppress(Exception):
    case.train(watch)
if getattr(case, "scope", None) is not None:
    case.scope.close()
"""
_SECONDS = 300


class Result(NamedTuple):
    """What became of one case."""

    case: str
    cause: str
    kind: str  #: of the remedy that was made; empty where none is a change of the case's lines
    tried: str  #: what a replay had said of it
    after: str  #: the verdict on the training with it, and the cause if there is one

    @property
    def is_cured(self) -> bool:
        """Whether nothing was wrong any more."""
        return self.after == "healthy"


def cases(paths: list[Path]) -> Iterator[Path]:
    """Every file with a training in it."""
    for path in paths:
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            if "\ndef train(watch" in file.read_text("utf-8"):
                yield file


def cured(case: Path, folder: Path) -> Result | None:
    """A case trained, fixed and trained again; None where nothing was wrong with it.

    Args:
        case: Its file.
        folder: An empty one for the copy and its runs.
    """
    copy = folder / f"case_{case.stem}.py"
    shutil.copyfile(case, copy)
    (folder / "run_case.py").write_text(_RUNNER)
    first = _diagnosed(folder, copy.stem, "before")
    primary = first.get("primary")
    if primary is None:
        return None
    changes = [each for each in primary["remedies"] if each["diff"] and each["verified"] is not False]
    if not changes:
        return Result(case.stem, primary["cause"], "", "", "")
    tried = {True: "cures the step", None: "not tried"}[changes[0]["verified"]]
    kind = changes[0]["kind"] or "usage"
    fixed = _ampscope(folder, "fix", "before", "--apply")
    if fixed.returncode:
        return Result(case.stem, primary["cause"], kind, tried, f"not made: {fixed.stderr.strip()}")
    second = _diagnosed(folder, copy.stem, "after")
    left = second.get("primary")
    return Result(case.stem, primary["cause"], kind, tried, left["cause"] if left else second.get("verdict", "no run"))


def _diagnosed(folder: Path, case: str, run: str) -> dict[str, Any]:
    _python(folder, "run_case.py", case, run)
    said: dict[str, Any] = json.loads(_ampscope(folder, "diagnose", run, "--json").stdout or "{}")
    return said


def _ampscope(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _python(folder, "-m", "ampscope", *arguments)


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)


def main() -> int:
    """Prints the table; exit code 0 if every change that was made cured its case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="folders of cases, or cases")
    results: list[Result] = []
    row = "{:44} {:28} {:16} {:15} {}".format
    print(row("case", "cause", "change", "replay", "trained again"))
    for case in cases(parser.parse_args().paths):
        with tempfile.TemporaryDirectory() as folder:
            result = cured(case, Path(folder))
        if result is not None:
            results.append(result)
            print(row(*result), flush=True)
    made = [each for each in results if each.kind]
    healthy = sum(each.is_cured for each in made)
    print(
        f"{len(made)} of {len(results)} problems have a change of their own lines; {healthy} of those are cured by it"
    )
    return 0 if healthy == len(made) else 1


if __name__ == "__main__":
    sys.exit(main())
