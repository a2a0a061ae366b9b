"""What an incident rests on: how it was noticed and checked, and what its op read and wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampscope.analysis.results import Incident, Operand
from ampscope.analysis.words.wording import replay_in_words, trigger_in_words
from ampscope.report.html.parts.table import table_html
from ampscope.report.numbers import UNMEASURED, count, nonfinite, part, span
from ampscope.report.safe_text import short

_COLUMNS = ("Tensor", "Type", "Shape", "Values", "Not finite", "Exactly zero", "Subnormal")
#: Tensors named before the rest is only counted.
_NAMED = 12
_FP32 = {
    True: "In float32 the same step stays finite: the range of the dtype is to blame.",
    False: "In float32 the same step fails too: precision is not to blame.",
}


def found(incident: Incident) -> Iterator[str]:
    """How it was noticed, how far the replay can be trusted, and what float32 says: a sentence or two each."""
    noticed = trigger_in_words(incident.trigger)
    if noticed:
        yield f"Noticed because {noticed}."
    if trust := replay_in_words(incident):
        yield trust
    if incident.fp32_ok is not None:
        yield _FP32[incident.fp32_ok]


def operand_table(operands: Sequence[Operand]) -> str:
    """The tensors in words, the first by name and the rest counted; empty without any."""
    if not operands:
        return ""
    more = count(len(operands) - _NAMED, "more tensor") if len(operands) > _NAMED else ""
    rows = [_row(operand) for operand in operands[:_NAMED]]
    return f'{table_html(_COLUMNS, rows)}<div class="amp-place">{more}</div>'


def _row(operand: Operand) -> tuple[str, ...]:
    return (
        short(operand.role, 60),
        operand.dtype,
        operand.shape or "scalar",
        span(operand.statistics.min, operand.statistics.max, missing=UNMEASURED),
        nonfinite(operand) or "none",
        part(operand.statistics.zeros, operand.numel, missing=UNMEASURED),
        part(operand.statistics.subnormals, operand.numel, missing=UNMEASURED),
    )
