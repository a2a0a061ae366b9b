"""Represents the place of a run: a local folder, or one in an object store, which readers use as any other path."""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath
from typing import IO, Any

from ampscope.errors import RunUnreachable
from ampscope.trace.object_store import Folder, ObjectState, RangedFile, Store, store_of, tree_of

#: A URL; pathlib leaves one slash of two.
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/(?P<both>/*)(?P<rest>[^/].*)", re.DOTALL)
_WITH_PASSWORD = re.compile(r"[^/]*:[^/]*@")
_RANK = re.compile(r"rank=[0-9]+")


class BucketPath(PosixPath):
    """A path in an object store, to be read. Its text is its URL.

    Methods because it stands wherever a `Path` does. Files below a run's ``rank=K`` are looked up in one listing of the
    run that holds for a moment; a part that is gone by then is a `FileNotFoundError`, as on a disk.
    """

    __slots__ = ()

    def __str__(self) -> str:
        """The URL; of a path from one place of a store to another, its names."""
        first, *rest = self.parts or (".",)
        return f"{first}//{'/'.join(rest)}" if self.is_absolute() else "/".join((first, *rest))

    def __repr__(self) -> str:
        """With the URL."""
        return f"BucketPath({str(self)!r})"

    @property
    def scheme(self) -> str:
        """The kind of store."""
        return self.parts[0].removesuffix(":")

    @property
    def store(self) -> Store:
        """The store, as readers share it.

        Raises:
            RunUnreachable: what it needs is not installed.
        """
        return store_of(self.scheme)

    def is_absolute(self) -> bool:
        """Whether it begins with the kind of store."""
        return self.parts[:1] != () and self.parts[0].endswith(":")

    def absolute(self) -> BucketPath:
        """Returns the path itself, which always is absolute."""
        return self

    def resolve(self, strict: bool = False) -> BucketPath:  # noqa: ARG002  # as of every path
        """There are no links."""
        return self

    def exists(self, *_: Any, **__: Any) -> bool:
        """Whether there is such an object, or one below it."""
        return self.is_file() or self.is_dir()

    def is_file(self, *_: Any, **__: Any) -> bool:
        """Whether there is such an object."""
        return self.state() is not None

    def is_dir(self, *_: Any, **__: Any) -> bool:
        """Whether there is an object below it."""
        root, inside = self._in_run()
        return bool(self.store.children(str(self))) if root is None else tree_of(root).folder(inside) is not None

    def state(self) -> ObjectState | None:
        """Size and age of the object; None where there is none."""
        root, inside = self._in_run()
        if root is None:
            return self.store.state(str(self))
        folder = tree_of(root).folder(inside.rpartition("/")[0])
        return folder.files.get(self.name) if folder is not None else None

    def listed(self) -> Folder | None:
        """Returns the listing of the folder of a run, or of one inside; None where there is no such folder."""
        root, inside = self._in_run()
        return tree_of(root if root is not None else str(self)).folder(inside if root is not None else "")

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:  # noqa: ARG002  # as of every path
        """Size and age of an object; of a folder when a look first found in it what is there now.

        Raises:
            FileNotFoundError: there is neither.
        """
        if (state := self.state()) is not None:
            return _as_stat(stat.S_IFREG, state.size, int(state.written * 1e9))
        if self._in_run()[0] is not None and (folder := self.listed()) is not None:
            return _as_stat(stat.S_IFDIR, 0, folder.changed_ns)
        raise FileNotFoundError(2, "there is no such object", str(self))

    def lstat(self) -> os.stat_result:
        """There are no links."""
        return self.stat()

    def iterdir(self) -> Generator[BucketPath, None, None]:
        """Yields the files and folders directly in it."""
        root, inside = self._in_run()
        if root is None:
            yield from (self / child.name for child in self.store.children(str(self)))
        elif (folder := tree_of(root).folder(inside)) is not None:
            yield from (self / name for name in (*folder.files, *sorted(folder.folders)))

    def glob(self, pattern: str, **_: Any) -> Generator[BucketPath, None, None]:
        """Yields the paths that match, name by name; ``**`` is not known."""
        first, rest = [*pattern.split("/", 1), ""][:2]
        is_name = not set(first) & set("*?[")
        for child in [self / first] if is_name else list(self.iterdir()):
            if not fnmatchcase(str(child.name), first):
                continue
            if rest:
                yield from child.glob(rest)
            elif not is_name or child.exists():
                yield child

    def open(self, mode: str = "r", *_: Any, **__: Any) -> IO[Any]:  # type: ignore[override]  # it is only read
        """To be read, in UTF-8 where it is text.

        Raises:
            FileNotFoundError: there is no such object.
            OSError: it was to be written.
        """
        if mode not in ("r", "rb"):
            raise OSError(30, "a run in an object store is only read", str(self))
        binary = io.BufferedReader(self.open_ranged())
        return binary if mode == "rb" else io.TextIOWrapper(binary, "utf-8")

    def open_ranged(self) -> RangedFile:
        """To be read in ranges.

        Raises:
            FileNotFoundError: there is no such object.
        """
        state = self.state()
        if state is None:
            self.forget()
            raise FileNotFoundError(2, "there is no such object", str(self))
        return RangedFile(str(self), state)

    def forget(self) -> None:
        """Look anew at the next question."""
        root, _ = self._in_run()
        if root is not None:
            tree_of(root).forget()

    def _in_run(self) -> tuple[str | None, str]:
        """Returns the run in whose ``rank=K`` this path lies, and the path inside the run."""
        for place, part in enumerate(self.parts[2:], 2):
            if _RANK.fullmatch(part):
                return str(BucketPath(*self.parts[:place])), "/".join(self.parts[place:])
        return None, ""


def location(told: str | os.PathLike[str]) -> Path:
    """Returns the path of a run that someone named: in an object store for a URL, else in a folder.

    Args:
        told: A path, a URL, or a path that pathlib made of a URL.

    Raises:
        RunUnreachable: the URL holds a password or a query, where secrets stand.
    """
    if isinstance(told, BucketPath):
        return told
    text = os.fspath(told)
    found = _URL.fullmatch(text)
    if found is None or (not found["both"] and Path(text).exists()):
        return Path(told)
    scheme, rest = found["scheme"], found["rest"]
    if _WITH_PASSWORD.match(rest) or "?" in rest or "#" in rest:
        raise RunUnreachable(
            f"{scheme}://... holds a user's password or a query. A run is named by its place alone; credentials are "
            "taken from the environment, as the store's own tools do."
        )
    if scheme in ("file", "local"):
        return Path("/" + rest)
    return BucketPath(f"{scheme}://{rest.rstrip('/')}")


def names_in(folder: Path) -> list[str]:
    """The names of all that lies in a folder of a run.

    Raises:
        FileNotFoundError: there is no such folder.
        OSError: it cannot be read.
    """
    if not isinstance(folder, BucketPath):
        with os.scandir(folder) as entries:  # names, not paths: a table of a long run has hundreds of parts
            return [entry.name for entry in entries]
    found = folder.listed()
    if found is None:
        raise FileNotFoundError(2, "there is no such folder", str(folder))
    return [*found.files, *found.folders]


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in a folder of a run.

    Raises:
        FileNotFoundError: there is no such folder.
        OSError: it cannot be read.
    """
    if not isinstance(folder, BucketPath):
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if _is_folder(entry)]
    found = folder.listed()
    if found is None:
        raise FileNotFoundError(2, "there is no such folder", str(folder))
    return list(found.folders)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def _as_stat(kind: int, size: int, changed_ns: int) -> os.stat_result:
    seconds = changed_ns / 1e9
    whole = (kind | 0o444, 0, 0, 1, 0, 0, size, int(seconds), int(seconds), int(seconds))
    times = {f"st_{name}time": seconds for name in "amc"} | {f"st_{name}time_ns": changed_ns for name in "amc"}
    return os.stat_result(whole, times)
