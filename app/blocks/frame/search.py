"""The search of every page: what the run has, what was noticed in it, the pages, and commands."""

from __future__ import annotations

from collections.abc import Iterator

import streamlit as st

from ampscope.analysis.overview.search import Hit, HitKind
from ampscope.errors import AmpscopeError
from blocks.basics.page_links import Way, rank_of, switch_to, way_to
from blocks.components.palette.palette import Offer, OfferGroup, SavedFile, palette, searched
from blocks.verdict.item_list import item_line
from data.current_run import current_run
from data.downloads import html_report
from data.named_items import named_items
from data.run_results import diagnosis_of, search_of
from state.pages import Page

_KEY, _WENT, _SAVED = "search-palette", "_ampscope_search_went", "_ampscope_search_saved"
_TITLES = {HitKind.STEP: "Steps", HitKind.MODULE: "Modules", HitKind.LINE: "Lines", HitKind.OP: "Ops"}
_REPORT = "report"
#: What to say, and what to do.
_COMMANDS = (
    ("Copy link to this page", "link"),
    ("Download report", _REPORT),
    ("Theme: light", "theme Light"),
    ("Theme: dark", "theme Dark"),
    ("Theme: as the system", "theme System"),
)
#: Characters of a module's name that go into an address; what was noticed that is offered.
_LONGEST, _NOTICED = 300, 5
#: Groups with the ways that their offers lead.
_Found = Iterator[tuple[str, int, list[tuple[Offer, Way | None]]]]


def search_box() -> None:
    """The field that opens the search; it alone is drawn again while someone types."""
    st.fragment(_search)()


def _search() -> None:
    text = searched(_KEY)
    words = text.casefold().split()
    found = [*_hits(text), *_noticed(words), *_pages(words), *_commands(words)]
    groups = [
        OfferGroup(title=title, total=total, offers=tuple(offer for offer, _ in offers))
        for title, total, offers in found
        if offers
    ]
    went = st.session_state.pop(_WENT, None)
    palette(
        _KEY,
        text,
        groups,
        lambda go: st.session_state.update({_WENT: go}),
        paths=[page.url_path for page in Page],
        file=_report() if went == _REPORT else None,
    )
    ways = {offer.go: way for _, _, offers in found for offer, way in offers if way is not None}
    if went in ways:
        switch_to(ways[went])


def _hits(text: str) -> _Found:
    """Yields the places in the run itself that match a search."""
    try:
        found = search_of(current_run(), text)
    except AmpscopeError:
        return  # the page says what is wrong with it
    for each in found:
        offers = [_offer(_words(hit), hit.note, _way(hit)) for hit in each.hits]
        yield _TITLES[each.kind], each.total, offers


def _words(hit: Hit) -> str:
    return f"Step {hit.text}" if hit.kind is HitKind.STEP else hit.text


def _way(hit: Hit) -> Way:
    """Returns the link to a hit: a module in Precision, a step without ops in Scale, all else in Replay."""
    where = {"step": hit.step, "source": hit.source or None}
    if hit.kind is HitKind.MODULE:
        return way_to(Page.PRECISION, **where, module=hit.text if len(hit.text) <= _LONGEST else None)
    if hit.kind is HitKind.STEP and not hit.source:
        return way_to(Page.SCALE, step=hit.step)
    return way_to(Page.REPLAY, **where, op=hit.seq)


def _noticed(words: list[str]) -> _Found:
    """Incidents and findings."""
    try:
        items = named_items(diagnosis_of(current_run()))
    except AmpscopeError:
        return
    lines = {name: item_line(item) for name, item in items.items()}
    named = [name for name, line in lines.items() if _has(line, words)]
    offers = [
        _offer(lines[name], "", way_to(Page.INCIDENT, incident=name, rank=rank_of(items[name])))
        for name in named[:_NOTICED]
    ]
    yield "Noticed", len(named), offers


def _pages(words: list[str]) -> _Found:
    world = current_run().world.size
    found = [page for page in Page if page.is_offered(world) and _has(page.title, words)]
    yield "Pages", len(found), [_offer(page.title, "", way_to(page)) for page in found]


def _commands(words: list[str]) -> _Found:
    found = [one for one in _COMMANDS if _has(one[0], words)]
    offers = [(Offer(text=text, go=go, is_command=True), None) for text, go in found]
    yield "Commands", len(found), [*offers]


def _offer(text: str, note: str, way: Way) -> tuple[Offer, Way | None]:
    return Offer(text=text, note=note, go=way.address), way


def _has(line: str, words: list[str]) -> bool:
    return all(word in line.casefold() for word in words)


def _report() -> SavedFile:
    number = st.session_state[_SAVED] = st.session_state.get(_SAVED, 0) + 1
    return SavedFile(number=number, name="report.html", text=html_report(current_run()).decode())
