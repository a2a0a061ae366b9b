"""A real S3 server, moto's, in this process on the loopback interface, that fails as it is told to."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "training"


class Fault(StrEnum):
    """What can happen to a request."""

    ERROR = "500"
    BUSY = "503"
    RESET = "reset"
    STALL = "stall"
    SLOW = "slow"
    EXPIRED = "expired"
    NO_BUCKET = "no bucket"
    LOST_ANSWER = "lost answer"


#: Status, code and text of the answers that say what is wrong.
_ANSWERS = {
    Fault.ERROR: ("500 Internal Server Error", "InternalError", "We encountered an internal error."),
    Fault.BUSY: ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    Fault.EXPIRED: ("400 Bad Request", "ExpiredToken", "The provided token has expired."),
    Fault.NO_BUCKET: ("404 Not Found", "NoSuchBucket", "The specified bucket does not exist"),
}
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class S3Server:
    """Answers as S3 does; `faults` says what happens to the next requests, `stall` holds all of them.

    Attributes:
        url: The endpoint.
        injected: How often each fault was.
        served: Bytes of objects that were read, by key; `asked` the requests, by method.
    """

    def __init__(self) -> None:
        self.url = ""
        self.injected: Counter[Fault] = Counter()
        self.served: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.stalled = threading.Event()  # a request is being held
        self._released = threading.Event()
        self._released.set()
        self._faults: Iterator[Fault | None] = iter(())
        self._lock = threading.Lock()
        self._came = threading.Condition()
        self._application: Application = DomainDispatcherApplication(create_backend_app)

    def environment(self) -> dict[str, str]:
        """What a user of this server has in the environment."""
        told = {"AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        return told | {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}

    def fail(self, faults: Iterable[Fault | None]) -> None:
        """What happens to the next requests, one after another; None for nothing."""
        with self._lock:
            self._faults = iter(faults)

    def wait_for_request_after(self, count: int, *, seconds: float) -> bool:
        """Wait until there have been more than ``count`` requests; whether there have."""
        with self._came:
            return self._came.wait_for(lambda: self.asked.total() > count, seconds)

    def stall(self) -> None:
        """Hold every request until `release`."""
        self._released.clear()

    def release(self) -> None:
        """Go on answering."""
        self._released.set()
        self.stalled.clear()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """A request."""
        with self._came:
            self.asked[environ["REQUEST_METHOD"]] += 1
            self._came.notify_all()
        if not self._released.is_set():
            self.stalled.set()
            self._released.wait(60)
        with self._lock:
            fault = next(self._faults, None)
            if fault is not None:
                self.injected[fault] += 1
        if fault is not None and fault is not Fault.LOST_ANSWER and fault is not Fault.SLOW:
            return self._failed(fault, environ, start_response)
        answer = self._answered(environ, start_response)
        if fault is Fault.LOST_ANSWER:  # the object is there, and who wrote it does not know
            _reset(environ)
        return _in_pieces(answer) if fault is Fault.SLOW else answer

    def _failed(self, fault: Fault, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if fault is Fault.STALL:
            self._held.wait(_STALL_S)
            _reset(environ)
        if fault is Fault.RESET:
            _reset(environ)
        status, code, text = _ANSWERS[fault]
        chunked = environ.get("wsgi.input_terminated", False)
        environ["wsgi.input"].read(-1 if chunked else int(environ.get("CONTENT_LENGTH") or 0))
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    _held = threading.Event()

    def _answered(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        answer = list(self._application(environ, start_response))
        if environ["REQUEST_METHOD"] == "GET":
            self.served[environ["PATH_INFO"]] += sum(map(len, answer))
        return answer


#: Seconds that a request is held by `Fault.STALL`: longer than who asks waits in these tests.
_STALL_S = 1.0


def _reset(environ: dict[str, Any]) -> None:
    """End the connection as a cable does that is cut."""
    connection: socket.socket = environ["werkzeug.socket"]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RD)  # who reads the next request of this connection comes to its end, and closes it
    raise ConnectionResetError


def _in_pieces(answer: Iterable[bytes]) -> Iterator[bytes]:
    for content in answer:
        yield from (content[place : place + 512] for place in range(0, len(content), 512))


class _Quiet(WSGIRequestHandler):
    """Writes no line for each request."""

    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        """Nothing."""


def random_faults(seed: int, count: int) -> Iterator[Fault | None]:
    """So many faults, of all kinds, with good requests between them."""
    chance, left = random.Random(seed), count
    kinds = [*Fault] * (count // len(Fault) + 1)
    chance.shuffle(kinds)
    while left:
        if chance.random() < 0.35:
            yield None
        else:
            left -= 1
            yield kinds[left]


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """The server with an empty bucket; it is stopped afterwards."""
    application = S3Server()
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    application.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="s3", daemon=True)
    thread.start()
    try:
        client(application).create_bucket(Bucket=BUCKET)
        yield application
    finally:
        application.release()
        server.shutdown()
        server.server_close()
        thread.join(10)


def client(server: S3Server) -> Any:
    """A client that sees what is there, faults aside."""
    return boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
