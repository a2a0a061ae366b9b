"""The op under the cursor: what it is, where it stands in the program, what it read and wrote."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from ampscope.analysis.replay.op_detail import OpDetail
from ampscope.analysis.replay.recording import NEAR_BITS
from ampscope.analysis.results import Operand
from ampscope.report.html.markup import as_html, source_html
from ampscope.report.html.parts.incident import VALUES
from ampscope.report.numbers import UNMEASURED
from ampscope.report.palette import dtype_color
from ampscope.report.safe_text import short
from ampscope.trace.schema import Cast
from blocks.basics.table import table

_CASTS = {
    Cast.AUTOCAST: "converted by autocast",
    Cast.EXPLICIT: "converted by your code",
    Cast.PROMOTION: "converted by torch, where two dtypes met",
}
_COLUMNS = ("", "Tensor", "Type", *VALUES)
#: Cells that say nothing of interest; a column of them is left out.
_NOTHING = {"none", UNMEASURED}


def op_card(detail: OpDetail) -> None:
    """The card of an op."""
    line = detail.line
    kind = "error" if line.is_alarming else "warning" if line.is_near else ""
    rows = "".join(f"<span>{name}</span><div>{body}</div>" for name, body in _facts(detail) if body)
    number = f"op number {line.seq:,}"
    st.html(
        f'<div class="amp-card {kind}"><div class="amp-place">{number}</div>'
        f'<div class="amp-title">{as_html(_title(detail), 160)}</div><div>{_chips(detail)}</div>'
        f'<div class="amp-facts">{rows}</div></div>'
    )


def operand_table(
    reads: Sequence[Operand], writes: Sequence[Operand], label: str = "What the op read and wrote"
) -> None:
    """Shows the tensors that the op read and wrote, in words; columns with nothing to say are left out."""
    rows = [*(_row("read", operand) for operand in reads), *(_row("wrote", operand) for operand in writes)]
    kept = [at for at in range(len(_COLUMNS)) if any(row[at] for row in rows)]
    table(label, [_COLUMNS[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _title(detail: OpDetail) -> str:
    line = detail.line
    return f"{line.op} {line.name}" if line.name and line.name != line.op else line.op


def _chips(detail: OpDetail) -> str:
    line = detail.line
    chips = []
    if line.dtype:
        chips.append(
            f'<span class="amp-chip dtype" style="--dtype:{dtype_color(line.dtype)}">{as_html(line.dtype, 20)}</span>'
        )
    if detail.cast in _CASTS:
        chips.append(f'<span class="amp-chip info">{_CASTS[detail.cast]}</span>')
    if line.is_intended:
        chips.append('<span class="amp-chip info">not finite, as intended</span>')
    elif line.is_born:
        chips.append('<span class="amp-chip error">NaN or infinity begins here</span>')
    elif not line.is_finite:
        chips.append('<span class="amp-chip error">not finite</span>')
    if line.is_near:
        chips.append('<span class="amp-chip warning">near its limit</span>')
    return " ".join(chips)


def _facts(detail: OpDetail) -> list[tuple[str, str]]:
    line = detail.line
    kind = f" ({detail.module_type})" if detail.module_type else ""
    scalars = ", ".join(f"{name}={value}" for name, value in detail.scalars)
    return [
        ("Module", as_html(f"{line.module}{kind}" if line.module else "outside the watched modules", 160)),
        ("Phase", as_html(_phase(detail), 80)),
        ("Line", source_html(detail.source) if detail.source else ""),
        ("Autocast", as_html(f"on, {detail.autocast}" if detail.autocast else "off", 40)),
        ("Arguments", as_html(scalars, 200)),
        ("Headroom", as_html(_headroom(detail), 200)),
    ]


def _phase(detail: OpDetail) -> str:
    batch = f", micro-batch {detail.micro_batch}" if detail.micro_batch else ""
    node = f", in {short(detail.grad_fn, 40)}" if detail.grad_fn else ""
    return f"{detail.line.phase or 'end of the step'}{node}{batch}"


def _headroom(detail: OpDetail) -> str:
    """How far the largest value is from the dtype's limit."""
    left = detail.line.magnitudes.headroom
    if left is None or left > 60 or not detail.line.is_finite:
        return ""
    if left < 1:
        return f"less than a factor of 2 below what {detail.line.dtype} holds"
    close = ": one or two doublings are left" if left <= NEAR_BITS else ""
    return f"a factor of {2**left:,.0f} below what {detail.line.dtype} holds{close}"


def _row(what: str, operand: Operand) -> tuple[str, ...]:
    extent, *counts = (cell(operand) for cell in VALUES.values())
    kind = f"{operand.dtype} {operand.shape or 'scalar'}".strip()
    return (what, short(operand.role, 60), kind, extent, *("" if text in _NOTHING else text for text in counts))
