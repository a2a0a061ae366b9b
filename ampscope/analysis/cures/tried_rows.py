"""The counterfactual replays of a run, as they were recorded."""

from __future__ import annotations

from ampscope.analysis.results import CodeLine, FormTried, SourceLine, Tried
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ReplayRow, Table


def of_run(run: Run, rank: int) -> dict[tuple[int, int], tuple[Tried, ...]]:
    """What was tried on each incident, by step and optimizer."""
    found: dict[tuple[int, int], tuple[Tried, ...]] = {}
    for row in run.rows(Table.REPLAYS, rank=rank):
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
            form=_form(row),
            extra_time=row.extra_time,
            extra_bytes=row.extra_bytes,
            followed=row.followed or 0,
        )
        key = (row.step, row.optimizer)
        found[key] = (*found.get(key, ()), tried)
    return found


def _form(row: ReplayRow) -> FormTried | None:
    if row.form is None:
        return None
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
    )


def _conversion_lines(row: ReplayRow) -> tuple[CodeLine, ...] | None:
    if row.conversion_files is None:
        return None
    return tuple(map(CodeLine, row.conversion_files, row.conversion_lines or (), row.conversion_codes or ()))
