"""Whether the remedies that AMPscope writes into a program cure it: each program trained, fixed, and trained again.

    python benchmarks/remedies/cures.py [--plants] [FOLDER_OR_FILE...]

A case is a file with a function ``train(watch)`` that builds a model, calls ``watch(model, scaler)`` and trains; it may
fail by raising. ``--plants`` adds the planted faults of the tests, each in one model. Every program is copied into a
folder of its own, trained there in a process of its own, and diagnosed. Each remedy that is a change of its lines is
made mechanically (`ampscope fix --apply --remedy N`) in a copy of its own, which is trained and diagnosed again.
Programs in which nothing is wrong are left out. The first table has what became of each change, the second, per
kind of remedy, how many were tried on the step, cured it, and changed values that were good, how many were pasted, and
with how many of those the training was healthy to its end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).parents[2]
#: Stands beside the copy of a case: the call of ``watch`` is part of the program, too.
_CASE = """import contextlib
import sys

import ampscope
import CASE as case


def watch(model, scaler):
    case.scope = ampscope.watch(model, scaler, dir=sys.argv[1])


with contextlib.suppress(Exception):
    case.train(watch)
if getattr(case, "scope", None) is not None:
    case.scope.close()
"""
#: The same of a plant, whose training calls ``watch`` itself.
_PLANT = """import sys
from pathlib import Path

from tests.integration.planted_faults.models import ARCHITECTURES
from tests.integration.planted_faults.table import PLANTS
from tests.integration.planted_faults.training import train_planted

plant = PLANTS[NUMBER]
fitting = [where for where in ARCHITECTURES if plant.fits(where)]
train_planted(fitting[NUMBER % len(fitting)], plant.dtypes[0], plant, Path(sys.argv[1]))
"""
_SECONDS = 300
_NOT_MADE = "not made"


class Program(NamedTuple):
    """Something that trains."""

    name: str
    write: Callable[[Path], object]  #: puts its files into a folder, with what runs it as ``run.py``


class Pasted(NamedTuple):
    """A remedy that was made in a copy of its program."""

    kind: str
    tried: bool | None  #: what a replay had said of it
    after: str  #: the verdict on the training with it, or the cause if there is one


class Result(NamedTuple):
    """What became of one program."""

    name: str
    cause: str
    remedies: list[dict[str, Any]]  #: all that were told, as the JSON has them
    pasted: list[Pasted]

    @property
    def is_cured(self) -> bool:
        """Whether nothing was wrong any more with the first change of the program's own lines."""
        return bool(self.pasted) and self.pasted[0].after == "healthy"


def cases(paths: list[Path]) -> Iterator[Program]:
    """Every file with a training in it."""
    for path in paths:
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            if "\ndef train(watch" in file.read_text("utf-8"):
                yield Program(file.stem, partial(_write_case, file))


def _write_case(file: Path, folder: Path) -> None:
    shutil.copyfile(file, folder / f"case_{file.stem}.py")
    (folder / "run.py").write_text(_CASE.replace("CASE", f"case_{file.stem}"))


def plants() -> Iterator[Program]:
    """Every planted fault, in one model that it fits and in one dtype."""
    sys.path.insert(0, str(_ROOT))
    from tests.integration.planted_faults.table import PLANTS  # needs transformers

    for number, plant in enumerate(PLANTS):
        yield Program(str(plant), partial(_write_plant, number))


def _write_plant(number: int, folder: Path) -> None:
    inside = Path("tests/integration/planted_faults")
    shutil.copytree(_ROOT / inside, folder / inside, ignore=shutil.ignore_patterns("__pycache__"))
    for package in (folder / "tests", folder / "tests/integration"):
        (package / "__init__.py").touch()
    (folder / "run.py").write_text(_PLANT.replace("NUMBER", str(number)))


def examined(program: Program, folder: Path) -> Result | None:
    """A program trained, and trained again with each change of its lines; None where nothing was wrong with it.

    Args:
        program: What trains.
        folder: An empty one for its copies and their runs.
    """
    first = folder / "0"
    first.mkdir()
    program.write(first)
    primary = _diagnosed(first, "before").get("primary")
    if primary is None:
        return None
    remedies: list[dict[str, Any]] = primary["remedies"]
    changes = [number for number, each in enumerate(remedies, 1) if each["diff"] and each["verified"] is not False]
    pasted = [_pasted(first, folder / str(number), number, remedies[number - 1]) for number in changes]
    return Result(program.name, primary["cause"], remedies, pasted)


def _pasted(first: Path, copy: Path, number: int, remedy: dict[str, Any]) -> Pasted:
    shutil.copytree(first, copy)
    kind, tried = _kind(remedy), remedy["verified"]
    fixed = _ampscope(copy, "fix", "before", "--apply", "--remedy", str(number))
    if fixed.returncode:
        return Pasted(kind, tried, f"{_NOT_MADE}: {' '.join(fixed.stderr.split())}")
    second = _diagnosed(copy, "after")
    left = second.get("primary")
    verdict = second.get("verdict", "no run")
    return Pasted(kind, tried, f"{verdict}: {left['cause']}" if left else verdict)


def _kind(remedy: dict[str, Any]) -> str:
    return remedy["kind"] or "advice"


def _diagnosed(folder: Path, run: str) -> dict[str, Any]:
    _python(folder, "run.py", run)
    said: dict[str, Any] = json.loads(_ampscope(folder, "diagnose", run, "--json").stdout or "{}")
    return said


def _ampscope(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _python(folder, "-m", "ampscope", *arguments)


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)


def by_kind(results: list[Result]) -> list[tuple[str, int, int, int, int, int]]:
    """Of each kind of remedy: tried, cured, changed good values, pasted, healthy to the end; most tried first."""
    told = [each for result in results for each in result.remedies]
    pasted = [each for result in results for each in result.pasted if not each.after.startswith(_NOT_MADE)]
    rows = []
    for kind in dict.fromkeys([*map(_kind, told), *(each.kind for each in pasted)]):
        of_kind = [each for each in told if _kind(each) == kind]
        made = [each for each in pasted if each.kind == kind]
        counts = (
            sum(each["verified"] is not None for each in of_kind),
            sum(each["verified"] is True for each in of_kind),
            sum(each["changes_good_values"] is True for each in of_kind),
            len(made),
            sum(each.after == "healthy" for each in made),
        )
        rows.append((kind, *counts))
    return sorted((row for row in rows if any(row[1:])), key=lambda row: (-row[1], -row[4]))


_TRIED = {True: "cures the step", None: "not tried", False: "in vain"}
_ROW = "{:44} {:30} {:16} {:15} {}".format
_COUNTS = "{:20} {:>6} {:>6} {:>20} {:>7} {:>18}".format


def main() -> int:
    """Prints the tables; exit code 0 if every first change that was made cured its program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="folders of cases, or cases")
    parser.add_argument("--plants", action="store_true", help="the planted faults of the tests, too")
    asked = parser.parse_args()
    results: list[Result] = []
    print(_ROW("program", "cause", "change", "replay", "trained again"))
    for program in [*cases(asked.paths), *(plants() if asked.plants else ())]:
        with tempfile.TemporaryDirectory() as folder:
            result = examined(program, Path(folder))
        if result is not None:
            results.append(result)
            for each in result.pasted or [Pasted("", None, "")]:
                tried = _TRIED[each.tried] if each.kind else ""
                print(_ROW(result.name, result.cause, each.kind, tried, each.after), flush=True)
    print()
    print(_COUNTS("remedy", "tried", "cured", "changed good values", "pasted", "healthy to the end"))
    for row in by_kind(results):
        print(_COUNTS(*row))
    made = [each for each in results if each.pasted]
    healthy = sum(each.is_cured for each in made)
    print(f"{len(made)} of {len(results)} problems have a change of their own lines; {healthy} are cured by the first")
    return 0 if healthy == len(made) else 1


if __name__ == "__main__":
    sys.exit(main())
