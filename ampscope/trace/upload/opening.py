"""Opens the writer of a run: into a folder of this machine, or by way of a spool into an object store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ampscope.errors import RunUnreachable, WatchError
from ampscope.trace.manifest import Manifest
from ampscope.trace.remote.location import BucketPath, location
from ampscope.trace.upload.remote_writer import open_remote
from ampscope.trace.write.writer import TraceWriter


def named_folder(told: Any) -> Path:
    """Returns the folder of a run that was named by ``dir=``.

    Raises:
        WatchError: it is no path and no URL, or a URL that holds secrets.
    """
    try:
        folder = location(told)
    except TypeError:
        raise WatchError(f"dir={told!r}: give the path of the run's folder, or leave it out") from None
    except RunUnreachable as error:
        raise WatchError(str(error)) from error
    if "\0" in str(folder):
        raise WatchError(f"dir={told!r}: give the path of the run's folder, or leave it out")
    return folder


def open_writer(
    folder: Path, manifest: Manifest, rank: int, disk_budget: int, say: Callable[[object], None]
) -> TraceWriter:
    """The writer of a run; ``say`` takes its lines for the user.

    Raises:
        WatchError: It cannot be written there.
        RunError: What is there cannot be gone on with.
    """
    told: dict[str, Any] = {"on_notice": say, "on_failure": partial(_say_ended, folder, say)}
    try:
        if isinstance(folder, BucketPath):
            return open_remote(folder, manifest=manifest, rank=rank, disk_budget=disk_budget, **told)
        return TraceWriter(folder, manifest=manifest, rank=rank, disk_budget=disk_budget, **told)
    except RunUnreachable as error:
        raise WatchError(str(error)) from error
    except OSError as error:
        raise cannot_write(folder, error) from error


def _say_ended(folder: Path, say: Callable[[object], None], failure: BaseException) -> None:
    say(
        f"recording of the run in {folder} has ended: {str(failure) or type(failure).__name__}; training goes on, and "
        "what it does from here on is not known"
    )


def cannot_write(folder: Path, error: OSError) -> WatchError:
    """Makes the error that a folder cannot be written."""
    return WatchError(
        f"cannot write the run to {folder}: {error.strerror or error}; "
        f"pass dir= a folder that this process alone can write"
    )
