"""Boxes and tabs offer choices that are kept in the address: a step, a side of a comparison, a part of a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import streamlit as st

from ampscope.analysis.replay.compare.sides import comparable_steps
from ampscope.analysis.results import Diagnosis
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.errors import AmpscopeError
from ampscope.report.html.markup import as_html
from ampscope.report.safe_text import short
from ampscope.trace.schema import Source, execution_of
from blocks.text import alarm
from data.run_folders import OfferedRun
from data.run_snapshot import RunSnapshot, current_run, take_snapshot
from data.step_results import traced_steps_of
from state import get_number, get_param, param_in_address, set_choice, set_params


def not_there(label: str, asked: str | None, instead: str) -> None:
    """Say that what a link asked for is not there, and what is shown instead."""
    words = f"{label}: there is no {asked} here; this is {instead}."
    st.html(f'<div class="amp-place">{as_html(words, 240)}</div>')


def choose(
    name: str,
    label: str,
    options: Sequence[str],
    describe: Callable[[str], str],
    *,
    default: str | None = None,
    named: bool = False,
    width: Literal["stretch"] | int = "stretch",
    bare: bool = False,
    chips: bool = False,
) -> str:
    """A select box over ``options`` (not empty); an address that does not name one means the default, and stays so.

    Each writing of the address is an entry of the browser's history, to which Back would lead first.

    Args:
        name: The query parameter.
        label: What is said beside it.
        options: What can be chosen.
        describe: An option in words.
        default: What is chosen at first; the first option if left out.
        named: Write the default into the address, too, where another time it may be another.
        width: In pixels; beside others in a row, one that no longer fits begins the next line.
        bare: Whether what is said beside it is for those alone who do not see it.
        chips: Whether the options stand side by side.
    """
    begin = default if default is not None and default in options else options[0]
    asked = get_param(name)
    own = st.session_state.get(f"_chosen_{name}") == asked  # what the box itself wrote, not a link
    if asked in options and not (own and name in st.session_state):
        st.session_state[name] = asked
    known = st.session_state.get(name)
    if chips and known is None:  # a click on the chip that was chosen
        known = st.session_state.get(f"_chosen_{name}")
    if asked is None and known == st.session_state.get(f"_chosen_{name}"):
        known = begin  # nobody has picked it just now: it is of another run, or of what Back has left
    # Written even where it stays: a box of this name on the last page hands its choice on to the one of this page.
    st.session_state[name] = known if known in options else begin
    shown: Literal["collapsed", "visible"] = "collapsed" if bare else "visible"
    if chips:
        picked = st.segmented_control(label, options, format_func=describe, key=name, label_visibility=shown)
    else:
        picked = st.selectbox(label, options, format_func=describe, key=name, width=width, label_visibility=shown)
    chosen = picked if picked is not None and picked in options else begin
    if param_in_address(name) is not None and asked not in options and not own:
        not_there(label, asked, describe(chosen))
    set_choice(is_default=chosen == begin and not named, **{name: chosen})
    st.session_state[f"_chosen_{name}"] = chosen
    return chosen


def choose_optimizer(numbers: Sequence[int]) -> int | None:
    """A select box over a run's optimizers where there are several."""
    if len(numbers) < 2:
        return None
    return int(choose("optimizer", "Optimizer", [str(number) for number in numbers], lambda name: f"Optimizer {name}"))


_NAME = "tab"


def tabs(key: str, parts: Mapping[str, Callable[[], None]]) -> None:
    """Each part behind a tab of its name; the first is open unless the address asks for another.

    Args:
        key: The element's.
        parts: What draws each part, by our own words for it; not empty.
    """
    names = {_in_address(words): words for words in parts}
    asked = get_param(_NAME)
    is_own = st.session_state.get(f"_chosen_{_NAME}") == asked  # what was clicked here, not a link
    if asked in names and not (is_own and key in st.session_state):
        st.session_state[key] = names[asked]
    drawn = st.tabs(list(parts), key=key, on_change="rerun")
    for tab, draw in zip(drawn, parts.values(), strict=True):
        if tab.open:  # a click on another draws the page again
            with tab:
                draw()
    chosen = next((name for name, tab in zip(names, drawn, strict=True) if tab.open), next(iter(names)))
    set_choice(is_default=chosen == next(iter(names)), tab=chosen)
    st.session_state[f"_chosen_{_NAME}"] = chosen


def _in_address(words: str) -> str:
    return re.sub(r"\W+", "-", words.lower(), flags=re.ASCII).strip("-")


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


WHOLE = "whole"
#: More steps than this are not offered in one list, but so many around the one chosen.
_SIDE_LISTED, _SIDE_NEAR = 300, 60


@dataclass(frozen=True, slots=True)
class PickedSide:
    """One of the two; ``key`` names the run in the page's address."""

    letter: str
    key: str
    run: RunSnapshot  #: as seen from the rank that is chosen
    steps: tuple[int, ...]  #: those that can be compared, the newest first


def choose_side(letter: str, offered: Mapping[str, OfferedRun], first: str) -> PickedSide:
    """The boxes for a run and, where it has several, its rank; the page ends with a run that cannot be read.

    Args:
        letter: ``A`` or ``B``.
        offered: The runs.
        first: The run that is taken where the address names none.
    """
    name = letter.lower()
    key = choose(name, letter, list(offered), lambda each: offered[each].label, default=first, named=True)
    try:
        run = take_snapshot(offered[key].path)
    except AmpscopeError as error:
        alarm(f"{letter} cannot be read", str(error))
        st.stop()
    if run.world.is_shared:
        mine = current_run()
        first = str(mine.rank if mine.path == run.path else run.rank)
        ranks = [str(rank) for rank in run.world.present]
        words = f"Rank of {letter}, of {run.world.size:,}"
        rank = choose(f"{name}_rank", words, ranks, lambda each: f"Rank {int(each):,}", default=first)
        run = take_snapshot(offered[key].path, rank=int(rank))
    return PickedSide(letter, key, run, comparable_steps(traced_steps_of(run)))


def choose_step(side: PickedSide, *, first: int | None, with_whole: bool) -> int | None:
    """The box for a traced step of a side; None for the whole run.

    Args:
        side: The side.
        first: The step that is taken where the address names none; None for the whole run.
        with_whole: Whether the whole run can be chosen.
    """
    name = f"{side.letter.lower()}_step"
    options = [WHOLE] * with_whole + [str(step) for step in side.steps]
    start = WHOLE if first is None else str(first)
    start = start if start in options else options[0]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        listed = _listed_beside(name, options, start)
        picked = choose(name, f"Step of {side.letter}", listed, _words, default=start)
        if len(listed) < len(options):
            _go_to_side_step(name, side.steps, int(picked) if picked != WHOLE else side.steps[0])
    return None if picked == WHOLE else int(picked)


def _words(option: str) -> str:
    return "the whole run" if option == WHOLE else f"Step {int(option):,}"


def _listed_beside(name: str, options: Sequence[str], start: str) -> list[str]:
    """The options to offer: all, or of very many the ends and those around what is chosen."""
    if len(options) <= _SIDE_LISTED:
        return list(options)
    asked, own = get_param(name), st.session_state.get(f"_chosen_{name}")
    now = asked if asked in options and asked != own else st.session_state.get(name)
    at = options.index(now) if now in options else 0
    kept = {
        options.index(start),
        0,
        1,
        len(options) - 1,
        *range(max(0, at - _SIDE_NEAR), min(len(options), at + _SIDE_NEAR)),
    }
    return [options[place] for place in sorted(kept)]


def _go_to_side_step(name: str, steps: Sequence[int], now: int) -> None:
    """A box for a step's number; the one nearest to it is chosen."""
    key = f"{name}_number {now}"

    def go() -> None:
        asked = st.session_state[key]
        st.session_state[name] = str(min(steps, key=lambda step: abs(step - asked)))

    st.number_input("Go to step", min(steps), max(steps), now, on_change=go, key=key, width=160)
