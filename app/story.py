"""What the reader is looking at - step, op, module - kept from page to page and in the page's address.

A page that is opened by a link finds it in the address; one that is opened from the side bar, which drops the address,
finds what was looked at last. Another run starts another story.
"""

from __future__ import annotations

import streamlit as st

_STORY = "_ampscope_story"
_RUN = "_ampscope_story_of"


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
        del st.query_params[name]


def told(name: str) -> str | None:
    """What ``name`` is, from the address, else as it was last; None where nothing says."""
    asked = st.query_params.get(name)
    return _story().get(name) if asked is None else asked


def tell(**facts: object) -> None:
    """Write facts into the address and remember them; None takes one away."""
    for name, value in facts.items():
        if value is None:
            _story().pop(name, None)
            if name in st.query_params:
                del st.query_params[name]
        else:
            _story()[name] = str(value)
            if st.query_params.get(name) != str(value):
                st.query_params[name] = str(value)


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
