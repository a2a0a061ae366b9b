"""Compare: are two runs, or two steps, the same; and if not, with which op do their numbers part?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import streamlit as st

from ampscope.analysis.replay.compare.compare_results import Comparison, Difference, DifferenceKind
from ampscope.errors import AmpscopeError
from ampscope.report.diagnosis_words import MATTERS
from ampscope.report.figures.step_figures import SIDES, overlay_stack
from ampscope.report.html.markup import as_html
from ampscope.report.html.tables_html import comparison_html, difference_rows
from blocks.choices import PickedSide, choose_optimizer, choose_side, choose_step
from blocks.figure import show_figure
from blocks.page_links import link_row, to_replay
from blocks.table import table
from blocks.text import alarm, heading, paragraph, title
from charts import stack_figure
from data.run_folders import OfferedRun, offered_runs, run_folders
from data.run_results import overview_of
from data.run_snapshot import current_run
from data.step_results import comparison_of

_ENVIRONMENT = "Where and how they ran"


@dataclass(frozen=True, slots=True)
class ChosenPair:
    """The two runs, or steps, that are compared."""

    one: PickedSide
    other: PickedSide
    step: int | None  #: None for the runs
    other_step: int | None

    @property
    def is_one_run(self) -> bool:
        """Whether both are the same rank of the same run."""
        return _is_same(self.one, self.other)


def compare_page() -> None:
    title("Compare")
    chosen = choose_sides(offered_runs(run_folders()))
    if chosen is None:
        paragraph("A and B are the same run, of which no two steps were traced: choose another run, or trace more.")
        st.code("ampscope.watch(model, scaler, every=100)", language="python", wrap_lines=True)
        return
    verdict = st.container(key="amp-verdict")  # filled last: the curves are there at once
    verdict.html("<i></i>")  # without anything in it, it would keep no room
    curves(chosen)
    with verdict:
        found = compared(chosen)
    if found is not None:
        with verdict:
            ways_onward(chosen, found)
        what_differs(found)


def choose_sides(offered: dict[str, OfferedRun]) -> ChosenPair | None:
    """The boxes; None where there is nothing to compare."""
    mine = next(key for key, run in offered.items() if str(run.path) == current_run().path)
    left, right = st.columns(2)
    with left:
        one = choose_side(SIDES[0], offered, mine)
    with right:
        other = choose_side(SIDES[1], offered, neighbour(list(offered), one.key))
    same = _is_same(one, other)
    if same and len(one.steps) < 2:
        return None
    if not one.steps or not other.steps:
        return ChosenPair(one, other, None, None)
    with left:
        step = choose_step(one, first=one.steps[0] if same else None, with_whole=not same)
    if step is None:
        return ChosenPair(one, other, None, None)
    others = replace(other, steps=tuple(each for each in other.steps if not (same and each == step)))
    with right:
        nearest = min(others.steps, key=lambda each: abs(each - step))
        return ChosenPair(one, other, step, choose_step(others, first=nearest, with_whole=False))


def neighbour(keys: Sequence[str], key: str) -> str:
    """The run that one is compared with at first: the one before it, else the one after it, else itself."""
    at = keys.index(key)
    return next(iter((*keys[at + 1 : at + 2], *keys[max(at - 1, 0) : at], key)))


def _is_same(one: PickedSide, other: PickedSide) -> bool:
    return one.run.identity == other.run.identity and one.run.rank == other.run.rank


def compared(chosen: ChosenPair) -> Comparison | None:
    """The verdict; None where the two cannot be compared, which is said."""
    one, other = chosen.one, chosen.other
    what = "the steps op by op"
    if chosen.step is None:
        steps = f"{len(one.steps):,} traced steps of A with {len(other.steps):,} of B"
        what = f"{steps}, and the curves of both" if one.steps and other.steps else "the curves of both"
    try:
        with st.spinner(f"Comparing {what}", show_time=True):
            found = comparison_of(one.run, other.run, chosen.step, chosen.other_step)
    except AmpscopeError as error:
        alarm("These cannot be compared", str(error))
        return None
    st.html(comparison_html(found))
    return found


def ways_onward(chosen: ChosenPair, found: Comparison) -> None:
    """Shows links to the op where the numbers part, in Replay, on either side."""
    diverged = found.first_divergence
    if diverged is None or not diverged.traced:
        return
    one, other = chosen.one, chosen.other
    against = f"{diverged.other_step}-{diverged.other_traced}" if chosen.is_one_run else None
    with link_row():
        label = f"Replay A, step {diverged.step:,}"
        to_replay(diverged.step, diverged.traced, diverged.seq, label, rank=one.run.rank, run=one.key, against=against)
        label = f"Replay B, step {diverged.other_step:,}"
        to_replay(
            diverged.other_step, diverged.other_traced, diverged.other_seq, label, rank=other.run.rank, run=other.key
        )


def curves(chosen: ChosenPair) -> None:
    """The curves of both over each other, with the steps that are compared."""
    one, other = chosen.one, chosen.other
    numbers = {*overview_of(one.run, None).optimizers, *overview_of(other.run, None).optimizers}
    optimizer = choose_optimizer(sorted(numbers))
    mine = overview_of(one.run, optimizer)
    theirs = None if chosen.is_one_run else overview_of(other.run, optimizer)
    steps = [step for step in (chosen.step, chosen.other_step) if step is not None]
    stack = overlay_stack(mine, theirs, lines=steps)
    if not stack.panels:
        return
    heading("Curves")
    legend = sides_html([one] if chosen.is_one_run else [one, other])
    show_figure(stack_figure(stack), "compare", "Two runs over each other", stack.label, legend=legend)


def sides_html(sides: Sequence[PickedSide]) -> str:
    """Returns a legend that says which line belongs to which run."""
    drawn = (
        f'<span><i class="{kind}"></i>{side.letter}: {as_html(side.key, 80)}{_rank(side)}</span>'
        for kind, side in zip(("", "other"), sides, strict=False)
    )
    return f'<div class="amp-sides">{"".join(drawn)}</div>'


def _rank(side: PickedSide) -> str:
    return f", rank {side.run.rank:,}" if side.run.world.is_shared else ""


def what_differs(found: Comparison) -> None:
    """All differences: those that matter, what follows from them or goes with them, and the environment."""
    around = [each for each in found.differences if each.kind is DifferenceKind.ENVIRONMENT]
    others = [each for each in found.differences if each.kind is not DifferenceKind.ENVIRONMENT]
    first = [each for each in others if each.score >= MATTERS]
    section("What differs", first)
    section("Also", others[len(first) :], after=len(first))
    section(_ENVIRONMENT, around, after=len(others))


def section(title: str, shown: Sequence[Difference], *, after: int = 0) -> None:
    """Differences under a heading, what matters most first; numbered from those before on."""
    if not shown:
        return
    heading(title)
    found = difference_rows(shown, first=after + 1)
    table(title, found.columns, found.rows, numeric=found.numeric)


compare_page()
