"""Puts the style sheet into the page that the browser loads first, so that nothing moves once it is shown."""

from __future__ import annotations

import json
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blocks.basics.style import STYLE
from state.pages import Page

_END = b"</body>"
#: What the server says of the file as it is without the style sheet, and what a browser asks of it.
_OF_THE_FILE = ("etag", "last-modified")
_OF_THE_FILE_ASKED = (b"accept-encoding", b"if-none-match", b"if-modified-since", b"range")


#: Tells the page where its server is, and shows it when it is there.
_PAGES = json.dumps([page.url_path for page in Page if page.url_path])
_OPENING = Path(__file__).with_name("opening.js").read_text("utf-8").replace("PAGES", _PAGES, 1)
_ADDED = f"<style>{STYLE}</style><script>{_OPENING}</script>".encode()


class StyleInPage:
    """Sends every HTML page with the style sheet at its end, where it comes after Streamlit's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes all else on as it is."""
        if scope["type"] != "http" or b"text/html" not in dict(scope["headers"]).get(b"accept", b""):
            await self._app(scope, receive, send)
            return
        asked = {**scope, "headers": [each for each in scope["headers"] if each[0] not in _OF_THE_FILE_ASKED]}
        page: list[Message] = []

        async def styled(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_page(message):
                page.append(message)
            elif page and message["type"] == "http.response.body":
                page.append(message)
                if not message.get("more_body"):
                    for each in _with_style(page):
                        await send(each)
            else:
                await send(message)

        await self._app(asked, receive, styled)


def _is_page(message: Message) -> bool:
    headers = MutableHeaders(raw=message["headers"])
    return headers.get("content-type", "").startswith("text/html")


def _with_style(page: list[Message]) -> list[Message]:
    start, *parts = page
    body = b"".join(part.get("body", b"") for part in parts)
    before, end, after = body.rpartition(_END)
    if end:
        body = before + _ADDED + end + after
        headers = MutableHeaders(raw=start["headers"])
        headers["content-length"] = str(len(body))
        for name in _OF_THE_FILE:
            del headers[name]
    return [start, {"type": "http.response.body", "body": body}]
