"""What if the scaler had been set otherwise? Sliders, and the history that would have been."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from ampscope.analysis.scale.scale_history import ScaleHistory
from ampscope.analysis.scale.what_if import ScalerRules, WhatIf, what_if
from ampscope.analysis.words.scale_words import in_words
from ampscope.report import numbers
from ampscope.report.figures.over_steps import what_if_stack
from blocks.basics.figure import show_figure
from blocks.basics.text import paragraph
from charts.stack import stack_figure
from data.run_results import scale_history_of, scale_record_of
from data.run_snapshot import RunSnapshot
from state.query_params import get_param, set_params, write_params

_SCALES = tuple(2.0**power for power in range(-8, 33))
_FLOORS = (0.0, *(2.0**power for power in range(-8, 17)))
_INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_GROWTHS = (1.25, 1.5, 2.0, 4.0)
_BACKOFFS = (0.1, 0.25, 0.5, 0.75)


def _number(value: float) -> str:
    return f"{value:,g}"


def _floor(value: float) -> str:
    return in_words(value) if value else "no floor"


#: By the rule that it sets: a slider's label, what it offers, and how it says that.
_SLIDERS: dict[str, tuple[str, tuple[float, ...], Callable[[float], str]]] = {
    "init_scale": ("Initial scale", _SCALES, in_words),
    "growth_interval": ("Good steps before it grows", _INTERVALS, _number),
    "growth_factor": ("Grows by", _GROWTHS, _number),
    "backoff_factor": ("A skip multiplies it by", _BACKOFFS, _number),
    "floor": ("Never below", _FLOORS, _floor),
}


def simulator(run: RunSnapshot, optimizer: int | None) -> None:
    """The sliders, set to what the scaler was made with, and the answer to them."""
    history = scale_history_of(run, optimizer)
    made = _made(history)
    rules = _chosen(run, made)
    write_params()
    if rules == made:
        paragraph("Set as it was. Move a slider to see the history that would have been.")
        return
    answer = what_if(scale_record_of(run, optimizer), rules)
    paragraph(" ".join(in_sentences(answer)))
    show_figure(stack_figure(what_if_stack(answer, history)), key="what-if")
    st.code(code(answer.rules), language="python")


def in_sentences(answer: WhatIf) -> list[str]:
    """The answer in words, and how sure it is."""
    skipped, was = (numbers.count(number, "step") for number in (answer.skipped, answer.was_skipped))
    same = answer.skipped == answer.was_skipped
    sentences = [f"{skipped} would have been skipped" + (", as many as were." if same else f"; {was} were.")]
    if answer.unsaved:
        sentences.append(f"{answer.unsaved:,} of them had a loss that no scale would have saved.")
    if answer.lowest is not None and answer.current is not None:
        sentences.append(
            f"The scale would be {in_words(answer.current)} now, and {in_words(answer.lowest)} at its lowest."
        )
    if answer.proven < answer.steps:
        guessed = numbers.count(answer.steps - answer.proven, "step")
        sentences.append(f"For {guessed} this is an estimate from the steps around; of the others the run proves it.")
    return sentences


def code(rules: ScalerRules) -> str:
    """The scaler to paste."""
    lines = [
        "scaler = torch.amp.GradScaler(",
        f"    init_scale={rules.init_scale:g},",
        f"    growth_factor={rules.growth_factor:g},",
        f"    backoff_factor={rules.backoff_factor:g},",
        f"    growth_interval={rules.growth_interval},",
        ")",
    ]
    if rules.floor:
        lines.append(
            f"# after scaler.update():\nif scaler.get_scale() < {rules.floor:g}:\n    scaler.update({rules.floor:g})"
        )
    return "\n".join(lines)


def _made(history: ScaleHistory) -> ScalerRules:
    """How the scaler was made; ``GradScaler``'s own defaults where that was not recorded."""
    made, usual = history.settings, ScalerRules()
    return ScalerRules(
        init_scale=made.init_scale or history.first or usual.init_scale,
        growth_factor=made.growth_factor or usual.growth_factor,
        backoff_factor=made.backoff_factor or usual.backoff_factor,
        growth_interval=int(made.growth_interval or usual.growth_interval),
    )


def _chosen(run: RunSnapshot, made: ScalerRules) -> ScalerRules:
    """What the sliders say; the address says what differs from the run's own."""
    chosen = {}
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        for name, (label, options, words) in _SLIDERS.items():
            now = float(getattr(made, name))
            every = sorted({*options, now})
            asked = next((one for one in every if f"{one:g}" == get_param(name)), now)
            with st.container(width=152):
                picked = st.select_slider(label, every, value=asked, format_func=words, key=f"{name} of {run.path}")
            set_params(**{name: None if picked == now else f"{picked:g}"})
            chosen[name] = picked
    return ScalerRules(
        init_scale=chosen["init_scale"],
        growth_factor=chosen["growth_factor"],
        backoff_factor=chosen["backoff_factor"],
        growth_interval=int(chosen["growth_interval"]),
        floor=chosen["floor"],
    )
