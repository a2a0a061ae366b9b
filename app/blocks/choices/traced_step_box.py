"""A select box over the traced steps of a run, and one for a step's number where they are very many."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from ampscope.analysis.results import Diagnosis
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.report.safe_text import short
from ampscope.trace.schema import Source, execution_of
from blocks.choices.not_there import not_there
from blocks.choices.select_box import choose
from data.current_run import current_run
from state.query_params import get_number, get_param, param_in_address, set_choice, set_params

_LABEL = "Traced step"
#: The select box's key in the session, and that of what was chosen in it last.
_KEY, _CHOSEN = "traced", "_chosen_traced"
#: More traced steps than this are not offered in one list, which the browser would have to hold.
_LISTED = 300
#: Steps before and after the one on screen that are offered for comparison.
_NEAR = 60
_NO_OTHER = "none"
_EXECUTIONS = {
    Source.LIVE.value: "recorded as it ran",
    Source.REPLAY.value: "replayed",
    Source.AUDIT.value: "replayed for an audit",
    Source.REPLAY_FP32.value: "replayed in float32",
}


def choose_traced_step(steps: Sequence[TracedStep], *, first: int | None = None) -> TracedStep:
    """A select box over traced steps (not empty); an address may name the step alone, or its source too.

    Without an address it starts at step ``first``, or at the newest.
    """
    named = {_name(one): one for one in steps}
    asked = _execution_of(named, get_number("step"), get_param("source"))
    if asked is not None and asked != st.session_state.get(_CHOSEN):
        st.session_state[_KEY] = asked
    known = st.session_state.get(_KEY)
    begin = _execution_of(named, first, "") or next(iter(named))
    otherwise = asked or begin
    if get_param("step") is None and known == st.session_state.get(_CHOSEN):
        known = None  # likewise
    now = st.session_state[_KEY] = known if known in named else otherwise  # as in `choose`
    with st.container(horizontal=True, vertical_alignment="bottom"):
        listed = _listed(named, now)
        picked = st.selectbox(_LABEL, listed, format_func=lambda name: step_words(named[name]), key=_KEY)
        if len(listed) < len(named):
            _go_to_step(named, now)
    chosen = named.get(picked, steps[0])
    wanted = param_in_address("step")
    if asked is None and wanted is not None:
        not_there(_LABEL, f"step {wanted}", step_words(chosen).lower())
    moves = current_run().is_open  # what it begins with
    set_choice(is_default=_name(chosen) == begin and not moves, step=chosen.step, source=chosen.source)
    st.session_state[_CHOSEN] = _name(chosen)
    return chosen


def pick_traced_step(step: int, source: str) -> None:
    """Have the box choose a step when the page is drawn next."""
    st.session_state[_KEY] = f"{step}-{source}"


def choose_other_step(steps: Sequence[TracedStep], chosen: TracedStep) -> TracedStep | None:
    """A select box over the traced steps around ``chosen``, to compare it with one of them."""
    at = steps.index(chosen)
    asked = get_param("against")
    near = range(max(at - _NEAR, 0), at + _NEAR)
    others = {_name(one): (place, one) for place, one in enumerate(steps) if one != chosen}
    named = {name: one for name, (place, one) in others.items() if place in near or name == asked}
    if not named:
        return None
    words = {_NO_OTHER: "Nothing", **{name: step_words(one) for name, one in named.items()}}
    other = named.get(choose("against", "Compare with", list(words), words.__getitem__))
    if other is None:
        set_params(against=None)
    return other


def first_step(diagnosis: Diagnosis, rank: int) -> int | None:
    """The step that a page on ``rank`` begins at: that of what to tell first, where it is this rank's."""
    primary = diagnosis.primary
    return primary.step if primary is not None and primary.rank == rank else None


def step_words(one: TracedStep) -> str:
    """``Step 260, replayed``."""
    execution, optimizer = execution_of(one.source)
    words = _EXECUTIONS.get(execution, short(execution, 40))
    whose = f", optimizer {short(optimizer, 40)}" if optimizer else ""
    return f"Step {one.step:,}, {words}{whose}"


def _name(one: TracedStep) -> str:
    return f"{one.step}-{one.source}"


def _execution_of(named: dict[str, TracedStep], step: int | None, source: str | None) -> str | None:
    """An execution of ``step``: that from ``source``, else the replay, else any."""
    of_step = [name for name, one in named.items() if one.step == step]
    exact = [name for name in of_step if named[name].source == source]
    replayed = [name for name in of_step if named[name].source.startswith(Source.REPLAY)]
    return next(iter((*exact, *replayed, *of_step)), None)


def _listed(named: dict[str, TracedStep], now: str) -> list[str]:
    """The traced steps to offer: all, or of very many the replays and those around ``now``."""
    names = list(named)
    if len(names) <= _LISTED:
        return names
    at = names.index(now)
    replayed = [place for place, one in enumerate(named.values()) if one.source.startswith(Source.REPLAY)]
    around = range(max(0, at - _LISTED // 4), min(len(names), at + _LISTED // 4))
    return [names[place] for place in sorted({0, len(names) - 1, *replayed[: _LISTED // 2], *around})]


def _go_to_step(named: dict[str, TracedStep], now: str) -> None:
    """A box for a step's number; the traced step nearest to it is chosen."""
    key = f"traced_step {now}"
    steps = [one.step for one in named.values()]

    def go() -> None:
        asked = st.session_state[key]
        nearest = min(steps, key=lambda step: abs(step - asked))
        st.session_state[_KEY] = _execution_of(named, nearest, named[now].source)

    st.number_input("Go to step", min(steps), max(steps), named[now].step, on_change=go, key=key, width=160)
