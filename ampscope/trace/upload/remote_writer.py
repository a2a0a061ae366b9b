"""Opens the writer of a run that goes to an object store: a spool, what is there already, and who sends the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampscope.trace.manifest import Manifest
from ampscope.trace.remote.location import BucketPath
from ampscope.trace.remote.store import new_store
from ampscope.trace.upload.fetch import Fetch
from ampscope.trace.upload.spool import spool_of
from ampscope.trace.upload.uploader import Uploader
from ampscope.trace.write.writer import TraceWriter


def open_remote(
    home: BucketPath,
    *,
    manifest: Manifest,
    rank: int = 0,
    disk_budget: int = 2 << 30,
    on_notice: Callable[[str], None],
    **options: Any,
) -> TraceWriter:
    """A writer whose rows go to ``home``, and on from where the run there stands.

    Where the store does not answer, the run begins in the spool; what is there by the time it answers decides whether
    it goes on there or beside it.

    Args:
        home: The run in the store.
        manifest: As of a `TraceWriter`.
        rank: Likewise.
        disk_budget: Likewise; it holds for the spool and for the store.
        on_notice: Likewise; also told of the network.
        options: Further ones of a `TraceWriter`.

    Raises:
        RunUnreachable: there is no such kind of store, or what it needs is not installed.
        OSError: the spool cannot be written, or another process writes it.
        RunDamaged, RunTooNew: the run there cannot be gone on with.
    """
    new_store(home.scheme, tries=1)  # what is wrong with the URL is the caller's to mend
    spool = spool_of(home)
    why = Fetch(home, spool, rank, lambda: new_store(home.scheme, tries=1)).join()
    if why:
        on_notice(f"{why}. The run begins in {spool} and is sent when it can be.")
    uploader = Uploader(
        spool,
        home,
        rank,
        budget=disk_budget // max(manifest.world_size, 1),
        tell=on_notice,
        joined=not why,
    )
    return TraceWriter(
        spool,
        manifest=manifest,
        rank=rank,
        disk_budget=disk_budget,
        on_notice=on_notice,
        follower=uploader,
        **options,
    )
