"""Has the server send each piece of an answer at once.

Streamlit hands its server a socket that does not say that it speaks TCP, and asyncio leaves Nagle's algorithm on for
such a socket's connections: what follows an answer's first packet then waits until the browser has confirmed that. On
Linux it takes 40 ms, for each file of a page and each message to it (https://github.com/Kludex/uvicorn/issues/3149).
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import wraps
from typing import Any


def send_at_once(loop: asyncio.AbstractEventLoop) -> None:
    """Sets ``TCP_NODELAY`` on the sockets of servers that this loop begins from now on; connections inherit it.

    Args:
        loop: One whose methods cannot be replaced, as uvloop's, is left as it is.
    """
    create = loop.create_server

    @wraps(create)
    async def create_server(*args: Any, sock: socket.socket | None = None, **options: Any) -> Any:
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return await create(*args, sock=sock, **options)

    with suppress(AttributeError):
        loop.create_server = create_server  # type: ignore[method-assign]
