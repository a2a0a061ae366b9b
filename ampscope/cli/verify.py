"""``ampscope verify`` runs a command again with a remedy in it, and tells whether the failure has gone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ampscope.cli.fix import REMEDY, ROOT, changed_file, remedy_with_diff
from ampscope.cli.output import OF_OUTCOMES
from ampscope.cli.run_argument import complete_run
from ampscope.errors import AmpscopeError

#: Lies on the command's path: Python imports it at its start. The one that it hides is imported in its place.
_AT_START = """
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [_each for _each in sys.path if os.path.abspath(_each or ".") != _HERE]


def _serve():
    with open(os.path.join(_HERE, "path.txt"), "rb") as file:
        target = os.fsdecode(file.read())
    real = importlib.machinery.SourceFileLoader.get_code

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        try:
            is_it = os.path.samefile(path, target)
        except OSError:
            is_it = False
        if not is_it:
            return real(self, fullname)
        with open(os.path.join(_HERE, "content.py"), "rb") as file:
            content = file.read()
        open(os.path.join(_HERE, "served"), "w").close()
        import linecache
        linecache.cache[path] = len(content), None, importlib.util.decode_source(content).splitlines(True), path
        return self.source_to_code(content, path)

    importlib.machinery.SourceFileLoader.get_code = get_code


_serve()
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    sys.modules["sitecustomize"] = _module
    _hidden.loader.exec_module(_module)
"""
#: Stands in the command for the program, where the program itself is the changed file.
_PROGRAM = """
import importlib.util
import linecache
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(_here, "path.txt"), "rb") as _file:
    __file__ = os.fsdecode(_file.read())
with open(os.path.join(_here, "content.py"), "rb") as _file:
    _content = _file.read()
open(os.path.join(_here, "served"), "w").close()
sys.argv[0] = __file__
if os.path.abspath(sys.path[0] or ".") == _here:
    sys.path[0] = os.path.dirname(__file__)
linecache.cache[__file__] = len(_content), None, importlib.util.decode_source(_content).splitlines(True), __file__
_code = compile(_content, __file__, "exec", dont_inherit=True)
for _name in ("_here", "_file", "_content", "_name", "importlib", "linecache", "os", "sys"):
    globals().pop(_name, None)
exec(globals().pop("_code"))
"""


class Overlay:
    """A changed file, for the Python programs that one command starts.

    Args:
        folder: An empty folder, which stays until the command has ended.
        path: The file.
        content: What is to be read in its place.
    """

    def __init__(self, folder: Path, path: Path, content: bytes) -> None:
        self._folder = folder
        self._path = path
        (folder / "path.txt").write_bytes(os.fsencode(path))
        (folder / "content.py").write_bytes(content)
        (folder / "sitecustomize.py").write_text(_AT_START, "utf-8")
        (folder / "program.py").write_text(_PROGRAM, "utf-8")

    def command(self, command: Sequence[str]) -> list[str]:
        """The command with the changed file in it, where it names the file."""
        return [str(self._folder / "program.py") if self._is_it(word) else word for word in command]

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment in which imports find the changed file."""
        path = [str(self._folder), *filter(None, [environment.get("PYTHONPATH")])]
        return {**environment, "PYTHONPATH": os.pathsep.join(path)}

    @property
    def was_read(self) -> bool:
        """Whether a program has read the changed file."""
        return (self._folder / "served").exists()

    def _is_it(self, word: str) -> bool:
        try:
            return word.endswith(".py") and Path(word).samefile(self._path)
        except OSError:
            return False


def named_python(command: Sequence[str]) -> list[str]:
    """The command with this Python, where it begins with a plain ``python``: that may be another one, or none."""
    return [sys.executable, *command[1:]] if command[0] in ("python", "python3") else list(command)


def verify(
    run: Annotated[
        Path,
        typer.Argument(
            help="The folder of the run that went wrong, as printed when the training began.",
            autocompletion=complete_run,
        ),
    ],
    command: Annotated[list[str], typer.Argument(help="The command that trained it, after --.")],
    remedy: REMEDY = None,
    root: ROOT = Path(),
) -> None:
    """Run a training again with a remedy in it, and say whether it cures it: for bug reports and CI.

    No file is changed: the command reads the changed one in the place of yours, and records a run of its own beside
    RUN. Healing is off. The exit code is 0 if the failure has gone, nothing new is wrong, and loss and gradient norm
    are of the size that they had before it; 1 if not, 2 if that could not be found out.
    """
    from ampscope.analysis.diagnosis.diagnosis import diagnose
    from ampscope.analysis.diagnosis.verified import sizes, verified
    from ampscope.report.safe_text import visible
    from ampscope.trace.read.run import open_run
    from ampscope.trace.schema import MANIFEST
    from ampscope.trace.vocabulary import VERIFY_FOLDER

    chosen = remedy_with_diff(run, remedy, root)
    source, content = changed_file(chosen.diff or "", root)
    before, folder = diagnose(run), _free(run)
    typer.echo(f"ampscope: running it with this remedy: {visible(chosen.text)}", err=True)
    with tempfile.TemporaryDirectory(prefix="ampscope-verify-") as holder:
        overlay = Overlay(Path(holder), source.path, content)
        environment = overlay.environment({**os.environ, VERIFY_FOLDER: str(folder.absolute())})
        code = _run(overlay.command(named_python(command)), environment)
        if not overlay.was_read:
            raise AmpscopeError(f"the command ended with exit code {code} and has not loaded {source.path}")
    if not (folder / MANIFEST).exists():
        raise AmpscopeError(f"the command ended with exit code {code} and has recorded no run: it watches no model")
    with open_run(run) as first, open_run(folder) as again:
        assert before.primary is not None, "a run without a failure has no remedy"
        outcome, told = verified(before, diagnose(again), sizes(first, again, before.primary), code)
    typer.echo(f"ampscope: {visible(told)} Look: ampscope diagnose {visible(str(folder))}")
    raise typer.Exit(OF_OUTCOMES[outcome])


def _run(command: list[str], environment: dict[str, str]) -> int:
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        raise AmpscopeError(f"cannot run {command[0]}: {error.strerror or error}") from None


def _free(run: Path) -> Path:
    """A folder beside a run that is not there yet."""
    number = 1
    while (folder := run.absolute().with_name(f"{run.absolute().name}-verified-{number}")).exists():
        number += 1
    return folder
