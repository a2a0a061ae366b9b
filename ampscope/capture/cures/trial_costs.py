"""Measures what a change that cures costs: time, by runs that nobody observes, and memory, as its ops have written."""

from __future__ import annotations

from ampscope.capture.changes.replaced_calls import OtherForm
from ampscope.capture.changes.replay_change import ModulesInFloat32, ReplayChange
from ampscope.capture.rerun.engine import LookDepth, Rerun, RerunEngine
from ampscope.capture.tape.taped_step import TapedStep

#: Seconds up to which a run is made twice: so short a one is easily held up.
SHORT = 0.05
#: Share of a step by which two runs of the same may differ.
NOISE = 0.03


class StepTimes:
    """Times a step with and without changes.

    Args:
        step: The step.
        engine: Runs it again.
    """

    def __init__(self, step: TapedStep, engine: RerunEngine) -> None:
        self._step = step
        self._engine = engine
        self._unchanged: dict[type[ReplayChange], list[float]] = {}

    def extra_time(self, change: ReplayChange) -> float | None:
        """Measures the share by which a change prolongs the step; 0 where that is within what two runs differ by.

        None where the step could not be run so.
        """
        changed, without = _to_time(change)
        kind = type(without)
        if kind not in self._unchanged:
            self._unchanged[kind] = self._seconds(without)
        unchanged, seconds = self._unchanged[kind], self._seconds(changed)
        if not unchanged or not seconds:
            return None
        least = min(unchanged)
        more = (min(seconds) - least) / least
        return more if more > max(NOISE, (max(unchanged) - least) / least) else 0.0

    def _seconds(self, change: ReplayChange) -> list[float]:
        """How long one run takes, or two short ones; none where one failed."""
        found: list[float] = []
        while not found or (len(found) < 2 and found[0] < SHORT):
            ran = self._engine.run(Rerun(self._step, change, LookDepth.NONE))
            if ran.reason:
                return []
            found.append(ran.seconds)
        return found


def _to_time(change: ReplayChange) -> tuple[ReplayChange, ReplayChange]:
    """A change as it is to be timed, and what watches for the same calls and changes nothing."""
    if isinstance(change, OtherForm):
        return change.to_time(applied=True), change.to_time(applied=False)
    return change, ModulesInFloat32(())
