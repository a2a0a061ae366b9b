"""The step that the reader came for, on a page about all steps: what happened in it, and where to see more."""

from __future__ import annotations

import streamlit as st
from data.loader import Loaded
from state.address import in_address, tell, told_number, write_address
from state.choice import missing

from ampscope.analysis.overview.step_attempt import Attempt, attempt
from ampscope.analysis.results import Incident
from ampscope.analysis.words.scale_words import in_words
from ampscope.report.numbers import value
from blocks.basics.links import link_row, to_incident, to_replay
from blocks.basics.notes import heading
from blocks.basics.tiles import tiles
from blocks.verdict.items import items


def step_asked(run: Loaded, optimizer: int | None) -> Attempt | None:
    """The attempt that the address or the story so far names; says so where an address names none."""
    step = told_number("step")
    found = None if step is None else attempt(run.run, step, optimizer=optimizer)
    asked = in_address("step")
    if found is None and asked is not None:
        missing("Step", asked, "the whole run")
        tell(step=None)
    if found is not None:
        tell(step=found.step)
    return found


def at_step(run: Loaded, seen: Attempt) -> None:
    """What happened in it, with ways to its ops and to its incident."""
    heading(f"At step {seen.step:,}")
    tiles([(what, told) for what, told in _facts(seen) if told])
    with link_row():
        for name, item in items(run.diagnosis()).items():
            if isinstance(item, Incident) and item.step <= seen.step <= item.last_step:
                to_incident(name)
                break
        if seen.traced is not None:
            to_replay(seen.step, seen.traced.source)
        if st.button("Show no step", type="tertiary", icon=":material/close:"):
            tell(step=None)
            write_address()
            st.rerun()


def _facts(seen: Attempt) -> list[tuple[str, str]]:
    return [
        ("optimizer step", "skipped" if seen.skipped else "taken"),
        ("loss scale in use", "" if seen.scale is None else in_words(seen.scale)),
        ("loss scale after", "" if seen.next_scale is None else in_words(seen.next_scale)),
        ("good steps in a row", "" if seen.growth_tracker is None else f"{seen.growth_tracker:,}"),
        ("loss", "" if seen.loss is None else value(seen.loss)),
        ("gradient norm", "" if seen.grad_norm is None else value(seen.grad_norm)),
    ]
