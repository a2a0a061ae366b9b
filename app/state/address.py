"""What the reader is looking at - step, op, module - kept from page to page and in the page's address.

A page that is opened by a link finds it in the address; one that is opened from the side bar, which drops the address,
finds what was looked at last. Another run starts another story. What a page tells is written into the address once,
when it is drawn: each writing is an entry of the browser's history.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import streamlit as st
from streamlit.runtime.scriptrunner import StopException

_STORY = "_ampscope_story"
_RUN = "_ampscope_story_of"
_CHANGES = "_ampscope_address"


@contextmanager
def address() -> Iterator[None]:
    """What is told inside goes into the address at the end, also where a page stops itself."""
    st.session_state[_CHANGES] = {}
    try:
        yield
    except StopException:
        write_address()
        raise
    write_address()


def write_address() -> None:
    """Put what was told into the address, at once."""
    before = st.query_params.to_dict()
    told = {**before, **_changes()}
    after = {name: value for name, value in told.items() if value is not None}
    st.session_state[_CHANGES] = {}
    if after != before:
        st.query_params.from_dict(after)


def begin(run: str, *, leaving: bool) -> None:
    """Tell which run is on screen; of another run seen before, nothing is kept.

    Args:
        run: Its key.
        leaving: Whether the address is still that of another run.
    """
    if st.session_state.get(_RUN) != run:
        st.session_state[_STORY] = {"run": run}
        st.session_state[_RUN] = run
    for name in [name for name in st.query_params if name != "run"] if leaving else ():
        _changes()[name] = None


def told(name: str) -> str | None:
    """What ``name`` is, from the address, else as it was last; None where nothing says."""
    asked = in_address(name)
    return _story().get(name) if asked is None else asked


def in_address(name: str) -> str | None:
    """What the address says of ``name``, or will once this is drawn; None where it says nothing."""
    changes = _changes()
    return changes[name] if name in changes else st.query_params.get(name)


def tell(**facts: object) -> None:
    """Have facts written into the address and remember them; None takes one away."""
    for name, value in facts.items():
        _changes()[name] = None if value is None else str(value)
        if value is None:
            _story().pop(name, None)
        else:
            _story()[name] = str(value)


def remember(**facts: object) -> None:
    """Keep facts for the other pages; this page's address stays as it is."""
    _story().update({name: str(value) for name, value in facts.items() if value is not None})


def told_number(name: str) -> int | None:
    """A number of the story; None where there is none, or something else stands there."""
    value = told(name)
    return int(value) if value is not None and value.isascii() and value.isdigit() and len(value) < 16 else None


def _story() -> dict[str, str]:
    story = st.session_state.setdefault(_STORY, {})
    assert isinstance(story, dict)
    return story


def _changes() -> dict[str, str | None]:
    changes = st.session_state.setdefault(_CHANGES, {})
    assert isinstance(changes, dict)
    return changes
