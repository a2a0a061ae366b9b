"""The Scale page has a simulator of other settings, and the facts of the step that the reader came for."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from ampscope.analysis.overview.search import Attempt, attempt
from ampscope.analysis.scale.what_if import ScalerRules, what_if
from ampscope.analysis.words import in_words
from ampscope.numerals import number
from ampscope.report.figures.step_figures import what_if_stack
from ampscope.report.numbers import count, value
from ampscope.report.precision_words import code, in_sentences
from blocks.choices import not_there
from blocks.figure import show_figure
from blocks.page_links import link_row, to_incident, to_replay
from blocks.text import heading, paragraph, tiles
from charts import stack_figure
from data.run_results import diagnosis_of, incident_at, scale_history_of, scale_record_of
from data.run_snapshot import RunSnapshot
from state import get_number, get_param, param_in_address, set_params, write_params

_SCALES = tuple(2.0**power for power in range(-8, 33))
_FLOORS = (0.0, *(2.0**power for power in range(-8, 17)))
_INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_GROWTHS = (1.25, 1.5, 2.0, 4.0)
_BACKOFFS = (0.1, 0.25, 0.5, 0.75)


def _floor(value: float) -> str:
    return in_words(value) if value else "no floor"


def _good_steps(value: float) -> str:
    return count(value, "good step")


_RESETS = "_ampscope_what_if_resets"
#: By the rule that it sets: a slider's label, what it offers, and how it says that.
_SLIDERS: dict[str, tuple[str, tuple[float, ...], Callable[[float], str]]] = {
    "init_scale": ("Initial scale", _SCALES, in_words),
    "growth_interval": ("Grows after", _INTERVALS, _good_steps),
    "growth_factor": ("Grows by", _GROWTHS, number),
    "backoff_factor": ("A skip multiplies it by", _BACKOFFS, number),
    "floor": ("Never below", _FLOORS, _floor),
}


def simulator(run: RunSnapshot, optimizer: int | None) -> None:
    """The sliders, set to what the scaler was made with, and the answer to them."""
    history = scale_history_of(run, optimizer)
    made = ScalerRules.of(history.settings, history.first)
    rules = _chosen(run, made)
    write_params()
    if rules == made:
        paragraph("Set as it was. Move a slider to see the history that would have been.")
        return
    st.button("Set as it was", on_click=_reset, icon=":material/undo:", type="tertiary")
    answer = what_if(scale_record_of(run, optimizer), rules)
    paragraph(" ".join(in_sentences(answer)))
    stack = what_if_stack(answer, history)
    show_figure(stack_figure(stack), "what-if", "What if it had been set otherwise", stack.label)
    st.code(code(answer.rules), language="python")


def _reset() -> None:
    """Back to how the scaler was made."""
    set_params(**dict.fromkeys(_SLIDERS))
    st.session_state[_RESETS] = st.session_state.get(_RESETS, 0) + 1  # other sliders


def _chosen(run: RunSnapshot, made: ScalerRules) -> ScalerRules:
    """Returns the settings on the sliders; the address keeps those that differ from the run's own."""
    chosen, resets = {}, st.session_state.get(_RESETS, 0)
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        for name, (label, options, words) in _SLIDERS.items():
            now = float(getattr(made, name))
            every = sorted({*options, now})
            asked = next((one for one in every if f"{one:g}" == get_param(name)), now)
            with st.container(width=152):
                picked = st.select_slider(
                    label, every, value=asked, format_func=words, key=f"{name} of {run.path} {resets}"
                )
            set_params(**{name: None if picked == now else f"{picked:g}"})
            chosen[name] = picked
    return ScalerRules(
        init_scale=chosen["init_scale"],
        growth_factor=chosen["growth_factor"],
        backoff_factor=chosen["backoff_factor"],
        growth_interval=int(chosen["growth_interval"]),
        floor=chosen["floor"],
    )


def asked_step(run: RunSnapshot, optimizer: int | None) -> Attempt | None:
    """The attempt at the step that was looked at last; says so where an address names none."""
    step = get_number("step")
    found = None if step is None else attempt(run.run, step, optimizer=optimizer, rank=run.rank)
    asked = param_in_address("step")
    if found is None and asked is not None:
        not_there("Step", asked, "the whole run")
        set_params(step=None)
    if found is not None:
        set_params(step=found.step)
    return found


def step_facts(run: RunSnapshot, attempted: Attempt) -> None:
    """Shows what happened in a step, with links to its ops and to its incident."""
    heading(f"At step {attempted.step:,}")
    tiles([(what, words) for what, words in _facts(attempted) if words])
    with link_row():
        if incident := incident_at(diagnosis_of(run), attempted.step, run.rank):
            to_incident(incident[0])
        if attempted.traced is not None:
            to_replay(attempted.step, attempted.traced.source)
        if st.button("Show no step", type="tertiary", icon=":material/close:"):
            set_params(step=None)
            write_params()
            st.rerun()


def _facts(attempted: Attempt) -> list[tuple[str, str]]:
    return [
        ("optimizer step", "skipped" if attempted.skipped else "taken"),
        ("loss scale in use", "" if attempted.scale is None else in_words(attempted.scale)),
        ("loss scale after", "" if attempted.next_scale is None else in_words(attempted.next_scale)),
        ("good steps in a row", "" if attempted.growth_tracker is None else f"{attempted.growth_tracker:,}"),
        ("loss", "" if attempted.loss is None else value(attempted.loss)),
        ("gradient norm", "" if attempted.grad_norm is None else value(attempted.grad_norm)),
    ]
