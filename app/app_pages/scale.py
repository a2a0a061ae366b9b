"""Scale: what did the gradient scaler do, and is it well?"""

from __future__ import annotations

from functools import partial

import streamlit as st
from blocks.basics.notes import heading, page_head, paragraph, place
from blocks.basics.plot import plot
from blocks.basics.table import table
from blocks.basics.tiles import tiles
from blocks.frame import live
from blocks.scale.at_step import at_step, step_asked
from blocks.scale.simulator import simulator
from charts.stack import stack_figure
from data import loader
from state.choice import choose_optimizer

from ampscope.analysis.overview.step_attempt import Attempt
from ampscope.analysis.scale.scale_history import ScaleHistory
from ampscope.analysis.scale.scaler_log import ScaleEvent, ScalerCall, ScalerSettings
from ampscope.analysis.scale.skipped_steps import SkippedStep
from ampscope.analysis.scale.summary import scale_story
from ampscope.analysis.words.scale_words import in_words
from ampscope.report.figures.over_steps import scale_stack
from ampscope.report.numbers import UNKNOWN, count, share, value
from ampscope.report.safe_text import short

ACTIONS = {
    "init": "created",
    "growth": "grew",
    "backoff": "backed off",
    "skip": "step skipped",
    "unscale": "unscale_ called",
    "update": "set by hand",
    "state_saved": "state saved",
    "state_loaded": "state loaded",
    "setter": "setting changed",
}
#: Rows before the table scrolls on its own.
_SHORT = 25


def facts(history: ScaleHistory) -> list[tuple[str, str]]:
    """The tiles: now, then, skips."""
    return [
        ("loss scale now", in_words(history.current or 0.0)),
        ("lowest so far", in_words(history.lowest or 0.0)),
        (f"of all steps skipped ({count(history.skipped, 'step')})", share(history.skipped_share, missing=UNKNOWN)),
        (f"skipped of the last {history.recent_steps:,}", count(history.recent_skipped)),
    ]


def settings_in_words(told: ScalerSettings) -> str:
    """How the scaler was told to behave."""
    parts = [
        told.init_scale and f"starts at {in_words(told.init_scale)}",
        told.growth_factor and f"multiplies by {told.growth_factor:g}{_after(told.growth_interval)}",
        told.backoff_factor and f"by {told.backoff_factor:g} after a skipped step",
    ]
    known = [part for part in parts if part]
    return f"This scaler {', '.join(known)}." if known else ""


def _after(interval: float | None) -> str:
    return f" after {count(interval)} good steps in a row" if interval else ""


def event_row(event: ScaleEvent) -> dict[str, str | int]:
    """One change for the table."""
    return {
        "Step": event.step,
        "What happened": ACTIONS.get(event.action, event.action),
        "Scale before": "" if event.before is None else in_words(event.before),
        "Scale after": "" if event.after is None else in_words(event.after),
        "Details": short(event.detail, 200),
        "Your line": place(event.source),
        "Code": short(event.source.code.strip(), 200) if event.source else "",
    }


def call_row(call: ScalerCall) -> tuple[str, ...]:
    """One repeated call for the table."""
    span = count(call.first_step) if call.count == 1 else f"{call.first_step:,} to {call.last_step:,}"
    code = call.source.code.strip() if call.source else ""
    return ACTIONS.get(call.action, call.action), count(call.count), span, place(call.source), code


def show_events(events: tuple[ScaleEvent, ...]) -> None:
    """Every change with the line that made it; long histories scroll."""
    rows = [event_row(event) for event in events]
    if len(rows) <= _SHORT:
        table(
            tuple(rows[0]),
            [tuple(f"{cell:,}" if isinstance(cell, int) else cell for cell in row.values()) for row in rows],
            numeric=("Step",),
        )
    else:
        st.dataframe(rows, hide_index=True, height=480)


def skip_row(one: SkippedStep) -> tuple[str, ...]:
    """One skipped step for the table."""
    scale = "" if one.scale is None else in_words(one.scale)
    return count(one.step), scale, value(one.loss) if one.loss is not None else "", tripped(one)


def tripped(one: SkippedStep) -> str:
    """Whose gradients made the scaler skip."""
    if not one.tripped:
        return "not recorded"
    if one.tripped == one.all_params > len(one.params):
        return f"all {one.tripped:,} parameters"
    more = one.tripped - len(one.params)
    return ", ".join(one.params) + (f" and {more:,} more" if more else "")


def story(run: loader.Loaded, optimizer: int | None, asked: Attempt | None) -> None:
    """How the scale went, in words, numbers and a picture with the step that was asked for."""
    history, seen = run.scale(optimizer), run.overview(optimizer)
    paragraph(" ".join(scale_story(history)))
    if history.health is not None and not history.health.verdict.is_calm:
        paragraph(history.health.explanation)
    tiles(facts(history))
    if told := settings_in_words(history.settings):
        paragraph(told)
    stack = scale_stack(history, seen.moments, seen.lr, marked=asked.step if asked else None)
    plot(stack_figure(stack), key="scale")


def details(run: loader.Loaded, optimizer: int | None) -> None:
    """Skips, changes and calls, one by one."""
    history = run.scale(optimizer)
    if skips := run.skips(optimizer):
        heading("Skipped steps, the newest first")
        rows = [skip_row(one) for one in skips]
        columns = ("Step", "Loss scale", "Loss", "Gradients that were not finite")
        if len(rows) <= _SHORT:
            table(columns, rows, numeric=("Step",))
        else:
            st.dataframe([dict(zip(columns, row, strict=True)) for row in rows], hide_index=True, height=320)
    if history.events:
        heading("Every change")
        show_events(history.events)
    if history.calls:
        heading("Calls your loop repeats")
        columns = ("Call", "Times", "Steps", "Your line", "Code")
        table(columns, [call_row(call) for call in history.calls], numeric=("Times",))


run = loader.current()
page_head("Scale", run.diagnosis().run.name)
optimizer = choose_optimizer(run.scale().optimizers)
if not run.scale(optimizer).is_scaled:
    paragraph("No step of this run used a loss scale: it has no GradScaler, or the scaler is disabled.")
    st.stop()
asked = step_asked(run, optimizer)
live.part(partial(story, optimizer=optimizer, asked=asked))
if asked is not None:
    at_step(run, asked)
heading("What if it had been set otherwise?")
st.fragment(simulator)(run, optimizer)
live.part(partial(details, optimizer=optimizer))
