"""How far the search for the cure of one failure has come, and how its cure does on later steps that fail so."""

from __future__ import annotations

from ampscope.capture.replay.changes import ModulesInFloat32, ReplayChange
from ampscope.capture.replay.cures.forms.form_change import OtherForm
from ampscope.capture.replay.cures.plan import Plan, TrialFeedback
from ampscope.trace.schema import Trial

#: Later bad steps on which a cure is tried, at the most.
FOLLOWED = 3


class FailureSearch:
    """The plan for one failure, which goes on where it stopped, and the smallest cure that it has found.

    Args:
        plan: What is to be tried.
        modules: In which values went wrong first.
    """

    def __init__(self, plan: Plan, modules: tuple[str, ...]) -> None:
        self.plan = plan
        self._modules = modules
        self._pending = next(plan, None)
        self._cure: ReplayChange | None = None
        self._cured = 0  # later bad steps
        self._followed = 0  # of them and those that it did not cure
        self._following: ReplayChange | None = None  # the cure, on the present step
        self._further: ReplayChange | None = None  # it with the modules in which the step then failed

    @property
    def is_promising(self) -> bool:
        """Whether what comes next is another form of the failed call, or more modules where one moved the failure."""
        coming = self._following or self._further or self._pending
        widens = isinstance(coming, ModulesInFloat32) and len(coming.modules) > 1 and not coming.because
        return widens or isinstance(coming, OtherForm)

    def next(self, *, first: bool, spare: bool) -> ReplayChange | None:
        """Returns the change to try next; None where there is nothing more.

        Args:
            first: Nothing has been tried on the step yet: what has cured one before is, before the plan goes on.
            spare: More than one change may be tried.
        """
        if first:
            self._following = self._further = None
            if self._cure is not None and self._followed < FOLLOWED and (spare or self._pending is None):
                self._followed += 1
                self._following = _anew(self._cure)
        return self._following or self._further or self._pending

    def showed(self, change: ReplayChange, feedback: TrialFeedback) -> int:
        """Notes what came of a change; gives the number of later bad steps that it has cured by now."""
        cures = feedback.outcome is Trial.FINITE
        if change is self._following:
            self._following = None
            self._cured += cures
            if not cures:
                self._further, self._cure = self._with_modules(change, feedback), None
            return self._cured if cures else 0
        smaller = self._cure is None or _size(change) < _size(self._cure)
        if cures and smaller and not change.because and isinstance(change, (OtherForm, ModulesInFloat32)):
            self._cure, self._cured, self._followed = change, 0, 0
        if change is self._further:
            self._further = None
        else:
            self._pending = _sent(self.plan, feedback)
        return 0

    def _with_modules(self, cure: ReplayChange, feedback: TrialFeedback) -> ReplayChange | None:
        """Float32 also for the modules to which a cure has only moved the failure; None where there are none."""
        again = feedback.failure.modules if feedback.failure is not None else ()
        whole = cure if isinstance(cure, ModulesInFloat32) else ModulesInFloat32(self._modules)
        more = tuple(name for name in again if name not in whole.modules)
        return whole.with_modules(more) if more else None


def _anew(cure: ReplayChange) -> ReplayChange:
    """Makes the same change, which has seen nothing of another step."""
    if isinstance(cure, OtherForm):
        return cure.at_scale(cure.scale)
    return cure.with_modules(()) if isinstance(cure, ModulesInFloat32) else cure


def _size(change: ReplayChange) -> tuple[bool, int]:
    return not isinstance(change, OtherForm), len(change.modules)


def _sent(plan: Plan, feedback: TrialFeedback) -> ReplayChange | None:
    try:
        return plan.send(feedback)
    except StopIteration:
        return None
