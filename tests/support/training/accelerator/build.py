"""Builds the fake accelerator once for each version of torch and of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_SOURCES = tuple(sorted(_HERE.glob("*.cpp")))
_TORCH = Path(torch.__file__).parent


class NoCompilerError(Exception):
    """There is no C++ compiler on this machine."""


def library() -> Path:
    """The shared library, compiled if it has not been.

    Raises:
        NoCompilerError: It would have to be, and cannot.
    """
    built = _cache() / f"fake-device-{torch.__version__}-{_digest()}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with built.with_suffix(".lock").open("w") as lock:  # the processes of one test run ask at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():
                _compile(built)
    return built


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ampscope-tests"


def _digest() -> str:
    """Of all that the result depends on, besides torch."""
    parts = [each.read_bytes() for each in (*_SOURCES, *_HERE.glob("*.h"), Path(__file__))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(built: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompilerError("there is no C++ compiler: install g++")
    unfinished = built.with_suffix(".unfinished")
    command = [compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-w"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-I{_TORCH / 'include'}"]
    command += [*map(str, _SOURCES), f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(unfinished)]
    subprocess.run(command, check=True)
    unfinished.replace(built)
