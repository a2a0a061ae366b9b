"""Serves the app for ``streamlit run app``, and loads what the first page needs while the browser opens."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import streamlit as st
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import Route

from ampscope.errors import AmpscopeError
from first_paint import StyleInPage
from server_settings import collect_seldom, never_look_up, send_at_once, set_aside
from state import Page

#: What the first page needs beside Streamlit. Never pandas: Plotly takes hold of it as soon as its loading has begun,
#: so that a figure drawn meanwhile in another thread would end in an error.
FIRST_PAGE = ("blocks.top_bar", "charts", "data.run_results", "plotly.graph_objects")


def load_packages() -> None:
    """Load the packages that the first page needs."""
    for name in FIRST_PAGE:
        importlib.import_module(name)


def load_results() -> None:
    """Load what the first page tells: the verdict on the newest run, and what is listed of each."""
    from data.run_folders import offered_runs, run_folders
    from data.run_list import run_list
    from data.run_results import diagnosis_of
    from data.run_snapshot import take_snapshot

    paths = [run.path for run in offered_runs(run_folders()).values()]
    with suppress(AmpscopeError):  # the page says what is wrong with it
        for newest in paths[:1]:
            diagnosis_of(take_snapshot(newest, rank=None))
    run_list().summaries(paths)


def keep_working() -> None:
    """Load what the first page tells, then what the others of a run that is looked at do."""
    load_results()
    set_aside()
    from data.ahead import work_ahead

    work_ahead(done=set_aside)


@asynccontextmanager
async def loading(_: st.App) -> AsyncIterator[None]:
    """Begins with the server, before it opens its socket."""
    collect_seldom()
    send_at_once(asyncio.get_running_loop())
    for work in (load_packages, keep_working):  # one loads while the other waits for the database
        threading.Thread(target=work, name=f"ampscope-{work.__name__}", daemon=True).start()
    yield


async def to_root(request: Request) -> RedirectResponse:
    """The first page by its name is where the first page is, whatever the app is below of, with its query."""
    return RedirectResponse(f"./?{request.url.query}")


never_look_up()
named = [Route(f"/{page.stem}", to_root) for page in Page if page.is_default]
app = st.App("workbench.py", lifespan=loading, routes=named, middleware=[Middleware(StyleInPage)])
