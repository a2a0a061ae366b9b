"""Choices that live in the page's address, so that a link shows what its sender saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import streamlit as st

from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.report.html.markup import as_html
from ampscope.report.safe_text import short
from ampscope.trace.schema import Source, execution_of
from state.address import in_address, tell, told, told_number


def choose(name: str, label: str, options: Sequence[str], describe: Callable[[str], str]) -> str:
    """A select box over ``options`` (not empty); an address that names none of them gets the first."""
    asked = told(name)
    own = st.session_state.get(f"_seen_{name}") == asked  # what the box itself wrote, not a link
    if asked in options and not (own and name in st.session_state):
        st.session_state[name] = asked
    known = st.session_state.get(name)
    # Written even where it stays: a box of this name on the last page hands its choice on to the one of this page.
    st.session_state[name] = known if known in options else options[0]
    picked = st.selectbox(label, options, format_func=describe, key=name)
    chosen = picked if picked in options else options[0]
    if in_address(name) is not None and asked not in options and not own:
        missing(label, asked, describe(chosen))
    tell(**{name: chosen})
    st.session_state[f"_seen_{name}"] = chosen
    return chosen


def missing(label: str, asked: str | None, instead: str) -> None:
    """Say that what a link asked for is not there."""
    words = f"{label}: there is no {asked} here; this is {instead}."
    st.html(f'<div class="amp-place">{as_html(words, 240)}</div>')


def choose_optimizer(numbers: Sequence[int]) -> int | None:
    """A select box over a run's optimizers where there are several."""
    if len(numbers) < 2:
        return None
    return int(choose("optimizer", "Optimizer", [str(number) for number in numbers], lambda name: f"Optimizer {name}"))


def choose_traced(traced: Sequence[TracedStep], *, first: int | None = None) -> TracedStep:
    """A select box over traced steps (not empty); an address may name the step alone, or its source too.

    Without an address it starts at step ``first``, or at the newest.
    """
    label = "Traced step"
    named = {f"{one.step}-{one.source}": one for one in traced}
    asked = _asked_step(named)
    if asked is not None and asked != st.session_state.get("_seen_traced"):
        st.session_state["traced"] = asked
    known = st.session_state.get("traced")
    otherwise = asked or _of_step(named, first, "") or next(iter(named))
    now = st.session_state["traced"] = known if known in named else otherwise  # as in `choose`
    with st.container(horizontal=True, vertical_alignment="bottom"):
        listed = _listed(named, now)
        picked = st.selectbox(label, listed, format_func=lambda name: traced_words(named[name]), key="traced")
        if len(listed) < len(named):
            _go_to_step(named, now)
    chosen = named.get(picked, traced[0])
    wanted = in_address("step")
    if asked is None and wanted is not None:
        missing(label, f"step {wanted}", traced_words(chosen).lower())
    tell(step=chosen.step, source=chosen.source)
    st.session_state["_seen_traced"] = f"{chosen.step}-{chosen.source}"
    return chosen


#: More traced steps than this are not offered in one list, which the browser would have to hold.
_LISTED = 300


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
        st.session_state["traced"] = _of_step(named, nearest, named[now].source)

    st.number_input("Go to step", min(steps), max(steps), named[now].step, on_change=go, key=key, width=160)


_EXECUTIONS = {
    Source.LIVE: "recorded as it ran",
    Source.REPLAY: "replayed",
    Source.REPLAY_FP32: "replayed in float32",
}


def traced_words(one: TracedStep) -> str:
    """``Step 260, replayed``."""
    return f"Step {one.step:,}, {source_words(one.source)}"


def source_words(source: str) -> str:
    """How a step was executed when its ops were recorded."""
    execution, optimizer = execution_of(source)
    words = _EXECUTIONS.get(execution, short(execution, 40))
    return f"{words}, optimizer {short(optimizer, 40)}" if optimizer else words


def _asked_step(named: dict[str, TracedStep]) -> str | None:
    """The traced step that the story is about."""
    return _of_step(named, told_number("step"), told("source"))


def _of_step(named: dict[str, TracedStep], step: int | None, source: str | None) -> str | None:
    """An execution of ``step``: that from ``source``, else the replay, else any."""
    of_step = [name for name, one in named.items() if one.step == step]
    exact = [name for name in of_step if named[name].source == source]
    replayed = [name for name in of_step if named[name].source.startswith(Source.REPLAY)]
    return next(iter((*exact, *replayed, *of_step)), None)
