"""Finding runs below a place in an object store: by its folders, level by level, several of them at a time."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from ampscope.trace.remote.location import BucketPath
from ampscope.trace.schema import MANIFEST

_LEVELS = 2
#: Requests at a time.
_AT_ONCE = 8


def runs_below(folder: BucketPath, *, levels: int = _LEVELS) -> list[BucketPath]:
    """The folders some levels below ``folder`` that hold a manifest; nothing is looked for inside a run.

    Args:
        folder: Where to look.
        levels: How deep.

    Raises:
        RunUnreachable: the store cannot be reached.
    """
    found: list[BucketPath] = []
    level = _folders_of([folder])
    for _ in range(levels):
        if not level:
            break
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            listed = dict(zip(level, pool.map(lambda each: each.store.children(str(each)), level), strict=True))
        runs = [each for each, children in listed.items() if any(child.name == MANIFEST for child in children)]
        found += runs
        level = [
            each / child.name
            for each, children in listed.items()
            if each not in runs
            for child in children
            if child.is_folder
        ]
    return found


def _folders_of(folders: Iterable[BucketPath]) -> list[BucketPath]:
    return [each / child.name for each in folders for child in each.store.children(str(each)) if child.is_folder]
