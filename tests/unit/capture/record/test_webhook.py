"""Alerts by HTTP: against a server on the loopback that answers well, badly, late or not at all."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ampscope.capture.record import webhook as webhooks
from ampscope.capture.record.alerts import Alert, AlertKind
from ampscope.capture.record.webhook import NotDelivered, Webhook, payload
from ampscope.errors import WatchError

ALERT = Alert(
    kind=AlertKind.INCIDENT,
    step=1294,
    what="non-finite loss",
    run="/runs/a",
    look="ampscope diagnose /runs/a",
    time=0.0,
    replay="exact",
    summary="The result of <bmm> & co. is too large.",
    op="aten.bmm.default",
    module="blocks.0",
    file="gpt.py",
    line=46,
    remedy="Scale first.",
    severity="error",
)


class Server(ThreadingHTTPServer):
    """Answers with one status after the other, the last for ever; 0 resets the connection, None never answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[int | None] = [200]
        self.got: list[Any] = []
        self.over = threading.Event()
        self.elsewhere = ""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/services/SECRET"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
        answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        if answer is None:
            self.server.over.wait(30)
        elif answer == 0:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.close()
        else:
            self.send_response(answer)
            if self.server.elsewhere:
                self.send_header("Location", self.server.elsewhere)
            self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def webhook(server: Server, **options: Any) -> Webhook:
    return Webhook(server.address, **{"pauses": (0.0, 0.0), "timeout": 20.0, **options})


def test_an_alert_arrives_as_slack_takes_it(server: Server) -> None:
    webhook(server).send(ALERT)
    ((path, kind, message),) = server.got
    assert (path, kind) == ("/services/SECRET", "application/json; charset=utf-8")
    assert message == payload(ALERT)
    header, section, context = message["blocks"]
    assert header == {
        "type": "header",
        "text": {"type": "plain_text", "text": "step 1,294: non-finite loss (replay: exact)", "emoji": False},
    }
    assert section["text"] == {
        "type": "mrkdwn",
        "text": "The result of &lt;bmm&gt; &amp; co. is too large.\n"
        "`aten.bmm.default in blocks.0, gpt.py:46`\nRemedy: Scale first.",
    }
    assert context["elements"] == [{"type": "mrkdwn", "text": "Look: `ampscope diagnose /runs/a`"}]
    assert message["text"].startswith("AMPscope: step 1,294: non-finite loss (replay: exact).\n")


def test_long_texts_keep_within_what_slack_takes() -> None:
    long = Alert(kind=AlertKind.AHEAD, step=0, what="w" * 9000, run="r", look="l" * 9000, time=0.0, summary="s" * 9000)
    header, section, context = payload(long)["blocks"]
    assert len(header["text"]["text"]) == 150
    assert max(len(section["text"]["text"]), len(context["elements"][0]["text"]), len(payload(long)["text"])) <= 3000


@pytest.mark.parametrize("failing", [500, 503, 429, 0], ids=["500", "503", "429", "reset"])
def test_what_may_pass_is_tried_again(server: Server, failing: int) -> None:
    server.answers = [failing, failing, 200]
    webhook(server).send(ALERT)
    assert len(server.got) == 3


def test_three_alerts_in_a_row_that_fail_are_a_fault(server: Server) -> None:
    server.answers = [500]
    hook = webhook(server)
    hook.send(ALERT)
    hook.send(ALERT)
    with pytest.raises(NotDelivered, match=r"^it answered 500$"):
        hook.send(ALERT)
    assert len(server.got) == 9


def test_one_that_arrives_between_them_begins_anew(server: Server) -> None:
    hook = webhook(server, pauses=())
    server.answers = [500, 500, 200, 500, 500, 500]
    for _ in range(5):
        hook.send(ALERT)
    with pytest.raises(NotDelivered):
        hook.send(ALERT)


@pytest.mark.parametrize("answer", [400, 403, 404, 410])
def test_a_refusal_is_final(server: Server, answer: int) -> None:
    server.answers = [answer]
    with pytest.raises(NotDelivered, match=f"^it answered {answer}$"):
        webhook(server).send(ALERT)
    assert len(server.got) == 1


@pytest.mark.parametrize("answer", [301, 302, 303, 307, 308])
def test_no_other_address_is_gone_to(server: Server, answer: int) -> None:
    with Server() as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        server.answers, server.elsewhere = [answer], other.address
        with pytest.raises(NotDelivered, match=f"^it answered {answer}$"):
            webhook(server).send(ALERT)
        assert (len(server.got), other.got) == (1, [])
        other.shutdown()
        thread.join()


def test_one_that_never_answers_is_waited_for_briefly(server: Server) -> None:
    server.answers = [None]
    hook = webhook(server, timeout=0.2, pauses=())
    for _ in range(webhooks.MOST_FAILED - 1):
        hook.send(ALERT)
    with pytest.raises(NotDelivered, match=r"^no answer \(TimeoutError\)$"):
        hook.send(ALERT)


def test_nobody_there(server: Server) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        hook = Webhook(f"http://127.0.0.1:{closed.getsockname()[1]}/SECRET", pauses=(), timeout=5.0)
        hook.send(ALERT)
        hook.send(ALERT)
        with pytest.raises(NotDelivered, match=r"^no answer \(ConnectionRefusedError\)$"):
            hook.send(ALERT)


def test_at_the_end_nothing_is_tried_again(server: Server) -> None:
    server.answers = [500]
    hook = webhook(server, pauses=(60.0,))
    hook.hurry()
    hook.send(ALERT)
    assert len(server.got) == 1


def test_what_is_harmless_is_not_sent(server: Server) -> None:
    webhook(server).send(Alert(kind=AlertKind.INCIDENT, step=1, what="w", run="r", look="l", time=0, severity="info"))
    assert server.got == []


@pytest.mark.parametrize(
    "address", ["", "hooks.slack.com/x", "ftp://a/b", "file:///etc/passwd", "https://?", "https://a b/", "http://[/", 3]
)
def test_what_is_no_address_is_refused_without_repeating_it(address: Any) -> None:
    with pytest.raises(WatchError, match="webhook= takes the whole address") as refused:
        Webhook(address)
    assert not address or str(address) not in str(refused.value)


def test_an_address_is_not_shown() -> None:
    assert "SECRET" not in repr(Webhook("https://example.com/SECRET"))
