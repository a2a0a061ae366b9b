"""The counterfactual replays of a run, as they were recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ampscope.analysis.cures.other_forms import is_of_growth
from ampscope.analysis.results import CodeLine, FormTried, SourceLine, Tried
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ReplayRow, Table
from ampscope.trace.vocabulary import TOGETHER

#: Steps from a loss that has grown to the failure that it leads to.
_REACH = 50


def of_run(run: Run, rank: int) -> dict[tuple[int, int], tuple[Tried, ...]]:
    """What was tried on each incident, by step and optimizer."""
    found: dict[tuple[int, int], tuple[Tried, ...]] = {}
    for row in run.rows(Table.REPLAYS, rank=rank):
        key = (row.step, row.optimizer)
        tried = Tried(
            step=row.step,
            change=row.change,
            modules=tuple(row.modules),
            scale=row.scale,
            outcome=row.outcome,
            reason=row.reason,
            loss=row.loss,
            seconds=row.seconds,
            op_min=row.op_min,
            op_max=row.op_max,
            conversions=_conversion_lines(row),
            form=_form(row, found.get(key, ())),
            extra_time=row.extra_time,
            extra_bytes=row.extra_bytes,
            followed=row.followed or 0,
        )
        found[key] = (*found.get(key, ()), tried)
    return found


def of_growing_loss(tried: Mapping[tuple[int, int], tuple[Tried, ...]], step: int, optimizer: int) -> tuple[Tried, ...]:
    """What was tried on the latest step before one, whose loss had just grown by far; nothing where none was seen.

    Args:
        tried: What was tried, by step and optimizer.
        step: The one that went bad.
        optimizer: Its optimizer.
    """
    before = sorted((each for each in tried if each[1] == optimizer and 0 < step - each[0] <= _REACH), reverse=True)
    looked = (tried[each] for each in before)
    return next((found for found in looked if any(is_of_growth(each) for each in found)), ())


def _form(row: ReplayRow, before: Sequence[Tried]) -> FormTried | None:
    """The form of a replay.

    Args:
        row: The replay.
        before: Those before it on the step.
    """
    if row.form is None:
        return None
    alone = [each.form for each in before if each.form is not None and each.form.beside is None]
    place = None
    if row.form_file:
        place = SourceLine(
            file=row.form_file,
            line=row.form_line or 0,
            function=row.form_function or "",
            code=row.form_code or "",
        )
    return FormTried(
        form=row.form,
        call=row.form_call or "",
        source=place,
        argument=row.form_argument,
        value=row.form_value,
        was=row.form_was,
        good_change=row.good_change,
        beside=alone[-1] if alone and row.reason == TOGETHER else None,
    )


def _conversion_lines(row: ReplayRow) -> tuple[CodeLine, ...] | None:
    if row.conversion_files is None:
        return None
    return tuple(map(CodeLine, row.conversion_files, row.conversion_lines or (), row.conversion_codes or ()))
