"""What an incident rests on: how it was noticed and checked, and what its op read and wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ampscope.analysis.results import Incident, Operand
from ampscope.analysis.words import replay_in_words, trigger_in_words
from ampscope.report.html.parts.table import TableRows, table_html
from ampscope.report.numbers import UNMEASURED, count, nonfinite, part, span
from ampscope.report.safe_text import short

#: What is said of a tensor's values, under its heading; the Replay page says the same of every op.
VALUES: dict[str, Callable[[Operand], str]] = {
    "Values": lambda operand: span(operand.statistics.min, operand.statistics.max, missing=UNMEASURED),
    "Not finite": lambda operand: nonfinite(operand) or "none",
    "Exactly zero": lambda operand: part(operand.statistics.zeros, operand.numel, missing=UNMEASURED),
    "Subnormal": lambda operand: part(operand.statistics.subnormals, operand.numel, missing=UNMEASURED),
}
_CELLS: dict[str, Callable[[Operand], str]] = {
    "Tensor": lambda operand: short(operand.role, 60),
    "Type": lambda operand: operand.dtype,
    "Shape": lambda operand: operand.shape or "scalar",
    **VALUES,
}
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


def operand_rows(operands: Sequence[Operand]) -> TableRows:
    """The tensors in words, a row each."""
    return TableRows(tuple(_CELLS), [[cell(operand) for cell in _CELLS.values()] for operand in operands])


def operand_table(operands: Sequence[Operand]) -> str:
    """The tensors in words, the first by name and the rest counted; empty without any."""
    if not operands:
        return ""
    more = count(len(operands) - _NAMED, "more tensor") if len(operands) > _NAMED else ""
    found = operand_rows(operands[:_NAMED])
    return f'{table_html(found.columns, found.rows)}<div class="amp-place">{more}</div>'
