"""The boxes for the two sides of a comparison: a run, its rank, and a traced step of it or the whole run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import streamlit as st

from ampscope.analysis.replay.compare.sides import comparable_steps
from ampscope.errors import AmpscopeError
from blocks.basics.text import alarm
from blocks.choices.select_box import choose
from data.current_run import current_run
from data.run_folders import OfferedRun
from data.run_snapshot import RunSnapshot, take_snapshot
from data.step_results import traced_steps_of
from state.query_params import get_param

WHOLE = "whole"
#: More steps than this are not offered in one list, but so many around the one chosen.
_LISTED, _NEAR = 300, 60


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two; ``key`` names the run in the page's address."""

    letter: str
    key: str
    run: RunSnapshot  #: as seen from the rank that is chosen
    steps: tuple[int, ...]  #: those that can be compared, the newest first


def choose_side(letter: str, offered: Mapping[str, OfferedRun], first: str) -> Side:
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
    return Side(letter, key, run, comparable_steps(traced_steps_of(run)))


def choose_step(side: Side, *, first: int | None, with_whole: bool) -> int | None:
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
        listed = _listed(name, options, start)
        picked = choose(name, f"Step of {side.letter}", listed, _words, default=start)
        if len(listed) < len(options):
            _go_to_step(name, side.steps, int(picked) if picked != WHOLE else side.steps[0])
    return None if picked == WHOLE else int(picked)


def _words(option: str) -> str:
    return "the whole run" if option == WHOLE else f"Step {int(option):,}"


def _listed(name: str, options: Sequence[str], start: str) -> list[str]:
    """The options to offer: all, or of very many the ends and those around what is chosen."""
    if len(options) <= _LISTED:
        return list(options)
    asked, own = get_param(name), st.session_state.get(f"_chosen_{name}")
    now = asked if asked in options and asked != own else st.session_state.get(name)
    at = options.index(now) if now in options else 0
    kept = {options.index(start), 0, 1, len(options) - 1, *range(max(0, at - _NEAR), min(len(options), at + _NEAR))}
    return [options[place] for place in sorted(kept)]


def _go_to_step(name: str, steps: Sequence[int], now: int) -> None:
    """A box for a step's number; the one nearest to it is chosen."""
    key = f"{name}_number {now}"

    def go() -> None:
        asked = st.session_state[key]
        st.session_state[name] = str(min(steps, key=lambda step: abs(step - asked)))

    st.number_input("Go to step", min(steps), max(steps), now, on_change=go, key=key, width=160)
