"""The runs on offer as a list: summaries are read again only of runs that may have changed, verdicts one by one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import streamlit as st

from ampscope.analysis.causes.catalogue import cause_in_words
from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.overview.run_list import RunSummary, run_summaries
from ampscope.errors import AmpscopeError
from ampscope.trace.schema import MANIFEST
from data.run_places import Offer, Place, offers

#: Seconds for which a look at the folders holds.
_HOLDS_S = 3
#: The age of a run's manifest: closing and resuming a run write it.
Age = tuple[Path, int]


@dataclass(frozen=True, slots=True)
class Told:
    """A verdict in a few words."""

    verdict: str
    what: str = ""


@dataclass(slots=True)
class Listing:
    """What is known of runs so far; shared by everyone who looks at the same app."""

    summaries: dict[Age, RunSummary] = field(default_factory=dict)
    verdicts: dict[tuple[Age, int, int], Told] = field(default_factory=dict)

    def look(self, paths: Sequence[Path]) -> dict[Path, RunSummary]:
        """The runs' summaries; those of closed runs are kept."""
        ages = {path: _age(path) for path in paths}
        unknown = [path for path, age in ages.items() if age not in self.summaries]
        fresh = dict(zip(unknown, run_summaries(unknown), strict=True))
        self.summaries.update({ages[path]: one for path, one in fresh.items() if one.status == "closed"})
        return {path: fresh.get(path) or self.summaries[age] for path, age in ages.items()}

    def verdict(self, one: RunSummary) -> Told | None:
        """The verdict on a run if it has been diagnosed as it is now."""
        return self.verdicts.get(_state(one))

    def diagnose(self, runs: Iterable[RunSummary], seconds: float) -> bool:
        """Diagnose runs for about so many ``seconds``; whether all of them are."""
        end = time.monotonic() + seconds
        for one in runs:
            if self.verdict(one) is None:
                if time.monotonic() >= end:
                    return False
                self.verdicts[_state(one)] = _told(one.path)
        return True


def offered(looked: tuple[Place, ...]) -> dict[str, Offer]:
    """The runs in ``looked`` by key, as of a moment ago."""
    return _offered(tuple(str(place.path) for place in looked), looked)


@st.cache_resource(ttl=_HOLDS_S, show_spinner=False)
def _offered(paths: tuple[str, ...], _looked: tuple[Place, ...]) -> dict[str, Offer]:  # noqa: ARG001  cache key
    return offers(_looked)


@st.cache_resource(show_spinner=False)
def listing() -> Listing:
    """The one listing of this server."""
    return Listing()


def _age(path: Path) -> Age:
    try:
        return path, (path / MANIFEST).stat().st_mtime_ns
    except OSError:
        return path, 0


def _state(one: RunSummary) -> tuple[Age, int, int]:
    """What a verdict was made of: in a run being written, another one whenever something went wrong anew."""
    return _age(one.path), one.incidents, one.findings


def _told(path: Path) -> Told:
    try:
        found = diagnose(path)
    except AmpscopeError as error:
        return Told("unreadable", str(error))
    return Told(found.verdict.value, cause_in_words(found.primary.cause) if found.primary else "")
