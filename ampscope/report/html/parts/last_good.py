"""When a run was last good before an incident, and a table of what has moved since."""

from __future__ import annotations

from ampscope.analysis.overview.last_good.unusual import FIRST, UNUSUAL
from ampscope.analysis.results import LastGood, Move, MoveKind
from ampscope.analysis.words import place_in_words
from ampscope.report.html.document import paragraph
from ampscope.report.html.parts.table import TableRows, table_html
from ampscope.report.numbers import UNKNOWN, share, value
from ampscope.report.safe_text import short

_COLUMNS = ("What", "Before", "After", "Step", "How unusual")
_QUANTITIES = {
    MoveKind.SEGMENT: "the run, resumed",
    MoveKind.SCALE: "loss scale",
    MoveKind.LEARNING_RATE: "learning rate",
    MoveKind.LOSS: "loss",
    MoveKind.GRAD_NORM: "gradient norm",
}
_OF = {
    MoveKind.DTYPE: "dtype of ",
    MoveKind.SHAPE: "shape of ",
    MoveKind.BATCH: "magnitude of ",
    MoveKind.RANGE: "magnitude of ",
}


def last_good_html(told: LastGood | None) -> str:
    """The sentence, and the moves as a table; empty where nothing is to be told of an incident."""
    if told is None:
        return ""
    found = move_rows(told)
    table = table_html(found.columns, found.rows, numeric=found.numeric) if found.rows else ""
    return paragraph(told.summary) + table


def move_rows(told: LastGood) -> TableRows:
    """What has moved since, a row each."""
    rows = [(_what(each), _value(each, each.before), _value(each, each.after), *_seen(each)) for each in told.moves]
    return TableRows(_COLUMNS, rows, ("Before", "After", "Step"))


def _what(move: Move) -> str:
    if move.kind in _QUANTITIES:
        return short(f"{_QUANTITIES[move.kind]}{f': {move.name}' if move.name else ''}", 80)
    of = "zeros in " if move.unit == "share" else _OF[move.kind]
    where = f" in {move.module}" if move.module and not move.name else ""
    return short(f"{of}{place_in_words(move.op, move.name)}{where}", 100)


def _value(move: Move, told: float | str | None) -> str:
    if told is None:
        return UNKNOWN
    if isinstance(told, str):
        return short(told, 60) or "scalar"
    return share(told) if move.unit == "share" else value(told)


def _seen(move: Move) -> tuple[str, str]:
    step = f"{move.step:,}"
    if move.score is None:
        return step, "seen too rarely to tell"
    if move.score >= FIRST:
        return step, "it had never moved"
    return step, "more than it usually moves" if move.score >= UNUSUAL else "as in the steps before"
