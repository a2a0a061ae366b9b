"""Posts alerts to an address that the user gives, as JSON that Slack and what is compatible with it understand."""

from __future__ import annotations

import json
import threading
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from ampscope.capture.record.alerts import Alert
from ampscope.errors import WatchError
from ampscope.trace.vocabulary import Severity

#: Seconds that the other side may take for one answer, and between attempts.
TIMEOUT_S, PAUSES_S = 5.0, (1.0, 4.0)
#: Alerts in a row that could not be delivered, after which no more are sent.
MOST_FAILED = 3
#: Characters that Slack takes in a heading, and in a paragraph.
_HEADING, _PARAGRAPH = 150, 2900
#: Answers after which the same may be well a little later.
_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


class NotDelivered(Exception):
    """An alert did not arrive; the text says why, and never where it was to go."""


class Webhook:
    """One address. It is a secret: it is neither printed nor written anywhere.

    Args:
        address: Of the webhook; ``https``, or ``http`` inside a network of one's own.
        timeout: Seconds, see `TIMEOUT_S`.
        pauses: Seconds before each further attempt.

    Raises:
        WatchError: It is no such address.
    """

    def __init__(self, address: str, *, timeout: float = TIMEOUT_S, pauses: tuple[float, ...] = PAUSES_S) -> None:
        _check(address)
        self._address = address
        self._timeout = timeout
        self._pauses = pauses
        self._closing = threading.Event()
        self._failed = 0  # alerts in a row
        self._opener = urllib.request.build_opener(_NoRedirects)

    def __repr__(self) -> str:
        return "<webhook>"

    def send(self, alert: Alert) -> None:
        """Posts an alert, unless it is about something harmless.

        Raises:
            NotDelivered: It did not arrive, and neither did those before it.
        """
        if alert.severity == Severity.INFO:
            return
        body = json.dumps(payload(alert)).encode()
        for pause in (*self._pauses, None):
            failure, may_pass = self._post(body)
            if not failure:
                self._failed = 0
                return
            if pause is None or not may_pass or self._closing.wait(pause):
                break
        self._failed += 1
        if self._failed >= MOST_FAILED or not may_pass:
            raise NotDelivered(failure)

    def hurry(self) -> None:
        """The run ends: no more attempts after the one in progress."""
        self._closing.set()

    def _post(self, body: bytes) -> tuple[str, bool]:
        """Delivers a message; returns what kept it from that, empty if nothing did, and whether that may pass."""
        request = urllib.request.Request(  # `_check` has seen the scheme
            self._address, body, {"Content-Type": "application/json; charset=utf-8"}, method="POST"
        )
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                answer.read(1)
        except HTTPError as error:
            error.close()
            return f"it answered {error.code}", error.code in _LATER or error.code >= HTTPStatus.INTERNAL_SERVER_ERROR
        except (OSError, HTTPException, ValueError) as error:  # their texts may hold the address
            reason = getattr(error, "reason", error)
            return f"no answer ({type(reason if isinstance(reason, Exception) else error).__name__})", True
        return "", True


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Sends nothing to another address than the one that was given."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _check(address: Any) -> None:
    parts = None
    if isinstance(address, str) and address.isprintable() and " " not in address:
        try:
            parts = urlsplit(address)
            has_port = parts.port is None or parts.port > 0
        except ValueError:
            parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or not has_port:
        raise WatchError("webhook= takes the whole address of a webhook, as https://hooks.example.com/services/...")


def payload(alert: Alert) -> dict[str, Any]:
    """An alert as Slack's message: ``text`` for what shows plain text alone, ``blocks`` for the rest."""
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": _cut(alert.headline, _HEADING), "emoji": False}}
    ]
    remedy = f"Remedy: {alert.remedy}" if alert.remedy else ""
    paragraphs = (alert.summary, f"`{_code(alert.place)}`" if alert.place else "", remedy)
    told = [each if each.startswith("`") else _escaped(each) for each in paragraphs if each]
    if told:
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": _cut("\n".join(told), _PARAGRAPH)}})
    more = f"{alert.suppressed} further alerts were not told. " if alert.suppressed else ""
    look = f"{more}Look: `{_code(alert.look)}`"
    blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": _cut(look, _PARAGRAPH)}]})
    return {"text": _cut(_escaped(f"AMPscope: {alert.text}"), _PARAGRAPH), "blocks": blocks}


def _escaped(text: str) -> str:
    """Text in which Slack finds neither mentions nor links."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _code(text: str) -> str:
    return _escaped(text).replace("`", "'")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."
