"""Runs calls at the last moment at which a process can open connections: at `atexit`, their threads cannot start."""

from __future__ import annotations

import concurrent.futures.thread  # its own end must be known before ours, which then comes first  # noqa: F401
import threading
from collections.abc import Callable
from contextlib import suppress

_known: set[Callable[[], None]] = set()


def before_exit(call: Callable[[], None]) -> None:
    """Call it when the main thread is over, once however often this is said; where Python has no such moment, not."""
    register = getattr(threading, "_register_atexit", None)
    if register is None or call in _known:
        return
    _known.add(call)
    with suppress(RuntimeError):  # the process is ending already
        register(call)
