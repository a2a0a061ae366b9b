"""Defines alerts: an incident, a mistake in the loop, or a value on its way to overflow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AlertKind(StrEnum):
    """The kinds of events that an alert tells of."""

    INCIDENT = "incident"  #: a step went wrong
    FINDING = "finding"  #: the loop misuses autocast or the scaler
    AHEAD = "ahead"  #: a value is near overflow, or on its way there


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One thing that a run tells; what `ampscope.watch` hands to ``on_incident``, and trackers and webhooks tell.

    It has many attributes because it has to be understood far from the run, by people and programs.
    """

    kind: AlertKind
    step: int  #: at which it was seen
    what: str  #: what was seen, as a clause: ``non-finite gradient``
    run: str  #: the run's folder, absolute
    look: str  #: the command that explains it
    time: float  #: unix time, seconds
    rank: int = 0  #: that tells it
    world_size: int = 1  #: how many ranks train together
    replay: str = ""  #: of an incident: a `ampscope.trace.schema.ReplayStatus`
    verdict: str = ""  #: of the run so far, a `ampscope.trace.vocabulary.Verdict`; empty where it was not diagnosed
    summary: str = ""  #: the diagnosis in a sentence or a few; empty where there is none
    cause: str = ""  #: a `ampscope.trace.vocabulary.Cause`; empty where it is not known
    severity: str = ""  #: a `ampscope.trace.vocabulary.Severity`, ``info`` for what is harmless; empty where not known
    op: str = ""  #: that made the value, e.g. ``aten.bmm.default``
    module: str = ""  #: that ran it
    file: str = ""  #: of the user's line
    line: int = 0  #: its number, from 1; 0 where it is not known
    remedy: str = ""  #: the first of what to change
    suppressed: int = 0  #: alerts since the one before that were not told, for they came too fast

    @property
    def headline(self) -> str:
        """Step and what was seen, in one line."""
        where = f"rank {self.rank}, " if self.world_size > 1 else ""
        replay = f" (replay: {self.replay.replace('_', ' ')})" if self.replay else ""
        return f"{where}step {self.step:,}: {self.what}{replay}"

    @property
    def place(self) -> str:
        """Op, module and line, as far as they are known."""
        known = (self.op, f"in {self.module}" if self.module else "", f"{self.file}:{self.line}" if self.file else "")
        return ", ".join(part for part in (" ".join(filter(None, known[:2])), known[2]) if part)

    @property
    def text(self) -> str:
        """All of it, in lines."""
        more = f"{self.suppressed} further alerts since the last one were not told." if self.suppressed else ""
        remedy = f"Remedy: {self.remedy}" if self.remedy else ""
        lines = (f"{self.headline}.", self.summary, self.place, remedy, more, f"Look: {self.look}")
        return "\n".join(line for line in lines if line)
