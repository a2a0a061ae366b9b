"""The replays that were tried on an incident, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.cures import other_forms
from ampscope.analysis.cures.trials import modules_in_words
from ampscope.analysis.results import Tried
from ampscope.analysis.words import in_words
from ampscope.report.html.parts.table import TableRows, table_html
from ampscope.report.numbers import UNKNOWN, UNMEASURED, count, seconds, span, value
from ampscope.report.wording.remedy_words import cost_in_words
from ampscope.trace.schema import Change, Trial, Trigger

_CHANGES: dict[str, str] = {
    Change.NONE: "nothing: the same once more",
    Change.FP32: "everything in float32",
    Change.BF16: "bfloat16 in place of float16",
    Change.CONVERSIONS: "float32 where the code itself converts to half precision",
}
_OUTCOMES = ("\N{CHECK MARK} finite: cures this step", "\N{MULTIPLICATION X} still not finite")
#: Of steps that were finite all along.
_OF_FINITE: dict[str, tuple[str, str]] = {
    Trigger.ABSORBED_OVERFLOW: (
        "\N{CHECK MARK} agrees with float32: cures this step",
        "\N{MULTIPLICATION X} does not agree with float32",
    ),
    Trigger.LOST_GRADIENT: (
        "\N{CHECK MARK} keeps its gradients: cures this step",
        "\N{MULTIPLICATION X} still loses gradients",
    ),
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
    """What the replay did otherwise."""
    if tried.change == Change.SCALE:
        return f"a loss scale of {in_words(tried.scale or 0.0)}"
    if tried.form is not None:
        return other_forms.in_words(tried.form)
    if tried.change == Change.MODULES_FP32:
        return f"{modules_in_words(tried.modules)} in float32"
    return _CHANGES.get(tried.change, tried.change)


def outcome_in_words(tried: Tried, trigger: str) -> str:
    """What came out, for the trigger of the incident."""
    failed = f"could not be run: {tried.reason}" if tried.reason else "could not be run"
    cured, not_cured = _OF_FINITE.get(trigger, _OUTCOMES)
    told: dict[str, str] = {Trial.FINITE: cured, Trial.NONFINITE: not_cured}
    return told.get(tried.outcome, failed)
