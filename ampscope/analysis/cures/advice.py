"""General advice beside what replays have tried: what one has tried is not told twice, and the rest says why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ampscope.analysis.results import Remedy, Tried
from ampscope.trace.schema import Change, Form, Trial

#: Forms that are one piece of advice.
_ALIKE = (
    frozenset(
        {
            *(Form.LOG_SOFTMAX, Form.LOGSIGMOID, Form.WITH_LOGITS, Form.CROSS_ENTROPY, Form.LOGSUMEXP, Form.MAX_OFF),
        }
    ),
    frozenset({Form.OPERAND_BOUND, Form.ADDED_EPS}),
)
#: What a remedy speaks for beside its own kind.
_SPEAKS_FOR: dict[str, frozenset[Form]] = {
    **{form: alike for alike in _ALIKE for form in alike},
    Form.OPTIMIZER_EPS: frozenset({Form.OPTIMIZER_EPS, Form.CONSTANT, Form.OPERAND_BOUND}),
}
#: Forms that are looked for in the failed call, each where it applies.
_OF_CALLS = frozenset({*chain.from_iterable(_ALIKE), Form.SAFE_WHERE, Form.KEPT_ROWS, Form.ZERO_INFINITY, ""})
_ENDED = "another form has cured the step before its turn came"


def beside(advice: Sequence[Remedy], proved: Sequence[Remedy], tried: Sequence[Tried]) -> Iterator[Remedy]:
    """What of the advice for a cause no replay has tried.

    Args:
        advice: All of it.
        proved: What replays have tried.
        tried: The replays.
    """
    kinds = {kind for remedy in proved for kind in _alike(remedy.kind)}
    known = {remedy.text for remedy in proved}
    for remedy in advice:
        if remedy.text in known or remedy.kind in kinds:
            continue
        if remedy.kind not in _OF_CALLS:
            yield remedy
        else:
            untried = _why_not(remedy, proved, tried)
            yield replace(remedy, untried=untried, kind=remedy.kind if untried else "")


def _alike(kind: str) -> frozenset[str]:
    """The kinds of remedies that a replay of one speaks for."""
    return _SPEAKS_FOR.get(kind, frozenset({kind} if kind else ()))


def _why_not(remedy: Remedy, proved: Sequence[Remedy], tried: Sequence[Tried]) -> str:
    """Why no replay has tried it, where forms were looked for: on a step that float32 does not cure they always are."""
    formed = any(each.change == Change.FORM for each in tried)
    if not formed and not any(each.change == Change.FP32 and each.outcome == Trial.NONFINITE for each in tried):
        return ""
    ended = any(each.verified and each.kind in Form._value2member_map_ for each in proved)
    return _ENDED if ended and remedy.kind else remedy.untried
