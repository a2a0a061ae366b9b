"""An object store as AMPscope uses it: few calls, and errors that say which store and what to do.

fsspec, and what it needs for a kind of store, is loaded when a URL of that kind is used for the first time. Credentials
are what the store's own library finds in the user's environment: AMPscope takes none, and writes none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
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
