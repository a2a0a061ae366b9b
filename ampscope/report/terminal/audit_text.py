"""An audit for the terminal: what it says, the loss's error, and the layers, those that lose most first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampscope.analysis.precision.audit import AuditReport, LayerLoss, in_words, share
from ampscope.analysis.precision.op_losses import PrecisionLoss
from ampscope.analysis.words import capitalized, op_in_words
from ampscope.numerals import number
from ampscope.report import numbers
from ampscope.report.safe_text import place, visible
from ampscope.report.terminal.text_blocks import Fitting, code, indented, prose
from ampscope.trace.schema import AuditStatus

#: Layers shown; all are in the JSON.
_SHOWN = 12
#: Names of ops that could not be measured, at most.
_NAMED = 5


def as_text(audit: AuditReport) -> RenderableType:
    """The audit of one step."""
    return Group(*_blocks(audit))


def _blocks(audit: AuditReport) -> Iterator[RenderableType]:
    if audit.step is None:
        yield prose(
            "No step of this run was audited. Ask for an audit while it trains: scope.audit() for the next healthy "
            "step, or ampscope.watch(model, scaler, audit_every=1000)."
        )
        return
    yield prose(audit.sentence)
    if audit.status == AuditStatus.UNAVAILABLE:
        return
    if audit.code:
        yield Text()
        yield code(audit.code)
    yield Text()
    yield prose(" ".join(_about(audit)))
    if audit.layers:
        yield Text()
        yield indented(_table(audit.layers[:_SHOWN]))
        yield Text()
        yield prose(" ".join(_notes(audit)))


def _about(audit: AuditReport) -> Iterator[str]:
    others = [each.step for each in audit.audited if each.step != audit.step]
    also = f" (audited, too: {', '.join(f'{each:,}' for each in others[-3:])})" if others else ""
    yield f"Step {audit.step:,}, against the same in {audit.dtype}{also}."
    if audit.loss is not None and audit.reference_loss is not None and audit.loss_error is not None:
        relative = abs(audit.loss_error / audit.reference_loss) if audit.reference_loss else None
        told = f", {share(relative)}" if relative is not None else ""
        loss, reference = number(audit.loss, 6), number(audit.reference_loss, 6)
        yield f"The loss is {loss} instead of {reference}: {numbers.signed(audit.loss_error)}{told}."
    if audit.explained is not None:
        yield f"To first order, the errors that its ops make add {numbers.signed(audit.explained)}."
        if audit.leaves_out:
            yield "What values lose that ask for no gradient, as the batch by its own cast, is not in that."
    if audit.rows_missing and audit.layers:
        yield "Some rows of its ops are missing from the run: layers may have lost more than is told here."
    if audit.in_float8:
        yield "What is float8 in the step is so in the reference, too: what that loses is not in the loss's error,"
        yield "though the ops' own errors have it."
    if audit.reason:
        yield f"{capitalized(audit.reason)}."


_LOSSES = {
    PrecisionLoss.CANCELS: "cancels",
    PrecisionLoss.COARSE: "coarse",
    PrecisionLoss.ROUNDS: "rounds",
    PrecisionLoss.NOTHING: "nothing",
}


def _line(layer: LayerLoss) -> str:
    return place(layer.worst.source) if layer.worst is not None else ""


def _error(error: float | None) -> str:
    return "" if error is None else share(error).replace(" ", "")


_COLUMNS: dict[str, Callable[[LayerLoss], str]] = {
    "layer": in_words,
    "loses by": lambda layer: _LOSSES[layer.kind],
    "moves the loss by": lambda layer: number(layer.moves_loss, 2) if layer.moves_loss else "",
    "adds to it": lambda layer: "" if layer.contribution is None else numbers.signed(layer.contribution),
    "worst op": lambda layer: op_in_words(layer.worst.op) if layer.worst is not None else "",
    "line": _line,
    "its own error": lambda layer: _error(layer.worst.local) if layer.worst is not None else "",
    "given": lambda layer: _error(layer.worst.operand_error) if layer.worst is not None else "",
    "left": lambda layer: _error(layer.worst.total) if layer.worst is not None else "",
    "gradient": lambda layer: _error(layer.gradient_error),
}
_NUMERIC = ("moves the loss by", "adds to it", "its own error", "given", "left", "gradient")
_EXPENDABLE = ("gradient", "line", "adds to it", "its own error", "given", "left")


def _table(layers: Sequence[LayerLoss]) -> RenderableType:
    def draw(columns: Sequence[str]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in columns:
            table.add_column(column, justify="right" if column in _NUMERIC else "left", overflow="fold")
        for layer in layers:
            style = "yellow" if layer.kind in (PrecisionLoss.CANCELS, PrecisionLoss.COARSE) else ""
            table.add_row(*(Text(visible(_COLUMNS[column](layer)), style=style) for column in columns))
        return table

    filled = tuple(column for column, cell in _COLUMNS.items() if any(map(cell, layers)))
    return Fitting(draw, filled, _EXPENDABLE)


def _notes(audit: AuditReport) -> Iterator[str]:
    if len(audit.layers) > _SHOWN:
        yield f"{numbers.count(len(audit.layers) - _SHOWN, 'layer')} that lose less are left out (--json has all)."
    yield "A layer moves the loss by what its errors come to if their signs are random, with those that it lets through"
    yield "where it cancels; what it adds is what they came to in this step. Of its worst op: its own error on its own"
    yield "inputs, the error that it was given, and the one that it left. Gradient: the error of its worst parameter's."
    if audit.not_measured:
        names = ", ".join(audit.not_measured_ops[:_NAMED])
        more = ", ..." if len(audit.not_measured_ops) > _NAMED else ""
        count = numbers.count(audit.not_measured, "op")
        yield f"Not measured, for they cannot be run in {audit.dtype}: {count} ({names}{more})."
