"""The server sends pieces at once, collects garbage seldom, and asks no server outside for its address.

Streamlit hands its server a socket that does not say that it speaks TCP, and asyncio leaves Nagle's algorithm on for
such a socket's connections: what follows an answer's first packet then waits until the browser has confirmed that. On
Linux it takes 40 ms, for each file of a page and each message to it (https://github.com/Kludex/uvicorn/issues/3149).
"""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import suppress
from functools import wraps
from typing import Any

from streamlit import net_util


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


#: Objects made before the collector looks at the youngest, and looks before it does at older ones. As Python has it, a
#: sixth of the time of a verdict goes into looks in vain.
_BETWEEN_LOOKS = (50_000, 20, 100)


def collect_seldom() -> None:
    """Look for garbage less often."""
    gc.set_threshold(*_BETWEEN_LOOKS)


def set_aside() -> None:
    """Look at everything once, and at what is alive now not again until the next time.

    Streamlit collects after each visit, and until that has ended nothing of the page is sent: a fifth of a second where
    a large run has been looked at.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def never_look_up() -> None:
    """From here on Streamlit knows of no address outside that is this machine's; it refuses a foreign page at once."""
    net_util.get_external_ip = _unknown


def _unknown() -> None:
    """No address."""
