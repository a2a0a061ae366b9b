"""An object store is listed once for all tables, read in blocks, and written whole; errors say what to do.

fsspec, and what it needs for a kind of store, is loaded when a URL of that kind is used for the first time. Credentials
are what the store's own library finds in the user's environment: AMPscope takes none, and writes none.

A Parquet part is read from its footer and then column by column, and the footer more than once: by pyarrow, which
checks it, and by the database.
"""

from __future__ import annotations

import io
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ampscope.errors import RunUnreachable

#: What is installed for the kinds of URL that are used most.
_EXTRAS = {"s3": "ampscope[s3]", "s3a": "ampscope[s3]", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_EXTRAS |= {"abfss": "adlfs", "hf": "huggingface_hub"}
#: Seconds after which an attempt to connect, or to get an answer, is given up.
_CONNECT_S, _ANSWER_S = 10, 30
#: By what name stores tell when an object was written.
_WRITTEN = ("LastModified", "last_modified", "mtime", "updated", "created", "creation_time", "last_commit")
#: Stores that write an object byte by byte where readers see it: it is written aside and renamed.
_IN_PLACE = frozenset({"sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs", "local", "file"})
_ASIDE = ".tmp"


class ObjectState(NamedTuple):
    """An object as a listing tells of it."""

    size: int
    written: float  #: unix time, seconds; 0 where the store does not tell


@dataclass(frozen=True, slots=True)
class Child:
    """A file or folder directly in a folder of a store."""

    name: str
    is_folder: bool
    state: ObjectState


class Store:
    """A kind of store, such as ``s3``. All errors but a missing object are `RunUnreachable`."""

    def __init__(self, scheme: str, filesystem: Any) -> None:
        self.scheme = scheme
        self._files = filesystem

    def children(self, url: str) -> list[Child]:
        """Lists the files and folders directly in a folder; empty where there is none."""
        with self._telling(url):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._key(url), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        root = self._key(url).strip("/")
        named = [(str(each["name"]).strip("/"), each) for each in found]
        return [
            Child(name.rpartition("/")[2], each.get("type") == "directory", _state(each))
            for name, each in named
            if name != root
        ]

    def tree(self, url: str) -> dict[str, ObjectState]:
        """All objects below a folder, by their paths from it."""
        root = self._key(url).strip("/")
        with self._telling(url):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._key(url), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        inside = {str(name).strip("/").removeprefix(root).strip("/"): _state(each) for name, each in found.items()}
        inside.pop("", None)
        return inside

    def state(self, url: str) -> ObjectState | None:
        """An object; None where there is none."""
        with self._telling(url):
            self._files.invalidate_cache()
            try:
                info = self._files.info(self._key(url))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _state(info) if info.get("type") == "file" else None

    def read(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes of an object.

        Raises:
            FileNotFoundError: there is none.
        """
        with self._telling(url):
            return bytes(self._files.cat_file(self._key(url), start=start, end=end))

    def put(self, file: Path, url: str) -> None:
        """Copy a file into an object, and see that all of it is there.

        Raises:
            FileNotFoundError: there is no such file any more.
        """
        with file.open("rb") as opened:  # what is appended to it meanwhile is not meant
            content = opened.read()
        self.write(content, url)

    def write(self, content: bytes, url: str) -> None:
        """Write an object, and see that all of it is there."""
        key = self._key(url)
        with self._telling(url):
            if self.scheme in _IN_PLACE:
                self._files.makedirs(key.rpartition("/")[0], exist_ok=True)
                self._files.pipe_file(key + _ASIDE, content)
                self._files.mv(key + _ASIDE, key)
            else:
                self._files.pipe_file(key, content)
        there = self.state(url)
        if there is None or there.size != len(content):
            raise RunUnreachable(
                f"{url} did not arrive whole: {there.size if there else 0:,} of {len(content):,} bytes."
            )

    def delete(self, urls: Iterable[str]) -> None:
        """Delete objects; one that is not there is passed over."""
        for url in urls:
            with self._telling(url):
                try:
                    self._files.rm_file(self._key(url))
                except FileNotFoundError:
                    continue

    def _key(self, url: str) -> str:
        return str(self._files._strip_protocol(url))

    @contextmanager
    def _telling(self, url: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # each store's library has errors of its own, of no common kind
            raise RunUnreachable(f"{url} cannot be reached: {_said(error)}.") from error


def store_of(scheme: str) -> Store:
    """The store of a kind that readers share.

    Raises:
        RunUnreachable: there is no such kind, or what it needs is not installed.
    """
    with _lock:
        known = _stores.get(scheme)
        if known is None:
            known = _stores[scheme] = new_store(scheme)
        return known


def new_store(scheme: str, *, tries: int | None = None) -> Store:
    """A store of one's own, which asks for credentials anew.

    Args:
        scheme: Of which kind.
        tries: How often the library itself tries; by default as often as it does.

    Raises:
        RunUnreachable: there is no such kind, or what it needs is not installed.
    """
    try:
        import fsspec
    except ImportError:
        raise _missing(scheme) from None
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ImportError:
        raise _missing(scheme) from None
    except ValueError:
        raise RunUnreachable(
            f"{scheme}:// is no kind of store that fsspec knows; s3://, gs://, az:// and hf:// are some that it does."
        ) from None
    options = _OPTIONS.get(scheme, _no_options)(tries) if not fsspec.config.conf.get(scheme) else {}
    try:
        files = kind(skip_instance_cache=True, **options)
    except Exception as error:  # likewise
        raise RunUnreachable(f"{scheme}:// cannot be used: {_said(error)}.") from error
    if tries is not None and hasattr(files, "retries"):
        files.retries = tries
    return Store(scheme, files)


_stores: dict[str, Store] = {}
_lock = threading.Lock()


def _s3_options(tries: int | None) -> dict[str, Any]:
    config: dict[str, Any] = {"connect_timeout": _CONNECT_S, "read_timeout": _ANSWER_S}
    if tries is not None:
        config["retries"] = {"total_max_attempts": tries, "mode": "standard"}
    return {"config_kwargs": config}


def _no_options(_: int | None) -> dict[str, Any]:
    return {}


_OPTIONS: dict[str, Callable[[int | None], dict[str, Any]]] = {"s3": _s3_options, "s3a": _s3_options}


def _missing(scheme: str) -> RunUnreachable:
    extra = _EXTRAS.get(scheme)
    needed = f"it: pip install '{extra}'" if extra else f"what fsspec names for {scheme}://"
    return RunUnreachable(f"{scheme}:// needs a library that is not installed; install {needed}.")


def _said(error: BaseException) -> str:
    """Returns an error's text in one line, without the parameters of a signed address, which could be secret."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.partition("?")[0][:300].rstrip(" .")


def _state(info: dict[str, Any]) -> ObjectState:
    told = next((info[name] for name in _WRITTEN if info.get(name) is not None), None)
    return ObjectState(int(info.get("size") or 0), _seconds(told))


def _seconds(told: Any) -> float:
    if isinstance(told, str):
        try:
            told = datetime.fromisoformat(told)
        except ValueError:
            return 0.0
    if isinstance(told, datetime):
        return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
    if not isinstance(told, (int, float)):
        told = getattr(told, "date", None)  # a commit
        return _seconds(told) if isinstance(told, datetime) else 0.0
    return float(told)


#: Seconds for which a listing holds.
HOLDS_S = 2.0
#: Runs whose listings are kept.
_MOST_TREES = 256


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
    with _trees_lock:
        tree = _trees.pop(url, None) or Tree(url)
        _trees[url] = tree
        while len(_trees) > _MOST_TREES:
            del _trees[next(iter(_trees))]
        return tree


_trees: dict[str, Tree] = {}
_trees_lock = threading.Lock()


#: Bytes of a block, and of a file that is fetched whole.
BLOCK, WHOLE = 64 << 10, 256 << 10
#: Bytes that are kept of all files.
MOST_KEPT = 128 << 20

#: A file as it was written at one time, and the number of one of its blocks.
_Key = tuple[str, ObjectState, int]


class Blocks:
    """Blocks that were fetched lately, of all files; the oldest go first."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._size = 0
        self._known: OrderedDict[_Key, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, url: str, state: ObjectState, start: int, end: int) -> bytes:
        """Bytes of a file; blocks that are not known are fetched, neighbours in one request.

        Raises:
            FileNotFoundError: the file is gone, or another one by now.
            RunUnreachable: the store cannot be reached.
        """
        end = min(end, state.size)
        if start >= end:
            return b""
        if state.size <= WHOLE:
            first, last = 0, (state.size - 1) // BLOCK
        else:
            first, last = start // BLOCK, (end - 1) // BLOCK
        with self._lock:
            found = {number: self._take((url, state, number)) for number in range(first, last + 1)}
        missing = [number for number, block in found.items() if block is None]
        for _, run in groupby(enumerate(missing), lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in run]
            found |= self._fetch(url, state, numbers[0], numbers[-1])
        content = b"".join(found[number] or b"" for number in range(first, last + 1))
        return content[start - first * BLOCK : end - first * BLOCK]

    def _take(self, key: _Key) -> bytes | None:
        block = self._known.get(key)
        if block is not None:
            self._known.move_to_end(key)
        return block

    def _fetch(self, url: str, state: ObjectState, first: int, last: int) -> dict[int, bytes]:
        start, end = first * BLOCK, min((last + 1) * BLOCK, state.size)
        content = store_of(url.partition(":")[0]).read(url, start, end)
        if len(content) != end - start:
            raise FileNotFoundError(f"{url} has been written anew")
        blocks = {number: content[(number - first) * BLOCK :][:BLOCK] for number in range(first, last + 1)}
        with self._lock:
            for number, block in blocks.items():
                self._size += len(block) - len(self._known.pop((url, state, number), b""))
                self._known[url, state, number] = block
            while self._size > self._most:
                self._size -= len(self._known.popitem(last=False)[1])
        return blocks


_blocks = Blocks()


class RangedFile(io.RawIOBase):
    """An object, to be read like a file.

    Args:
        url: Which.
        state: What a listing says of it.
    """

    def __init__(self, url: str, state: ObjectState) -> None:
        super().__init__()
        self._url = url
        self._state = state
        self._at = 0

    def readable(self) -> bool:
        """Always True."""
        return True

    def seekable(self) -> bool:
        """Always True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves the position, as in every file."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._state.size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def tell(self) -> int:
        """Returns the position."""
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads up to ``size`` bytes, all by default; never fewer than are there."""
        end = self._state.size if size is None or size < 0 else self._at + size
        content = _blocks.read(self._url, self._state, self._at, end)
        self._at += len(content)
        return content

    def readall(self) -> bytes:
        """Reads to the end."""
        return self.read()

    def readinto(self, buffer: Any, /) -> int:
        """Reads into a buffer; returns how many bytes."""
        view = memoryview(buffer).cast("B")
        content = self.read(len(view))
        view[: len(content)] = content
        return len(content)
