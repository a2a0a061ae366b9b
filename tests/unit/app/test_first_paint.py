"""What the server adds to the browser's first page, and how soon each piece of an answer leaves it."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="needs the app's packages")

from first_paint import preloads
from server_settings import send_at_once
from tests.support.coroutines import ran


def names(links: str) -> set[str]:
    return set(re.findall(r'href="\./static/js/([^"]+)"', links))


def static(folder: Path, page: str, **files: str) -> Path:
    (folder / "static" / "js").mkdir(parents=True)
    (folder / "index.html").write_text(page)
    for name, content in files.items():
        (folder / "static" / "js" / f"{name}.x1.js").write_text(content)
    return folder


def test_pieces_are_loaded_early_with_what_they_need(tmp_path: Path) -> None:
    files = static(
        tmp_path,
        '<script src="./static/js/index.x1.js">',
        Box='import{a as b}from"./Field.x1.js";import"./index.x1.js";const later=()=>import("./Chart.x1.js");',
        Field='export*from"./Box.x1.js";import"./missing.x1.js"',
        Chart="",
        index="",
    )
    assert names(preloads(files, ("Box", "Unknown"))) == {"Box.x1.js", "Field.x1.js"}


def test_the_pieces_are_those_of_streamlit() -> None:
    found = names(preloads())
    assert {name.partition(".")[0] for name in found} >= {"Selectbox", "Html", "BidiComponent", "PageLink"}
    assert not any(name.startswith("PlotlyChart") for name in found)


def test_a_connection_waits_for_no_confirmation() -> None:
    async def is_prompt() -> bool:
        send_at_once(asyncio.get_running_loop())
        listening = socket.socket(socket.AF_INET)  # as Streamlit makes it
        listening.bind(("127.0.0.1", 0))
        accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            its = writer.get_extra_info("socket")
            accepted.set_result(bool(its.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        server = await asyncio.start_server(connected, sock=listening)
        async with server:
            _, writer = await asyncio.open_connection(*listening.getsockname())
            found = await accepted
            writer.close()
        return found

    assert ran(is_prompt())


def test_a_loop_that_takes_no_other_method_is_left_alone() -> None:
    class Sealed(asyncio.SelectorEventLoop):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "create_server":
                raise AttributeError(name)
            super().__setattr__(name, value)

    loop = Sealed()
    send_at_once(loop)
    loop.close()
