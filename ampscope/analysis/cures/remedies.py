"""Which change cures a failure, with code to paste: what a replay proved first, what was tried in vain last."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.causes.catalogue import CATALOGUE
from ampscope.analysis.causes.cause_entry import NOTHING_MORE, Occurrence, Reason
from ampscope.analysis.causes.overflow import ScaleInLoop
from ampscope.analysis.cures import other_forms, tried_remedies
from ampscope.analysis.cures.advice import beside
from ampscope.analysis.cures.explicit_half import ExplicitHalf
from ampscope.analysis.cures.program_lines import Program
from ampscope.analysis.results import Incident, Remedy, Tried
from ampscope.trace.schema import Change, ReplayStatus, Trial, Trigger
from ampscope.trace.vocabulary import Cause

#: Where loss and gradients are finite, and what is wrong shows elsewhere.
_FLOAT32_ALONE = frozenset(
    {
        *(Trigger.NONFINITE_CARRIED, Trigger.BUFFER_STANDS_STILL, Trigger.UPDATES_LOST),
        *(Trigger.ABSORBED_OVERFLOW, Trigger.INFORMATION_LOST),
    }
)
#: Steps on which a change proves nothing.
_NOTHING_TRIED: dict[str | None, str] = {
    ReplayStatus.RECEIVED: "nothing that this rank does otherwise changes what the others sent",
    ReplayStatus.DIVERGED: "the step did not come out the same when it was run again",
}
_NOTHING = ExplicitHalf()
_UNKNOWN = Program()


def remedies(
    cause: Cause,
    *,
    op: str = "",
    module: str = "",
    reason: Reason = NOTHING_MORE,
    explicit: ExplicitHalf = _NOTHING,
    tried: Sequence[Tried] = (),
    program: Program = _UNKNOWN,
) -> tuple[Remedy, ...]:
    """The cures for a cause.

    Args:
        cause: The cause.
        op: The op at the origin.
        module: The module it ran in.
        reason: What was seen.
        explicit: The half precision that the code asks for itself.
        tried: The replays.
        program: Lines of the program around the model.
    """
    if isinstance(reason, ScaleInLoop):  # the number that the loop took stays what it was in a replay at another scale
        tried = [each for each in tried if each.change != Change.SCALE]
    changes = frozenset(each.change for each in tried)
    occurrence = Occurrence(op=op, module=module, reason=reason, explicit_half=explicit.is_cause, tried=changes)
    advice = CATALOGUE[cause].advice(occurrence)
    if explicit.conversions and not occurrence.has_tried(Change.CONVERSIONS):
        advice = (tried_remedies.take_out(explicit.conversions), *advice)
    proved = tried_remedies.remedies(cause, tried, explicit, program)
    helped = [remedy for remedy in proved if remedy.verified]
    return (*helped, *beside(advice, proved), *(remedy for remedy in proved if not remedy.verified))


def is_tried_by_replays(remedy: Remedy) -> bool:
    """Whether it is of a kind that replays try on a step, and none has tried it; weights are from before the step."""
    return remedy.verified is None and remedy.kind not in ("", Change.FP32)


def why_untried(incident: Incident) -> str:
    """Why no replay has tried anything more on an incident; empty where nothing stood in its way."""
    if incident.trigger in _FLOAT32_ALONE:
        return "of what goes wrong like this, replays try float32 alone"
    if incident.replay == ReplayStatus.UNAVAILABLE and not other_forms.are_of_optimizer(incident.tried):
        return incident.replay_reason
    if incident.replay and not incident.tried:
        return _NOTHING_TRIED.get(incident.replay, "this step got no replay with a change (replay_budget=)")
    return next((each.reason for each in incident.tried if each.outcome == Trial.UNAVAILABLE), "")
