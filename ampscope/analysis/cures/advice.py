"""General advice beside what replays have tried: what one has tried is not told twice, and the rest says why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampscope.analysis.causes import untried
from ampscope.analysis.results import Remedy
from ampscope.trace.schema import Form

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
#: In which order forms of a failed call are tried: one that comes before the cure has found no place there.
_ORDER = (
    _ALIKE[0] | {Form.CENTRED},
    frozenset({Form.CONSTANT}),
    frozenset({Form.SCALE_FIRST}),
    frozenset({Form.IN_FLOAT32}),
    frozenset({Form.SAFE_WHERE, Form.KEPT_ROWS, Form.ZERO_INFINITY}),
    _ALIKE[1],
)
_ENDED = "another form has cured the step before its turn came"


def beside(advice: Sequence[Remedy], proved: Sequence[Remedy]) -> Iterator[Remedy]:
    """What of the advice for a cause no replay has tried.

    Args:
        advice: All of it.
        proved: What replays have tried.
    """
    kinds = {kind for remedy in proved for kind in _alike(remedy.kind)}
    known = {remedy.text for remedy in proved}
    cured = max((_turn(each.kind) for each in proved if each.verified), default=-1)
    for remedy in advice:
        if remedy.text in known or remedy.kind in kinds:
            continue
        if not 0 <= _turn(remedy.kind) < cured:  # else the records have shown no place for it
            had_a_turn = remedy.untried != untried.CONVERTED
            yield replace(remedy, untried=_ENDED) if had_a_turn and 0 <= cured < _turn(remedy.kind) else remedy


def _alike(kind: str) -> frozenset[str]:
    """The kinds of remedies that a replay of one speaks for."""
    return _SPEAKS_FOR.get(kind, frozenset({kind} if kind else ()))


def _turn(kind: str) -> int:
    """When a form of a failed call is tried; -1 of all else."""
    return next((turn for turn, alike in enumerate(_ORDER) if kind in alike), -1)
