"""What a bucket that hangs costs a step: the same training into a folder and into a bucket, taking turns.

    python benchmarks/large_traces/object_storage.py              # half a minute on two cores
    python benchmarks/large_traces/object_storage.py --rounds 60

Both are watched and take turns in blocks of steps, in an order that rotates. The bucket's server answers at first, and
then holds every request; or, with ``--refuse``, answers each with an error, so that there is a retry after another. A
ratio is taken within a round; printed are the rounds' median and quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

import ampscope

_EMPTY = (
    b"<?xml version='1.0'?><ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
)


class Bucket(ThreadingHTTPServer):
    """An empty bucket that stops answering."""

    daemon_threads = True

    def __init__(self, *, refuses: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.refuses = refuses
        self.is_down = threading.Event()
        self.ended = threading.Event()
        self.asked = 0


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def _answer(self) -> None:
        self.server.asked += 1
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.is_down.is_set() and not self.server.refuses:
            self.server.ended.wait()
        is_list = self.command == "GET" and "list-type" in self.path
        status = 503 if self.server.is_down.is_set() else 200 if is_list else 404
        body = _EMPTY if status == 200 else b""
        if self.server.ended.is_set():
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _answer  # noqa: N815  # named by the protocol

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def bucket(*, refuses: bool) -> Iterator[Bucket]:
    """The server, stopped afterwards."""
    server = Bucket(refuses=refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= told | {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()


def training(where: str) -> tuple[Callable[[], None], ampscope.Scope]:
    """A watched training: its step, and its scope."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(128, 256)
    scope = ampscope.watch(model, dir=where, every=20, quiet=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(batch) - batch).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, scope


def timed(step: Callable[[], None], steps: int) -> float:
    """Seconds of some steps."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=30)
    asked.add_argument("--steps", type=int, default=20, help="of a block")
    asked.add_argument("--refuse", action="store_true")
    told = asked.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, bucket(refuses=told.refuse) as server:
        os.environ["AMPSCOPE_SPOOL"] = str(Path(folder) / "spool")
        trainings = [training(str(Path(folder) / "local")), training("s3://bucket/run")]
        for step, _ in trainings:
            timed(step, 40)
        server.is_down.set()
        ratios = []
        for number in range(told.rounds):
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {place: timed(trainings[place][0], told.steps) for place in order}
            ratios.append(seconds[1] / seconds[0])
        low, middle, high = statistics.quantiles(ratios, n=4)
        what = "refuses" if told.refuse else "hangs"
        print(f"a bucket that {what} / a folder: {middle:.3f} ({low:.3f} to {high:.3f}), {server.asked} requests")
        server.ended.set()
        for _, scope in trainings:
            scope.close()


if __name__ == "__main__":
    main()
