"""Precision: what did each op run in, from step to step and in one, what was converted, and why was float32 used?"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import streamlit as st

from ampscope.analysis.precision.precision import (
    CastRow,
    Fp32Island,
    Precision,
    PrecisionRow,
    WideReason,
    deepest,
    fold_modules,
    under,
)
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.report.figures.precision_bars import dtype_steps, module_bars
from ampscope.report.html.bars_svg import dtype_steps_key, share_bars_html
from ampscope.report.numbers import count, share, size
from ampscope.report.precision_words import over_steps_in_words
from ampscope.report.safe_text import place, short
from ampscope.trace.schema import Cast, execution_of
from blocks.choices import choose, choose_traced_step, first_step, not_there, pick_traced_step
from blocks.components.data_table import Cell
from blocks.figure import CONFIG, figure
from blocks.live_part import live_part
from blocks.page_links import Way, link_row, newer_step_link, to_precision, to_replay, way_to
from blocks.table import table
from blocks.text import heading, how_to_trace, paragraph, title
from charts import dtype_steps_figure
from data.run_results import diagnosis_of, precision_of, precision_over_steps_of
from data.run_snapshot import RunSnapshot, current_run
from data.step_results import traced_steps_of
from state import Page, param_in_address

_REASONS = {
    WideReason.POLICY: "autocast converts its operands: this op needs float32's range or digits",
    WideReason.REQUESTED: "your code converts its operands, as with .float()",
    WideReason.PROMOTED: "one operand is float32, and the wider dtype wins",
    WideReason.OPERANDS: "its operands are float32 already",
    WideReason.OWN: "the op itself returns float32",
}
_CASTS = {
    Cast.AUTOCAST: "by autocast",
    Cast.EXPLICIT: "asked for in your code",
    Cast.PROMOTION: "by torch, where two dtypes met",
}
_MEASURES = {"ops": "ops", "bytes": "bytes written"}
#: Steps from which on there is a course to be seen, the key of its figure, and whether a step was chosen in it.
_FEWEST, _OVER_STEPS, _PICKED = 2, "precision-over-steps", "_precision_picked"
#: Bars that fit on a screen.
_BARS = 24
#: Levels of modules offered one by one.
_LEVELS = 10


def precision_page() -> None:
    run = current_run()
    diagnosis = diagnosis_of(run)
    title("Precision")
    steps = traced_steps_of(run)
    if not steps:
        how_to_trace(diagnosis)
        return
    whole = st.container(key="amp-over-steps" if len(steps) >= _FEWEST else None)
    whole.html("<i></i>")
    step = choose_traced_step(steps, first=first_step(diagnosis, run.rank))
    with whole:
        live_part(partial(over_steps, chosen=step))
    live_part(partial(newer_step_link, shown=steps[0].step, link=link_to_step))
    precision = precision_of(run, step.step, step.source)
    paragraph(summary(precision))
    asked = param_in_address("module") or ""
    modules = under(precision.modules, asked)
    if asked:
        asked_module(asked, modules, step)
    if precision.modules:
        dtypes_by_module(modules or precision.modules, step)
        dtypes_by_op(precision.ops, step)
    conversions(precision, step)
    float32_in_autocast(precision.islands, step)


def over_steps(run: RunSnapshot, chosen: TracedStep) -> None:
    """Shows how the dtypes changed over all traced steps, as a picture in which a step can be chosen."""
    optimizer = execution_of(chosen.source)[1]
    seen = precision_over_steps_of(run, int(optimizer or 0))
    if len(seen.steps) < _FEWEST:
        return
    paragraph(" ".join(over_steps_in_words(seen)))
    drawn = dtype_steps(seen, chosen=chosen.step)
    with figure(_OVER_STEPS, "Dtypes by traced step", "The share of the ops that ran in each dtype, by traced step."):
        st.plotly_chart(
            dtype_steps_figure(drawn),
            width="stretch",
            config=CONFIG,
            key=_OVER_STEPS,
            on_select=partial(follow_click, dict(zip(seen.steps, seen.sources, strict=True))),
            selection_mode=("points",),
        )
        st.html(dtype_steps_key(drawn))
    if st.session_state.pop(_PICKED, False):
        st.rerun()


def follow_click(sources: dict[int, str]) -> None:
    """Choose the step of the column that was clicked; a click on the one that is selected reports none."""
    points = st.session_state[_OVER_STEPS].selection.points
    data = points[0].get("customdata") if points else None
    step = data[0] if isinstance(data, list) else data
    if isinstance(step, int) and step in sources:
        pick_traced_step(step, sources[step])
        st.session_state[_PICKED] = True


def replay_of(step: TracedStep, rows: Iterable[PrecisionRow | CastRow | Fp32Island]) -> list[Way]:
    """Returns links to the first op of each row, in Replay."""
    return [way_to(Page.REPLAY, step=step.step, source=step.source, op=row.first) for row in rows]


def link_to_step(step: int, words: str) -> None:
    to_precision(None, step, label=words)


def summary(precision: Precision) -> str:
    """Says in which dtypes the whole step ran, and whether autocast was on."""
    shares = ", ".join(f"{share(precision.total.part(one.dtype))} in {one.dtype}" for one in precision.total.shares)
    regions = " and ".join(precision.autocast)
    autocast = f"Autocast was on, in {regions}." if regions else "Autocast was off."
    return f"The ops of this step ran: {shares}. {autocast}" if shares else f"No floating-point op ran. {autocast}"


def dtypes_by_module(rows: tuple[PrecisionRow, ...], step: TracedStep) -> None:
    """One bar for each module, joined to its ancestors where there are too many; its name leads to its first op."""
    heading("By module")
    left, right = st.columns(2)
    deep = max(row.name.count(".") + 1 for row in rows)
    start = deepest(rows, _BARS)
    with left:
        depths = sorted({*range(1, min(deep, _LEVELS)), start, deep}, key=lambda depth: (depth != start, depth))
        words = {str(depth): count(depth, "level") if depth < deep else "every module" for depth in depths}
        depth = int(choose("depth", "Detail", list(words), words.__getitem__))
    with right:
        measure = choose("measure", "Measured in", list(_MEASURES), _MEASURES.__getitem__)
    folded = fold_modules(rows, depth)
    bars = module_bars(folded, most=4 * _BARS, by_bytes=measure == "bytes")
    with figure(
        "modules", f"Dtypes by module, step {step.step:,}", f"The shares of dtypes in each module, {bars.unit}."
    ):
        st.html(share_bars_html(bars, links=[way.address for way in replay_of(step, folded)]))
    st.caption("A name or its bar leads to Replay, at the first such op of this step.")
    if bars.left_out:
        st.caption("Choose fewer levels to see all modules.")


def asked_module(module: str, found: tuple[PrecisionRow, ...], step: TracedStep) -> None:
    """Says which module a link asked for, with links to its ops in Replay and back to all modules."""
    if found:
        paragraph(f"Of the modules, only {module} and what is in it.", 240)
    else:
        not_there("Module", module, "the whole model")
    with link_row():
        if found:
            to_replay(step.step, step.source, found[0].first, "Replay from its first op")
        to_precision(None, step.step, step.source, "All modules")


def module_words(name: str) -> str:
    """A module's name, or what runs outside all of them."""
    return short(name, 34) if name else "outside modules"


def dtypes_by_op(rows: tuple[PrecisionRow, ...], step: TracedStep) -> None:
    """Ops by dtype, the most frequent first."""
    heading("By op")
    dtypes = sorted({one.dtype for row in rows for one in row.shares})
    ordered = sorted(rows, key=lambda row: -row.ops)
    numbers = (*dtypes, "Bytes written")
    drawn: list[tuple[str | Cell, ...]] = [
        (row.name, *op_counts(row, dtypes), Cell(size(row.bytes), row.bytes)) for row in ordered
    ]
    table("Ops by dtype", ("Op", *numbers), drawn, numeric=numbers, ways=replay_of(step, ordered))


def op_counts(row: PrecisionRow, dtypes: list[str]) -> list[str]:
    """How often an op ran in each dtype; empty where it never did."""
    counts = {one.dtype: count(one.ops) for one in row.shares}
    return [counts.get(dtype, "") for dtype in dtypes]


def conversions(precision: Precision, step: TracedStep) -> None:
    """Conversions in total, then line by line."""
    heading("Conversions between dtypes")
    if not precision.casts:
        paragraph("None in this step.")
        return
    table(
        "Conversions between dtypes",
        ("Inserted", "From", "To", "Times", "Elements", "Bytes written"),
        [
            (_CASTS.get(row.kind, row.kind), row.from_dtype, row.to_dtype, *cast_size(row))
            for row in precision.cast_totals
        ],
        numeric=("Times", "Elements", "Bytes written"),
        ways=replay_of(step, precision.cast_totals),
    )
    with st.expander("Line by line"):
        table(
            "Conversions, line by line",
            ("Inserted", "From", "To", "Module", "Phase", "Your line", "Times", "Elements", "Bytes written"),
            [cast_row(row) for row in precision.casts],
            numeric=("Times", "Elements", "Bytes written"),
            ways=replay_of(step, precision.casts),
        )


def cast_size(row: CastRow) -> tuple[str, str, Cell]:
    """How much was converted."""
    return count(row.count), count(row.elements), Cell(size(row.bytes), row.bytes)


def cast_row(row: CastRow) -> tuple[str | Cell, ...]:
    """Conversions at one line."""
    kind = _CASTS.get(row.kind, row.kind)
    where = (module_words(row.module), row.phase, place(row.source))
    return (kind, row.from_dtype, row.to_dtype, *where, *cast_size(row))


def float32_in_autocast(islands: tuple[Fp32Island, ...], step: TracedStep) -> None:
    """float32 inside autocast, with the reason."""
    heading("float32 inside an autocast region")
    if not islands:
        paragraph("None: every op in an autocast region ran in its lower precision.")
        return
    paragraph("Not a fault in itself; each one costs time and memory, and each has a reason.")
    columns = ("Op", "Module", "Your line", "Times", "Elements", "Why")
    rows = [island_row(island) for island in islands]
    table("float32 inside an autocast region", columns, rows, numeric=columns[3:5], ways=replay_of(step, islands))


def island_row(island: Fp32Island) -> tuple[str, ...]:
    """One kind of float32 op at one line."""
    where = (module_words(island.module), place(island.source))
    return (island.op, *where, count(island.count), count(island.elements), _REASONS[island.reason])


precision_page()
