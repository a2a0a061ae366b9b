"""Lists all files of a run in an object store once for all its tables, and keeps the listing for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ampscope.trace.remote.store import ObjectState, store_of

#: Seconds for which a listing holds.
HOLDS_S = 2.0
#: Runs whose listings are kept.
_MOST_KEPT = 256


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a run at the last look."""

    files: Mapping[str, ObjectState] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()
    changed_ns: int = 0  #: when a look first found it so, nanoseconds of the unix time


class Tree:
    """The objects of one run.

    Args:
        url: The run.
        now: A clock, seconds.
    """

    def __init__(self, url: str, now: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._now = now
        self._looked: float | None = None
        self._folders: dict[str, Folder] = {}
        self._lock = threading.Lock()

    def folder(self, path: str) -> Folder | None:
        """A folder by its path from the run, ``""`` for the run; None where there is none.

        Raises:
            RunUnreachable: the store cannot be reached.
        """
        with self._lock:
            if self._looked is None or self._now() - self._looked > HOLDS_S:
                self._look()
            return self._folders.get(path)

    def forget(self) -> None:
        """Look again at the next question: something listed was not there."""
        self._looked = None

    def _look(self) -> None:
        scheme = self._url.partition(":")[0]
        files: dict[str, dict[str, ObjectState]] = {"": {}}
        inner: dict[str, set[str]] = {}
        for path, state in store_of(scheme).tree(self._url).items():
            folder, _, name = path.rpartition("/")
            files.setdefault(folder, {})[name] = state
            while folder:
                folder, _, name = folder.rpartition("/")
                inner.setdefault(folder, set()).add(name)
        before, now = self._folders, time.time_ns()
        self._folders = {}
        for path in {*files, *inner}:
            found = Folder(files.get(path, {}), frozenset(inner.get(path, ())), now)
            known = before.get(path)
            same = known is not None and (known.files, known.folders) == (found.files, found.folders)
            self._folders[path] = known if known is not None and same else found
        self._looked = self._now()


def tree_of(url: str) -> Tree:
    """The tree of a run, which all who ask share."""
    with _lock:
        tree = _trees.pop(url, None) or Tree(url)
        _trees[url] = tree
        while len(_trees) > _MOST_KEPT:
            del _trees[next(iter(_trees))]
        return tree


_trees: dict[str, Tree] = {}
_lock = threading.Lock()
