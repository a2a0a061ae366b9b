"""The app's pages, and what the reader looks at, are kept in the address and from page to page.

A page that is opened by a link finds it in its address; one that is opened from the side bar, which drops the
parameters, finds what was looked at last. Another run begins with nothing in mind. What a page sets is written into
the address once, when the page is drawn: each writing is an entry of the browser's history.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import streamlit as st
from streamlit.runtime.scriptrunner import StopException


class Page(Enum):
    """A page, named as its file is: its title, and its icon, one of those that come with Streamlit."""

    OVERVIEW = ("Overview", ":material/monitor_heart:")
    INCIDENT = ("Incident", ":material/search:")
    RANGES = ("Ranges", ":material/height:")
    REPLAY = ("Replay", ":material/play_circle:")
    SCALE = ("Scale", ":material/show_chart:")
    PRECISION = ("Precision", ":material/tune:")
    PLAN = ("Plan", ":material/stacked_bar_chart:")
    USAGE = ("Usage", ":material/fact_check:")
    RANKS = ("Ranks", ":material/lan:")
    COMPARE = ("Compare", ":material/compare_arrows:")
    RUNS = ("Runs", ":material/list:")
    WALL = ("Wall", ":material/tv:")

    def __init__(self, title: str, icon: str) -> None:
        self.title = title
        self.icon = icon

    @property
    def stem(self) -> str:
        """The name of its file."""
        return self.name.lower()

    @property
    def file(self) -> str:
        """Its file, below the app."""
        return f"app_pages/{self.stem}.py"

    def is_offered(self, world: int) -> bool:
        """Whether there is anything on it for a run of ``world`` ranks; by its address it is there all the same."""
        return self is not Page.RANKS or world > 1

    @property
    def is_of_one_rank(self) -> bool:
        """Whether it shows one rank of several, which is chosen; an incident has its own, Ranks all."""
        return self not in {Page.INCIDENT, Page.RANKS, Page.COMPARE, Page.RUNS}

    @property
    def is_default(self) -> bool:
        """Whether the app opens with it."""
        return self is Page.OVERVIEW

    @property
    def url_path(self) -> str:
        """Its path below the app's address, as Streamlit derives it."""
        return "" if self.is_default else self.stem


_REMEMBERED = "_ampscope_remembered"
_RUN = "_ampscope_remembered_run"
_UNWRITTEN = "_ampscope_unwritten"
_DRAWN = "_ampscope_drawn"
#: The address as the browser has it, or will: what it says of itself while parts are drawn anew may be older.
_ADDRESS = "_ampscope_address"


@contextmanager
def params_written_once(page: str) -> Iterator[None]:
    """Writes the parameters that are set inside into the address at the end, also where a page stops itself.

    Args:
        page: Which page is drawn.
    """
    st.session_state[_UNWRITTEN] = {}
    st.session_state[_ADDRESS] = st.query_params.to_dict()
    _forget_what_back_took_away(page)
    try:
        yield
    except StopException:
        _write_all(page)
        raise
    _write_all(page)


def _write_all(page: str) -> None:
    write_params()
    st.session_state[_DRAWN] = page, st.query_params.to_dict()


def write_params() -> None:
    """Put what was set into the address, at once."""
    before = st.session_state.get(_ADDRESS, st.query_params.to_dict())
    wanted: dict[str, str | None] = {**before, **_unwritten()}
    after = {name: value for name, value in wanted.items() if value is not None}
    st.session_state[_UNWRITTEN] = {}
    if after != before:
        st.query_params.from_dict(after)
        st.session_state[_ADDRESS] = after


def _forget_what_back_took_away(page: str) -> None:
    """A parameter that the page has written, and that its address has no more, is not remembered.

    A click in the side bar drops all of them, the run among them: then nothing was taken back.
    """
    drawn, before = st.session_state.get(_DRAWN, ("", {}))
    now = st.query_params.to_dict()
    if drawn == page and ("run" in now or "run" not in before):
        for name in before.keys() - now.keys():
            _remembered().pop(name, None)


def switch_run(run: str, *, drop_params: bool) -> None:
    """Note which run is on screen; of another run looked at before, nothing is remembered.

    Args:
        run: Its key.
        drop_params: Whether the address is still that of another run.
    """
    if st.session_state.get(_RUN) != run:
        st.session_state[_REMEMBERED] = {"run": run}
        st.session_state[_RUN] = run
    for name in [name for name in st.query_params if name != "run"] if drop_params else ():
        _unwritten()[name] = None


def get_param(name: str) -> str | None:
    """A parameter from the address, else as it was last; None where neither has it."""
    value = param_in_address(name)
    return _remembered().get(name) if value is None else value


def get_number(name: str) -> int | None:
    """`get_param` as a number; None where there is none, or something else stands there."""
    value = get_param(name)
    return int(value) if value is not None and value.isascii() and value.isdigit() and len(value) < 16 else None


def param_in_address(name: str) -> str | None:
    """A parameter as the address has it, or will once this is drawn; None where it has none."""
    unwritten = _unwritten()
    return unwritten[name] if name in unwritten else st.query_params.get(name)


def set_params(**params: object) -> None:
    """Have parameters written into the address and remember them; None takes one away."""
    for name, value in params.items():
        _unwritten()[name] = None if value is None else str(value)
        if value is None:
            _remembered().pop(name, None)
        else:
            _remembered()[name] = str(value)


def set_choice(*, is_default: bool, **params: object) -> None:
    """Sets parameters as `set_params` does; a page's own default is only remembered, unless the address has it."""
    if is_default and all(param_in_address(name) is None for name in params):
        remember_params(**params)
    else:
        set_params(**params)


def remember_params(**params: object) -> None:
    """Keep parameters for the other pages; this page's address stays as it is."""
    _remembered().update({name: str(value) for name, value in params.items() if value is not None})


def _remembered() -> dict[str, str]:
    remembered = st.session_state.setdefault(_REMEMBERED, {})
    assert isinstance(remembered, dict)
    return remembered


def _unwritten() -> dict[str, str | None]:
    unwritten = st.session_state.setdefault(_UNWRITTEN, {})
    assert isinstance(unwritten, dict)
    return unwritten
