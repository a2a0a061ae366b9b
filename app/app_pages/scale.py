"""Scale: what did the gradient scaler do, and is it well?"""

from __future__ import annotations

from functools import partial

import streamlit as st

from ampscope.analysis.overview.search import Attempt
from ampscope.analysis.scale.scale_history import ScaleHistory, SkippedStep, scale_story
from ampscope.analysis.scale.scaler_course import RepeatedCall, ScaleEvent, ScalerSettings
from ampscope.analysis.words import in_words
from ampscope.report.figures.step_figures import scale_stack
from ampscope.report.html.cards import Fact, scale_tile
from ampscope.report.numbers import UNKNOWN, count, share, value
from ampscope.report.safe_text import place
from ampscope.trace.schema import ScalerAction
from blocks.choices import choose_optimizer
from blocks.figure import show_figure
from blocks.live_part import live_part
from blocks.page_links import link_row, to_overview, to_plan, way_to
from blocks.scaler import asked_step, simulator, step_facts
from blocks.table import table
from blocks.text import heading, paragraph, tiles, title
from charts import stack_figure
from data.run_results import overview_of, scale_answer_of, scale_history_of, skipped_steps_of
from data.run_snapshot import RunSnapshot, current_run
from state import Page

_ACTIONS = {
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


def scale_page() -> None:
    run = current_run()
    title("Scale")
    optimizer = choose_optimizer(scale_history_of(run, None).optimizers)
    if not scale_history_of(run, optimizer).is_scaled:
        paragraph("No step of this run used a loss scale: it has no GradScaler, or the scaler is disabled.")
        to_overview()
        return
    attempt = asked_step(run, optimizer)
    live_part(partial(history, optimizer=optimizer, attempt=attempt))
    if attempt is not None:
        step_facts(run, attempt)
    with link_row():
        to_plan("The scales at which each gradient fits")
    heading("What if it had been set otherwise?")
    st.fragment(simulator)(run, optimizer)
    live_part(partial(details, optimizer=optimizer))


def history(run: RunSnapshot, optimizer: int | None, attempt: Attempt | None) -> None:
    """How the scale went, in words, numbers and a figure with the step that was asked for."""
    scale, overview = scale_history_of(run, optimizer), overview_of(run, optimizer)
    paragraph(f"Is the loss scale right? {scale_answer_of(run, optimizer).sentence}")
    paragraph(" ".join(scale_story(scale)))
    if scale.health is not None and not scale.health.verdict.is_calm:
        paragraph(scale.health.explanation)
    tiles(facts(scale))
    if settings := settings_in_words(scale.settings):
        paragraph(settings)
    marked = attempt.step if attempt else None
    stack = scale_stack(scale, overview.moments, overview.lr, groups=overview.group_lrs, marked=marked)
    show_figure(stack_figure(stack), "scale", "Loss scale", stack.label)


def facts(scale: ScaleHistory) -> list[Fact]:
    """The tiles: now, then, skips."""
    return [
        scale_tile(scale.current or 0.0, filter(None, [scale.health])),
        ("lowest so far", in_words(scale.lowest or 0.0)),
        (f"of all steps skipped ({count(scale.skipped, 'step')})", share(scale.skipped_share, missing=UNKNOWN)),
        (f"skipped of the last {scale.recent_steps:,}", count(scale.recent_skipped)),
    ]


def settings_in_words(settings: ScalerSettings) -> str:
    """How the scaler was set."""
    parts = [
        settings.init_scale and f"starts at {in_words(settings.init_scale)}",
        settings.growth_factor and f"multiplies by {settings.growth_factor:g}{_after(settings.growth_interval)}",
        settings.backoff_factor and f"by {settings.backoff_factor:g} after a skipped step",
    ]
    known = [part for part in parts if part]
    return f"This scaler {', '.join(known)}." if known else ""


def _after(interval: float | None) -> str:
    return f" after {count(interval)} good steps in a row" if interval else ""


def details(run: RunSnapshot, optimizer: int | None) -> None:
    """Skips, changes and calls, one by one."""
    scale = scale_history_of(run, optimizer)
    if skips := skipped_steps_of(run, optimizer):
        heading("Skipped steps, the newest first")
        skip_table(skips)
    if scale.events:
        heading("Every change")
        event_table(scale.events)
    if calls := [call_row(call) for call in scale.calls if call.action != ScalerAction.SKIP]:
        heading("Calls your loop repeats")
        columns = ("Call", "Times", "Steps", "Your line", "Code")
        table("Calls your loop repeats", columns, calls, numeric=("Times",))


def skip_table(skips: tuple[SkippedStep, ...]) -> None:
    """Every skipped step, those that say the same as their neighbours as one."""
    columns = ("Step", "Loss scale", "Loss", "Gradients that were not finite")
    ways = [way_to(Page.SCALE, step=one.step) for one in skips]
    table("Skipped steps", columns, [skip_row(one) for one in skips], numeric=columns[:3], ways=ways, fold="Step")


def skip_row(one: SkippedStep) -> tuple[str, ...]:
    """One skipped step for the table."""
    scale = "" if one.scale is None else in_words(one.scale)
    return count(one.step), scale, value(one.loss) if one.loss is not None else "", tripped(one)


def tripped(one: SkippedStep) -> str:
    """Says which parameters' gradients made the scaler skip."""
    if not one.tripped:
        return "not recorded"
    if one.tripped == one.all_params > len(one.params):
        return f"all {one.tripped:,} parameters"
    more = one.tripped - len(one.params)
    return ", ".join(one.params) + (f" and {more:,} more" if more else "")


def event_table(events: tuple[ScaleEvent, ...]) -> None:
    """Shows every change of the scaler with the line that made it."""
    columns = ("Step", "What happened", "Scale before", "Scale after", "Details", "Your line", "Code")
    table(
        "Every change of the scaler", columns, [event_row(event) for event in events], numeric=columns[:1], fold="Step"
    )


def event_row(event: ScaleEvent) -> tuple[str, ...]:
    """One change for the table."""
    return (
        count(event.step),
        _ACTIONS.get(event.action, event.action),
        "" if event.before is None else in_words(event.before),
        "" if event.after is None else in_words(event.after),
        event.detail,
        place(event.source),
        event.source.code.strip() if event.source else "",
    )


def call_row(call: RepeatedCall) -> tuple[str, ...]:
    """One repeated call for the table."""
    span = count(call.first_step) if call.count == 1 else f"{call.first_step:,} to {call.last_step:,}"
    code = call.source.code.strip() if call.source else ""
    return _ACTIONS.get(call.action, call.action), count(call.count), span, place(call.source), code


scale_page()
