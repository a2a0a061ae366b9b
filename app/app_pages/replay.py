"""Replay: a traced step op by op, in the order in which it ran, as in a debugger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import streamlit as st

from ampscope.analysis.arrays import IntArray
from ampscope.analysis.replay.op_detail import OpDetail, OpKind, find, marked, op_detail
from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.results import Incident
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.report.figures.magnitudes_figure import LABEL as MAGNITUDES
from ampscope.report.figures.magnitudes_figure import magnitudes
from ampscope.report.html.ops_svg import magnitudes_html
from ampscope.trace.vocabulary import Severity
from blocks.choices import choose_other_step, choose_traced_step, first_step
from blocks.components.habits import release_keyboard
from blocks.debugger import Cursor, counterpart, cursor_in, first_difference, op_card, operand_table, step_track
from blocks.figure import figure
from blocks.live_part import live_part
from blocks.op_lists import neighbour_list, ops_around
from blocks.page_links import link_row, newer_step_link, to_incident, to_precision, to_replay, to_scale, way_to
from blocks.text import heading, how_to_trace, paragraph, title
from data.run_results import diagnosis_of, incident_at, scale_history_of
from data.run_snapshot import RunSnapshot, current_run
from data.step_results import histograms_of, recording_of, traced_steps_of
from state import Page, get_param, write_params

#: The key of the search box.
_FIND = "replay-find"


@dataclass(frozen=True, slots=True)
class OnScreen:
    """The content of the debugger's page, but for the cursor's position in it."""

    run: RunSnapshot
    step: TracedStep
    recording: Recording  #: of ``step``
    other: TracedStep | None  #: that ``step`` is compared with
    incident: tuple[str, Incident] | None  #: that ``step`` belongs to, with its name


def replay_page() -> None:
    run = current_run()
    diagnosis = diagnosis_of(run)
    title("Replay")
    steps = traced_steps_of(run)
    if not steps:
        how_to_trace(diagnosis)
        return
    left, right = st.columns(2)
    with left:
        step = choose_traced_step(steps, first=first_step(diagnosis, run.rank))
    with right:
        other = choose_other_step(steps, step)
    live_part(partial(newer_step_link, shown=steps[0].step, link=link_to_step))
    recording = recording_of(run, step)
    if not len(recording):
        paragraph("The disk budget of this run has dropped the ops of this step.")
        return
    on_screen = OnScreen(run, step, recording, other, incident_at(diagnosis, step.step, run.rank))
    cursor = cursor_in(recording, run.path, start_position(on_screen))
    if other is not None:
        first_difference(run, step, other)
    release_keyboard()
    st.fragment(debugger)(on_screen, cursor)


def link_to_step(step: int, words: str) -> None:
    to_replay(step, label=words)


def start_position(on_screen: OnScreen) -> int:
    """Returns where to begin: at the incident's origin, in a repeat of it at its first non-finite result, else at 0."""
    if on_screen.incident is None or on_screen.incident[1].severity == Severity.INFO:
        return 0
    _, incident = on_screen.incident
    if incident.path and (incident.step, incident.rank) == (on_screen.step.step, on_screen.step.rank):
        return on_screen.recording.position(incident.path[0].seq)
    return next(iter(marked(on_screen.recording, OpKind.NONFINITE).tolist()), 0)


def debugger(on_screen: OnScreen, cursor: Cursor) -> None:
    """All that moves: drawn again when another op is chosen, and nothing else of the page."""
    recording = on_screen.recording
    cursor.write(recording)
    words = st.session_state.get(_FIND) or ""
    matches = find(recording, words)
    with st.container(key="amp-pinned"):
        step_track(on_screen.run, on_screen.step, on_screen.other, cursor, matches if words else None)
    left, right = st.columns([3, 2], gap="medium")
    with left:
        inspector(on_screen, cursor)
    with right:
        search_and_list(recording, matches, cursor)
    if not cursor.playing:
        write_params()


def inspector(on_screen: OnScreen, cursor: Cursor) -> None:
    """The chosen op: what it is, what it read and wrote, where to go from it."""
    detail = op_detail(on_screen.recording, cursor.position)
    op_card(detail)
    ways_onward(on_screen, detail)
    operand_table(detail.reads, detail.writes)
    if on_screen.other is not None:
        counterpart(on_screen.run, on_screen.step, on_screen.other, cursor.position)
    dataflow(on_screen.recording, detail, cursor, partial(address_of_op, on_screen.step))
    if not cursor.playing:
        histograms(on_screen, cursor)


def search_and_list(recording: Recording, matches: IntArray, cursor: Cursor) -> None:
    """Ops around the cursor, all or those that the search finds."""
    st.text_input("Find", key=_FIND, placeholder="Find ops: softmax, blocks.3, float32", label_visibility="collapsed")
    if len(matches):
        ops_around(recording, matches, cursor.position, cursor.move)
    else:
        paragraph("No op of this step has all of these words in its name, module, type, file or line.")
    st.caption("Bars: the magnitudes of the result, within what its dtype holds")


def ways_onward(on_screen: OnScreen, detail: OpDetail) -> None:
    """Links to what other pages show of the step and the op."""
    with link_row():
        if on_screen.incident is not None:
            to_incident(on_screen.incident[0], "Incident")
        step, module = on_screen.step, detail.line.module
        if scale_history_of(on_screen.run, None).is_scaled:
            to_scale(step.step, "Loss scale at this step")
        if module:
            to_precision(module, step.step, step.source, "Precision of this module")


def address_of_op(step: TracedStep, seq: int) -> str:
    """Returns the address of this page at the op with sequence number ``seq``."""
    asked = {"step": step.step, "source": step.source, "op": seq, "against": get_param("against")}
    return way_to(Page.REPLAY, **asked).address


def dataflow(recording: Recording, detail: OpDetail, cursor: Cursor, address: Callable[[int], str]) -> None:
    """Lists the ops that the op read from, those that read it, and its other half, each as a link."""
    if detail.producers:
        st.caption("It read what these wrote")
        neighbour_list("replay-producers", "Ops that it read from", detail.producers, cursor.move, address)
    if detail.readers:
        more = detail.reader_count - len(detail.readers)
        st.caption("Read by" + (f" (and {more:,} more)" if more else ""))
        neighbour_list("replay-readers", "Ops that read it", detail.readers, cursor.move, address)
    if detail.twins:
        is_backward = recording.backward[detail.line.position]
        st.caption("In forward this was" if is_backward else "In backward this becomes")
        neighbour_list("replay-twins", "Its other half", detail.twins, cursor.move, address)


def histograms(on_screen: OnScreen, cursor: Cursor) -> None:
    """Shows how the result's values are distributed; not while playing, because it takes a moment to draw."""
    if drawn := magnitudes(histograms_of(on_screen.run, on_screen.step, cursor.position)):
        heading("Magnitudes of what it wrote, against what each dtype can hold")
        with figure("magnitudes", f"What op {cursor.position + 1:,} of step {on_screen.step.step:,} wrote", MAGNITUDES):
            st.html(magnitudes_html(drawn))


replay_page()
