"""What traced steps ran in, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampscope.analysis.precision.over_steps import DtypeChange, PrecisionOverSteps
from ampscope.analysis.words import op_in_words
from ampscope.report.numbers import count
from ampscope.report.safe_text import short

#: Modules that are named, characters of a name, and changes that are told.
_NAMED, _LONGEST, _TOLD = 3, 60, 3


def over_steps_in_words(seen: PrecisionOverSteps) -> Iterator[str]:
    """What became of the dtypes from step to step."""
    steps = f"{count(len(seen.steps), 'traced step')}, {seen.steps[0]:,} to {seen.steps[-1]:,}"
    if not seen.changes:
        yield f"In all {steps}, every module ran in the same dtypes."
    for change in seen.changes[:_TOLD]:
        yield f"{change_words(change)}."
    if len(seen.changes) > _TOLD:
        more = count(len(seen.changes) - _TOLD, "more change")
        yield f"There {'is' if len(seen.changes) == _TOLD + 1 else 'are'} {more} in the {steps}."
    if seen.audited:
        verb = "was" if seen.audited == 1 else "were"
        yield f"{count(seen.audited, 'more step')} {verb} replayed for an audit alone and not counted."
    if seen.passed_over:
        yield f"{count(seen.passed_over, 'more traced step')} ran yet other ops and were not looked at."


def change_words(change: DtypeChange) -> str:
    """``h.2.mlp ran in float32 from step 40 on, before (up to step 39) in float16``."""
    named = _listed([short(name, _LONGEST) or "code outside the modules" for name in change.modules])
    what = f"{op_in_words(change.op)} in {named}" if change.op else named
    until = "on" if change.until is None else f"until step {change.until:,}"
    gap = f" (up to step {change.before:,})" if change.before < change.step - 1 else ""
    return f"{what} ran in {change.now} from step {change.step:,} {until}, before{gap} in {change.was}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    if more > 0:
        return f"{', '.join(names[:_NAMED])} and {count(more, 'more module')}"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
