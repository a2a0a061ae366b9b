"""Adds to the page that the browser loads first, so that it shows sooner and nothing moves once it is shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import streamlit
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ampscope.report.html.markup import SHEET
from state import Page

#: It is in the page before anything is drawn.
STYLE = SHEET + "".join(Path(__file__).with_name(f"{name}.css").read_text("utf-8") for name in ("style", "wall"))


_END = b"</body>"
#: What the server says of the file as it is without the style sheet, and what a browser asks of it.
_OF_THE_FILE = ("etag", "last-modified")
_OF_THE_FILE_ASKED = (b"accept-encoding", b"if-none-match", b"if-modified-since", b"range")


#: Tells the page where its server is, and shows it when it is there.
_PAGES = json.dumps([page.url_path for page in Page if page.url_path])
_OPENING = Path(__file__).with_name("opening.js").read_text("utf-8").replace("PAGES", _PAGES, 1)

_STATIC = Path(streamlit.__file__).with_name("static")
#: Pieces of Streamlit that every page has. It loads them as it meets them, one after the other.
_PIECES = ("Selectbox", "Html", "BidiComponent", "PageLink", "DownloadButton")
#: How one file of Streamlit's names another beside it, which it needs at once.
_NEEDS = re.compile(r"""(?:from|import)\s*["']\./([\w.-]+\.js)["']""")


def preloads(static: Path = _STATIC, pieces: tuple[str, ...] = _PIECES) -> str:
    """Has the browser load pieces of Streamlit, and what these need, while the first of the page runs.

    Args:
        static: Where Streamlit has its ``index.html``; of another version than is known here, nothing may be found.
        pieces: The first part of each one's file name.

    Returns:
        HTML; without what ``index.html`` loads itself.
    """
    folder, index = static / "static" / "js", (static / "index.html").read_text("utf-8")
    waiting = [file.name for piece in pieces for file in sorted(folder.glob(f"{piece}.*.js"))]
    found: dict[str, None] = {}
    while waiting:
        name = waiting.pop()
        if name not in found and f"/{name}" not in index and (folder / name).is_file():
            found[name] = None
            waiting += _NEEDS.findall((folder / name).read_text("utf-8"))
    return "".join(f'<link rel="modulepreload" crossorigin href="./static/js/{name}">' for name in found)


_ADDED = f"{preloads()}<style>{STYLE}</style><script>{_OPENING}</script>".encode()


class StyleInPage:
    """Sends every HTML page with the style sheet at its end, after Streamlit's own, and with what is loaded early."""

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
