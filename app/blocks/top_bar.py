"""The bar on top of every page says which run is on screen and how it is, and has the search."""

from __future__ import annotations

import time
from collections.abc import Iterator

import streamlit as st

from ampscope.analysis.causes.catalogue import cause_in_words
from ampscope.analysis.overview.search import Hit, HitKind
from ampscope.errors import AmpscopeError
from ampscope.report.html.markup import as_html
from ampscope.report.numbers import ago, count
from ampscope.report.terminal.runs_text import verdict_in_words
from ampscope.trace.vocabulary import Verdict
from blocks.choices import choose
from blocks.components.palette import Offer, OfferGroup, SavedFile, palette, searched
from blocks.live_part import live_part
from blocks.page_links import Way, rank_of, switch_to, way_to
from blocks.verdict import item_line
from data.run_folders import OfferedRun
from data.run_results import diagnosis_of, html_report, named_items, pulse_of, search_of
from data.run_snapshot import RunSnapshot, current_run, select_rank, select_run
from state import Page, switch_run

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


#: Ranks that stand side by side; more are in a box.
_CHIPS = 8
_BAR = "amp-bar"


def top_bar(offered: dict[str, OfferedRun], page: Page) -> None:
    """Let the reader choose among ``offered`` and open the choice; say how it is.

    Args:
        offered: The runs by key.
        page: The page that is drawn below.

    Raises:
        RunError: the chosen run cannot be read; the others still can be chosen.
    """
    with st.container(key=_BAR, horizontal=True, vertical_alignment="center", gap="small"):
        choose_run(offered)
        live_part(_live)
        if page is not Page.RUNS:  # whose list is there at once; a verdict on a first look takes a while
            live_part(_verdict)
        if page.is_of_one_rank:
            choose_rank(current_run())
        with st.container(key="amp-search", width="content"):
            search_box()


def choose_run(offered: dict[str, OfferedRun]) -> None:
    """The box for the run."""
    asked = st.query_params.get("run")
    own = [each for each in offered.values() if not each.is_sample]
    key = choose("run", "Run", list(offered), lambda key: offered[key].label, named=len(own) != 1, width=230, bare=True)
    switch_run(key, drop_params=asked not in (None, key))
    select_run(offered[key].path)


def choose_rank(run: RunSnapshot) -> None:
    """Chips or a box for the rank that is looked at, where there are several; at first, that of what to read first."""
    if not run.world.is_shared:
        return
    ranks = [str(rank) for rank in run.world.present]
    chosen = choose(
        "rank",
        f"Rank, of {run.world.size:,}",
        ranks,
        lambda rank: f"Rank {int(rank):,}",
        default=str(_told_first(run)),
        named=run.is_open,
        width=130,
        bare=True,
        chips=len(ranks) <= _CHIPS,
    )
    select_rank(int(chosen))


def _told_first(run: RunSnapshot) -> int:
    """The rank to begin with: where the run's primary incident is, else one whose healthy steps were traced."""
    try:
        primary = diagnosis_of(run).primary
    except AmpscopeError:
        return run.rank  # the page says what is wrong with it
    return primary.rank if primary is not None and primary.rank in run.world.present else run.rank


def _verdict(run: RunSnapshot) -> None:
    """The verdict in a few words."""
    try:
        diagnosis = diagnosis_of(run)
    except AmpscopeError:
        return  # the page says so
    primary = diagnosis.primary
    kind = primary.severity.value if primary else "good" if diagnosis.verdict is Verdict.HEALTHY else "warning"
    words = cause_in_words(primary.cause) if primary else " ".join(diagnosis.unobserved)
    st.html(
        f'<span class="amp-chip {kind}">{verdict_in_words(diagnosis.verdict)}</span> '
        f'<span class="amp-bar-words">{as_html(words, 80)}</span>',
        width="content",
    )


def _live(run: RunSnapshot) -> None:
    """A dot beside a run that is being written."""
    if run.is_open:
        st.html(live_html(run, time.time()), width="content")


def live_html(run: RunSnapshot, now: float) -> str:
    """The dot, and how far the run is."""
    pulse = pulse_of(run)
    silent = pulse.silence(now)
    kind = "silent" if pulse.is_overdue(now) else "live"
    far = "no step yet" if silent is None else f"step {count(pulse.last_step or 0)}, {ago(silent)}"
    return f'<span class="amp-live {kind}"><i></i>{kind}<span class="amp-bar-words">{as_html(far)}</span></span>'
