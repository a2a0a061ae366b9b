"""The step that the reader came for, on a page about all steps: what happened in it, and where to see more."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.overview.search import Attempt, attempt
from ampscope.analysis.words import in_words
from ampscope.report.numbers import value
from blocks.basics.page_links import link_row, to_incident, to_replay
from blocks.basics.text import heading
from blocks.basics.tiles import tiles
from blocks.choices.not_there import not_there
from data.named_items import incident_at
from data.run_results import diagnosis_of
from data.run_snapshot import RunSnapshot
from state.query_params import get_number, param_in_address, set_params, write_params


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
