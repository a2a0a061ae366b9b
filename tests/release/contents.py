"""What the archives that are released hold: ``contents.py dist``; see ``make dist``.

The wheel holds the package, its types' marker and the app, and nothing that only a checkout needs. The sdist holds each
file that git knows, but for what runs a repository. The wheel that is built of the sdist is the one that is built of
the checkout, file by file.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
#: What a wheel without does not work.
NEEDED = ("ampscope/__init__.py", "ampscope/py.typed", "ampscope/cli/main.py", "ampscope/_app/streamlit_app.py")
#: What no archive holds.
NOWHERE = (
    "__pycache__",
    ".git",
    ".venv",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "node_modules",
    "ampscope_runs",
)
#: What of a repository is not released.
_ONLY_HERE = (".ci", ".github")


def wrong_in_wheel(names: Iterable[str]) -> Iterator[str]:
    """What is amiss with the files of a wheel."""
    found = set(names)
    yield from (f"{name} is missing" for name in NEEDED if name not in found)
    for name in sorted(found):
        first = PurePosixPath(name).parts[0]
        if first != "ampscope" and not first.endswith(".dist-info"):
            yield f"{name} is no part of the package"
        yield from _stray(name)


def wrong_in_sdist(names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """What is amiss with the files of an sdist, named without its own folder, where git knows these."""
    found = set(names)
    yield from (f"{name} is missing" for name in sorted(set(known) - found))
    for name in sorted(found):
        yield from _stray(name)


def different(one: dict[str, int], other: dict[str, int]) -> list[str]:
    """The files of two wheels, by name and checksum, that are not the same."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _stray(name: str) -> Iterator[str]:
    if any(part in NOWHERE for part in PurePosixPath(name).parts) or name.endswith((".pyc", ".orig", ".rej", "~")):
        yield f"{name} is a leftover"


def _checksums(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as files:
        return {each.filename: each.CRC for each in files.infolist()}


def main(folder: Path) -> None:
    [wheel], [sdist], [direct] = folder.glob("*.whl"), folder.glob("*.tar.gz"), folder.glob("direct/*.whl")
    with tarfile.open(sdist) as files:
        names = [each.name.partition("/")[2] for each in files.getmembers() if each.isfile()]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = [name for name in listed.splitlines() if PurePosixPath(name).parts[0] not in _ONLY_HERE]
    wrong = [*wrong_in_wheel(_checksums(wheel)), *wrong_in_sdist(names, known)]
    wrong += [
        f"{name} of the wheel depends on where it is built" for name in different(_checksums(wheel), _checksums(direct))
    ]
    sys.stdout.write("".join(f"{line}\n" for line in wrong) or f"{wheel.name} and {sdist.name} hold what they should\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
