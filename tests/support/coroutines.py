"""Runs coroutines on a thread of their own: in a test's, the browser's loop may be running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def ran(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
