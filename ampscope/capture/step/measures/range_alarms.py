"""Tells of values that are near overflow, or on their way there, before they get there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from ampscope.capture.record.run_recorder import Recorder
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.tracing.sampling.ranges import Ahead, Ranges
from ampscope.provenance import Graph, meant
from ampscope.provenance.loss_scale import scaled
from ampscope.trace.schema import EventKind, Phase, SiteRow
from ampscope.trace.vocabulary import NEAR_OVERFLOW, OVERFLOW_AHEAD


class _Alarm(NamedTuple):
    """A place that is told."""

    ahead: Ahead
    site: SiteRow


class RangeAlarms:
    """The alarms of a run, one for each place: of one that grows, and of one that is near.

    Args:
        recorder: Takes each down for the time line.
        terminal: Where the first of each sample is told.
    """

    def __init__(self, recorder: Recorder, terminal: Terminal) -> None:
        self._recorder = recorder
        self._terminal = terminal
        self._asked: set[tuple[int, bool]] = set()  # places that were looked into, and whether for growing

    def look(
        self, ranges: Ranges, step: int, graph: Callable[[], Graph], scale: Callable[[], float | None] = lambda: None
    ) -> None:
        """A step was sampled.

        Args:
            ranges: With its magnitudes.
            step: Its number.
            graph: Makes the graph of its ops; asked for where there is something new.
            scale: Tells its loss scale, None without one; likewise. It waits for the device.
        """
        new = [each for each in ranges.ahead() if (each.place, each.forecast is not None) not in self._asked]
        if not new:
            return
        ops = graph()
        growing = scaled(ops, scale())
        scales = growing.scale | growing.carrying
        alarms = [alarm for each in new if (alarm := _alarm(each, ranges, ops, scales)) is not None]
        self._asked |= {(each.place, grows) for each in new for grows in {each.forecast is not None, False}}
        for number, alarm in enumerate(alarms):
            text = _in_words(alarm)
            self._recorder.event(EventKind.NOTE, step, text)
            if number == 0:
                others = f", and {len(alarms) - 1} more" if len(alarms) > 1 else ""
                key = hashlib.sha256(f"{alarm.site.op} {alarm.site.module}".encode()).hexdigest()[:8]
                self._terminal.ahead(key, step, text + others)


def _alarm(ahead: Ahead, ranges: Ranges, ops: Graph, scales: frozenset[int]) -> _Alarm | None:
    """An alarm, unless an overflow there would do no harm, its size is meant, or it is that of the loss scale."""
    here = [seq for seq, rows in ops.outputs.items() if ranges.is_of(rows[0].site, ahead.place)]
    if not here:
        return None
    seq = max(here, key=lambda each: max(map(meant.magnitude, ops.outputs[each])))
    if seq in scales or meant.cannot_harm(ops, seq) or (ahead.forecast is None and meant.is_meant(ops, seq)):
        return None
    return _Alarm(ahead, ops.site(seq))


def _in_words(alarm: _Alarm) -> str:
    (_, bits, forecast), site = alarm
    outside = "the loss code" if site.phase == Phase.LOSS else "the model itself"
    where = f"{site.op} in {site.module or outside}"
    where = f"{where}, {site.file}:{site.line}" if site.file else where
    dtype = site.out_dtypes[0] if site.out_dtypes else "its dtype"
    if forecast is None:
        return f"{NEAR_OVERFLOW}: {where} gives values that may grow {2**bits:.2f} times until {dtype} overflows"
    when = f"at about step {forecast.step:,} ({forecast.low:,} to {forecast.high:,})"
    return f"{OVERFLOW_AHEAD}: {where} gives values that grow, and {dtype} overflows {when}"
