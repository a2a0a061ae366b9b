"""The spool: where a run that goes to an object store is written first, on this machine, until it has arrived there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from ampscope.trace.files.folder_lock import is_locked
from ampscope.trace.files.layout import rank_folder, ranks
from ampscope.trace.location import BucketPath, location
from ampscope.trace.schema import MANIFEST

#: The variable that names the folder of all spools.
VARIABLE = "AMPSCOPE_SPOOL"
#: What is written into a spool: where it goes.
_LABEL = "spool.json"
#: A folder for its owner alone: a trace names files and lines of a program.
_PRIVATE = 0o700


def spools() -> Path:
    """The folder of all spools: `VARIABLE`, else one in the user's cache."""
    if told := os.environ.get(VARIABLE):
        return Path(told).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache").expanduser()).absolute() / "ampscope" / "spool"


def spool_of(home: BucketPath) -> Path:
    """The spool of a run, the same whenever this machine writes it; made if missing, for the user alone.

    Where the user's cache cannot be written, it is a temporary folder.

    Raises:
        OSError: that cannot be written either.
    """
    digest = hashlib.sha256(str(home).encode()).hexdigest()[:12]
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', home.name)[:40]}-{digest}"
    try:
        return _made(spools() / name, home)
    except OSError:
        if os.environ.get(VARIABLE):
            raise
        owner = str(os.getuid()) if hasattr(os, "getuid") else "user"
        return _made(Path(tempfile.gettempdir()) / f"ampscope-spool-{owner}" / name, home)


def _made(spool: Path, home: BucketPath) -> Path:
    spool.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and spool.stat().st_uid != os.getuid():
        raise PermissionError(13, "it belongs to another user", str(spool))
    spool.chmod(_PRIVATE)
    (spool / _LABEL).write_text(json.dumps({"url": str(home)}) + "\n", "utf-8")
    return spool


def home_of(spool: Path) -> BucketPath | None:
    """Returns the place in a store to which a spool goes; None for a folder that is no spool."""
    try:
        home = location(str(json.loads((spool / _LABEL).read_text("utf-8"))["url"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return home if isinstance(home, BucketPath) else None


def waiting() -> list[Path]:
    """The spools in which something is left that nobody is sending, oldest first."""
    root = spools()
    found = [each for each in root.iterdir() if home_of(each) is not None] if root.is_dir() else []
    idle = [each for each in found if ranks(each) and not any(is_locked(rank_folder(each, k)) for k in ranks(each))]
    return sorted(idle, key=lambda each: each.stat().st_mtime)


def clear(spool: Path, rank: int) -> None:
    """Delete what a rank has sent, and the spool with the last of them."""
    shutil.rmtree(rank_folder(spool, rank), ignore_errors=True)
    with suppress(OSError):
        if not ranks(spool):
            for name in (MANIFEST, _LABEL):
                (spool / name).unlink(missing_ok=True)
            shutil.rmtree(spool, ignore_errors=True)
