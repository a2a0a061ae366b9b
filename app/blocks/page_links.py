"""Ways from one page to the next that keep the run on screen and say what to look at there.

Labels are our own words, never names from a trace: Streamlit reads them as markdown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple
from urllib.parse import urlencode

import streamlit as st

from ampscope.analysis.results import Finding, Incident
from data.run_results import pulse_of
from data.run_snapshot import RunSnapshot
from state import Page, get_param

#: What stays the same on the way, unless the link says otherwise.
_KEPT = ("run", "rank", "optimizer", "range")
#: Characters of a name that go into an address.
_LONGEST = 300


def link(page: Page, label: str, *, icon: str | None = None, **params: object) -> None:
    """A link to ``page`` with query parameters, but for those that are None."""
    st.page_link(page.file, label=label, icon=icon or page.icon, query_params=_query(params))


class Way(NamedTuple):
    """The link of a table's row, or of a piece of our own HTML."""

    page: Page
    query: Mapping[str, str]

    @property
    def address(self) -> str:
        """The page below the app's address with its query."""
        return f"{self.page.url_path}?{urlencode(self.query)}"


def way_to(page: Page, **params: object) -> Way:
    """Returns the target of `link` as a `Way`."""
    return Way(page, _query(params))


def many_ways() -> Callable[..., Way]:
    """Returns a faster `way_to` for hundreds of links: the parameters that all of them keep are looked up once."""
    kept = kept_query()
    return lambda page, **params: Way(page, kept | _said(params))


def switch_to(way: Way) -> None:
    """Leave this page for another."""
    st.switch_page(way.page.file, query_params=dict(way.query))


def link_row() -> AbstractContextManager[object]:
    """Links inside stand side by side and wrap where the window is narrow."""
    return st.container(horizontal=True, gap="small", vertical_alignment="center")


def to_incident(name: str, label: str = "The incident", *, icon: str | None = None, rank: int | None = None) -> None:
    """To an incident or finding by its name from `named_items`; the pages after it look at ``rank``."""
    link(Page.INCIDENT, label, icon=icon, incident=name, rank=rank)


def to_replay(
    step: int,
    source: str = "",
    op: int | None = None,
    label: str = "Replay this step",
    *,
    rank: int | None = None,
    run: str | None = None,
    against: str | None = None,
) -> None:
    """To a traced step op by op.

    Args:
        step: The step.
        source: Which execution of it, a `Source`; by default the replay.
        op: The sequence number of the op that the cursor is on.
        label: What the link says.
        rank: Where it is another's.
        run: By its key, where it is another.
        against: The traced step of the run to compare it with, as Replay's box names it.
    """
    link(Page.REPLAY, label, step=step, source=source or None, op=op, rank=rank, run=run, against=against)


def to_scale(step: int | None, label: str = "The loss scale at this step", *, rank: int | None = None) -> None:
    """To the scaler's history, ``step`` marked; ``rank`` where it is another's."""
    link(Page.SCALE, label, step=step, rank=rank)


def to_precision(
    module: str | None,
    step: int | None = None,
    source: str = "",
    label: str = "This module's precision",
    *,
    rank: int | None = None,
) -> None:
    """To what the ops of ``module`` ran in at a traced step; all modules where its name is too long for an address."""
    known = module if module and len(module) <= _LONGEST else None
    link(Page.PRECISION, label, step=step, source=source or None, module=known, rank=rank)


def to_plan(label: str = "What would fit a narrower format") -> None:
    """To what each module would lose in narrower formats, and the scales at which its gradients fit."""
    link(Page.PLAN, label)


def to_ranges(label: str = "Ranges of all modules") -> None:
    """To how close values come to the ends of their dtypes."""
    link(Page.RANGES, label)


def switch_to_ranges(place: str, step: int | None) -> None:
    """Leave this page for a place close up at a step, by its `OpPlace.key`."""
    st.switch_page(Page.RANGES.file, query_params=_query({"place": place, "step": step}))


def to_compare(label: str = "Compare two runs") -> None:
    """To this run against another."""
    link(Page.COMPARE, label)


def to_ranks(label: str = "All ranks") -> None:
    """To all ranks together."""
    link(Page.RANKS, label)


def rank_of(item: Incident | Finding) -> int | None:
    """The rank that a link to what is seen of ``item`` names; None where there is one alone."""
    return item.rank if item.world > 1 else None


def to_overview(label: str = "Back to the overview") -> None:
    """To the verdict."""
    link(Page.OVERVIEW, label)


def to_usage(label: str = "How the loop uses the scaler") -> None:
    """To the usage findings."""
    link(Page.USAGE, label)


def to_run(run: str, label: str) -> None:
    """To the verdict on another run, by its key."""
    st.page_link(Page.OVERVIEW.file, label=label, icon=Page.OVERVIEW.icon, query_params={"run": run})


def switch_to_incident(name: str) -> None:
    """Leave this page for an incident or finding by its name from `named_items`."""
    st.switch_page(Page.INCIDENT.file, query_params=_query({"incident": name}))


def switch_to_scale(step: int) -> None:
    """Leave this page for the scaler's history, ``step`` marked."""
    st.switch_page(Page.SCALE.file, query_params=_query({"step": step}))


def kept_query() -> dict[str, str]:
    """Returns the query parameters that an address keeps on every page, as they are now."""
    return {name: known for name in _KEPT if (known := get_param(name)) is not None}


def _query(params: Mapping[str, object]) -> dict[str, str]:
    return kept_query() | _said(params)


def _said(params: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in params.items() if value is not None}


def newer_step_link(run: RunSnapshot, *, shown: int, link: Callable[[int, str], None]) -> None:
    """Offer the newest traced step where it is not among those on the page.

    Args:
        run: The run, as it is now.
        shown: The newest traced step on the page.
        link: Draws a link to a step, with these words.
    """
    last = pulse_of(run).last_traced
    if last is not None and last > shown:
        link(last, f"Step {last:,} has been traced since: show it")
