"""The runs on offer as a list: summaries are read again only of runs that may have changed, verdicts one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import streamlit as st

from ampscope.analysis.causes.catalogue import cause_in_words
from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.overview.run_list import RunSummary, run_summaries
from ampscope.errors import AmpscopeError, RunUnreachable
from ampscope.report.terminal.runs_text import verdict_in_words
from ampscope.trace.schema import MANIFEST
from ampscope.trace.vocabulary import Verdict

#: A manifest with its time of modification: closing and resuming a run write it.
ManifestVersion = tuple[Path, int]
VerdictKey = tuple[ManifestVersion, int, int, int]
#: Steps in which a run shows whether it is observed at all.
FIRST_STEPS = 4


@dataclass(frozen=True, slots=True)
class ShortVerdict:
    """A verdict in a few words."""

    verdict: str
    what: str = ""


@dataclass(slots=True)
class RunList:
    """Holds what is known of runs so far; shared by everyone who looks at the same app."""

    _summaries: dict[ManifestVersion, RunSummary] = field(default_factory=dict)
    _verdicts: dict[VerdictKey, ShortVerdict] = field(default_factory=dict)
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def summaries(self, paths: Sequence[Path]) -> dict[Path, RunSummary]:
        """The runs' summaries; those of closed runs are kept."""
        versions = {path: _manifest_version(path) for path in paths}
        with self._reading:  # who comes while another reads has nothing left to read
            unknown = [path for path, version in versions.items() if version not in self._summaries]
            fresh = dict(zip(unknown, run_summaries(unknown), strict=True))
            self._summaries.update({versions[path]: one for path, one in fresh.items() if one.status == "closed"})
        return {path: fresh.get(path) or self._summaries[version] for path, version in versions.items()}

    def verdict(self, run: RunSummary) -> ShortVerdict | None:
        """The verdict on a run if it has been diagnosed as it is now."""
        return self._verdicts.get(_verdict_key(run))

    def diagnose(self, runs: Iterable[RunSummary], seconds: float) -> bool:
        """Diagnose runs for about so many ``seconds``; whether all of them are."""
        end = time.monotonic() + seconds
        for run in runs:
            if self.verdict(run) is None:
                if time.monotonic() >= end:
                    return False
                self._verdicts[_verdict_key(run)] = _short_verdict(run.path)
        return True


@st.cache_resource(show_spinner=False)
def run_list() -> RunList:
    """The one list of this server."""
    return RunList()


def _manifest_version(path: Path) -> ManifestVersion:
    try:
        return path, (path / MANIFEST).stat().st_mtime_ns
    except (OSError, RunUnreachable):
        return path, 0


def _verdict_key(run: RunSummary) -> VerdictKey:
    """Returns the key of a verdict, which changes in a run being written at its first steps and when it goes wrong."""
    return _manifest_version(run.path), min(run.steps, FIRST_STEPS), run.incidents, run.findings


def _short_verdict(path: Path) -> ShortVerdict:
    try:
        found = diagnose(path)
    except AmpscopeError as error:
        return ShortVerdict("unreadable", str(error))
    calm = "" if found.verdict is Verdict.HEALTHY else found.summary
    what = cause_in_words(found.primary.cause) if found.primary else calm
    return ShortVerdict(verdict_in_words(found.verdict), what)
