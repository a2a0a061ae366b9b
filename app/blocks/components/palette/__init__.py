"""A search that opens with Ctrl-K: hits in groups, worked by the keyboard. Text in it is text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import streamlit as st

from ampscope.report.safe_text import short
from blocks.components.declared import declared

_PALETTE = declared(__file__, "palette", '<div class="palette"></div>')


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Something to be chosen."""

    text: str
    note: str = ""
    go: str  #: an address, or the name of a command
    is_command: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferGroup:
    """Offers of one kind."""

    title: str
    total: int  #: how many there are, of which the first are offered
    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file for the browser to save."""

    number: int  #: each is saved once
    name: str
    text: str


def searched(key: str) -> str:
    """Returns the words that stand in the search field now."""
    state = st.session_state.get(key)
    return str((state.get("asked") if state else None) or "").strip()[:200]


def palette(
    key: str,
    text: str,
    groups: Sequence[OfferGroup],
    on_go: Callable[[str], None],
    *,
    paths: Sequence[str],
    file: SavedFile | None = None,
) -> None:
    """The search, and the hits for ``text``.

    Args:
        key: The element's.
        text: What was searched.
        groups: What was found.
        on_go: Gets the address or the command that was chosen.
        paths: Of all pages, for each of which Streamlit keeps a theme.
        file: What is to be saved.
    """

    def went() -> None:
        state = st.session_state.get(key)
        if go := state.get("go") if state else None:
            on_go(str(go))

    data = {
        "text": text,
        "groups": tuple({**asdict(group), "offers": tuple(map(_told, group.offers))} for group in groups),
        "paths": tuple(paths),
        "file": asdict(file) if file else None,
    }
    _PALETTE(key=key, data=data, on_go_change=went, on_asked_change=lambda: None, width="content")


def _told(offer: Offer) -> dict[str, object]:
    return {**asdict(offer), "text": short(offer.text, 90), "note": short(offer.note, 90)}
