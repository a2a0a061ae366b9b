"""An incident in full has sections: its line, way, evidence, the last good step, what was tried and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ampscope.analysis.cures import other_forms
from ampscope.analysis.cures.trials import modules_in_words
from ampscope.analysis.overview.unusual_moves import FIRST, UNUSUAL
from ampscope.analysis.results import Incident, LastGood, Move, MoveKind, Operand, Tried
from ampscope.analysis.step_graph import IncidentSurroundings
from ampscope.analysis.triggers import words_of
from ampscope.analysis.words import in_words, place_in_words, replay_in_words
from ampscope.report.diagnosis_words import cost_in_words
from ampscope.report.figures.magnitudes_figure import magnitudes
from ampscope.report.figures.path_graph import path_graph
from ampscope.report.html.cards import Item, remedies_html
from ampscope.report.html.markup import as_html, link_html, listing, paragraph, section
from ampscope.report.html.ops_svg import magnitudes_html, path_graph_html
from ampscope.report.html.tables_html import TableRows, table_html
from ampscope.report.numbers import UNKNOWN, UNMEASURED, count, nonfinite, part, seconds, share, span, value
from ampscope.report.safe_text import short
from ampscope.trace.schema import Change, Trial
from ampscope.trace.vocabulary import Severity

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
    """Says how an incident was noticed, how far its replay can be trusted, and what float32 gives."""
    noticed = words_of(incident.trigger).noticed
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


_CHANGES: dict[str, str] = {
    Change.NONE: "nothing: the same once more",
    Change.FP32: "everything in float32",
    Change.BF16: "bfloat16 in place of float16",
    Change.CONVERSIONS: "float32 where the code itself converts to half precision",
}


def replay_table(tried: Sequence[Tried], trigger: str) -> str:
    """`replay_rows` as HTML; empty without any."""
    found = replay_rows(tried, trigger)
    return table_html(found.columns, found.rows, numeric=found.numeric) if found.rows else ""


def replay_rows(tried: Sequence[Tried], trigger: str) -> TableRows:
    """One row for each replay: the change, what came out, and what the op at the origin gave.

    Args:
        tried: The replays.
        trigger: Of the incident.
    """
    several = len({each.step for each in tried}) > 1
    costs = any(each.extra_time is not None or each.extra_bytes is not None for each in tried)
    columns = ("Run again with", "Came out", "Loss", "At the origin", "Took")
    more = (*(("Costs",) if costs else ()), *(("Step",) if several else ()))
    rows = [
        (*_row(each, trigger, tried), *((_cost(each),) if costs else ()), *((count(each.step),) if several else ()))
        for each in tried
    ]
    return TableRows((*columns, *more), rows, ("Loss", "Took", "Step"))


def _cost(tried: Tried) -> str:
    cost = other_forms.cost([tried])
    return cost_in_words(cost) if cost is not None else ""


def _row(tried: Tried, trigger: str, all_tried: Sequence[Tried]) -> tuple[str, ...]:
    loss = "" if tried.loss is None else value(tried.loss)
    at_origin = "" if tried.op_min is None else span(tried.op_min, tried.op_max, missing=UNMEASURED)
    return (
        f"{change_in_words(tried)}{other_forms.with_scale(tried, all_tried) if tried.form is not None else ''}",
        outcome_in_words(tried, trigger),
        loss,
        at_origin,
        seconds(tried.seconds, missing=UNKNOWN),
    )


def change_in_words(tried: Tried) -> str:
    """Says what a counterfactual replay did otherwise than the real step."""
    if tried.change == Change.SCALE:
        return f"a loss scale of {in_words(tried.scale or 0.0)}"
    if tried.form is not None:
        return other_forms.in_words(tried.form)
    if tried.change == Change.MODULES_FP32:
        return f"{modules_in_words(tried.modules)} in float32"
    return _CHANGES.get(tried.change, tried.change)


def outcome_in_words(tried: Tried, trigger: str) -> str:
    """Says what came out of a counterfactual replay, for the trigger of the incident."""
    failed = f"could not be run: {tried.reason}" if tried.reason else "could not be run"
    words = words_of(trigger)
    told: dict[str, str] = {
        Trial.FINITE: f"\N{CHECK MARK} {words.cured}: cures this step",
        Trial.NONFINITE: f"\N{MULTIPLICATION X} {words.not_cured}",
    }
    return told.get(tried.outcome, failed)


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
    """Returns the quantities that have moved since the last good step, a row each."""
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


#: Parameters named before the rest is only counted.
NAMED = 12


def item_sections(item: Item, seen: IncidentSurroundings) -> str:
    """The sections of an incident or finding below its card, whichever of them it has."""
    calm = item.severity is Severity.INFO
    lines = listing(seen.lines, item.source, calm=calm) if item.source and len(seen.lines) > 1 else ""
    parts = [
        section("What to change", remedies_html(item) if item.remedies else "", level=3),
        section("Your line", lines, level=3, on_paper=False),
    ]
    return "".join(parts) + (_evidence(item, seen) if isinstance(item, Incident) else "")


def _evidence(incident: Incident, seen: IncidentSurroundings) -> str:
    operands = (*incident.inputs, *incident.outputs)
    parts = {
        "From the origin to what it reached": path_graph_html(path_graph(incident, seen)),
        "Since the last good step": last_good_html(incident.last_good),
        "What was tried": replay_table(incident.tried, incident.trigger),
        "How it was found": "".join(map(paragraph, found(incident))),
        "What the op read and wrote": operand_table(operands),
        "Magnitudes": magnitudes_html(magnitudes(operands, incident.tried)),
        tripped_heading(incident.trigger): tripped_html(incident.tripped),
    }
    return "".join(section(title, content, level=3, on_paper=False) for title, content in parts.items())


def tripped_heading(trigger: str) -> str:
    """Returns the heading over the parameters that an incident names: what is the matter with them."""
    return words_of(trigger).tripped


def tripped_html(names: Sequence[str], way: Callable[[str], str] = lambda _: "") -> str:
    """The parameters that tell of an incident; the first by name, the rest counted.

    Args:
        names: The parameters.
        way: The address that a name leads to; empty for nowhere.
    """
    if not names:
        return ""
    shown = "<br>".join(link_html(way(name), as_html(name, 120)) for name in names[:NAMED])
    more = f"and {len(names) - NAMED:,} more parameters" if len(names) > NAMED else ""
    return f'<div class="amp-code amp-names">{shown}</div><div class="amp-place">{more}</div>'
