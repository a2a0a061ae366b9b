"""A file served otherwise than it stands to one command, and to nothing else: nobody's file is written."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
