"""Requests of foreign pages over a raw connection: the app lets none in, and asks nobody outside about them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs Playwright")
driver = pytest.importorskip("tests.integration.browser.driver")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Stands for the world outside: whatever the server asks for there would come here."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "localhost")
        yield listener


def answer(port: int, host: str, origin: str | None) -> int:
    """The status with which a request for a WebSocket is answered; 101 where it is opened."""
    lines = [
        "GET /_stcore/stream HTTP/1.1",
        f"Host: {host}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *([f"Origin: {origin}"] if origin else []),
    ]
    with socket.create_connection(("localhost", port), timeout=30) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return int(connection.recv(64).split()[1])


def test_only_pages_of_this_machine_are_let_in(tmp_path: Path, proxy: socket.socket) -> None:
    with driver.serve(tmp_path) as address:
        port = int(address.rpartition(":")[2])
        own = f"localhost:{port}"
        assert answer(port, own, f"http://{own}") == 101
        assert answer(port, f"127.0.0.1:{port}", f"http://127.0.0.1:{port}") == 101
        assert answer(port, f"evil.example:{port}", f"http://evil.example:{port}") == 403
        assert answer(port, f"evil.example:{port}", None) == 403
        assert answer(port, own, "http://evil.example") == 403
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_the_proxy_would_notice(proxy: socket.socket) -> None:
    """So that the test above can fail."""
    code = "import urllib.request as r; r.build_opener().open('http://checkip.invalid', timeout=1)"
    subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, check=False, timeout=30)
    proxy.accept()[0].close()
