"""Replay: a traced step op by op, in the order in which it ran, as in a debugger."""

from __future__ import annotations

from functools import partial

import streamlit as st
from blocks.basics.links import link_row, to_incident, to_precision, to_replay, to_scale
from blocks.basics.newer import newer
from blocks.basics.notes import heading, page_head, paragraph
from blocks.components.keyboard import free_keyboard
from blocks.frame import live
from blocks.replay.op_card import DIFFERENCES, op_card, operand_table
from blocks.replay.op_lines import modules, neighbours, ops_around
from blocks.replay.track import replay_track
from blocks.replay.transport import BEAT, Jump, jumps, transport
from blocks.verdict.items import items
from data import loader, recordings
from state.address import tell, told, write_address
from state.choice import choose, choose_traced, traced_words
from state.cursor import Cursor, cursor

from ampscope.analysis.numerics.arrays import IntArray
from ampscope.analysis.replay.op_detail import OpDetail, op_detail
from ampscope.analysis.replay.seek import Kind, find, marked
from ampscope.analysis.results import Incident
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.report.figures.magnitudes import magnitudes
from ampscope.report.html.figures.magnitudes import magnitudes_html
from ampscope.trace.vocabulary import Severity

_ALONE = "none"
#: Steps before and after the one on screen that are offered for comparison.
_OFFERED = 60
#: The key of the search box.
FIND = "replay-find"


def incident_at(step: int) -> tuple[str, Incident] | None:
    """The incident that a step belongs to, by its name; the worst first."""
    for name, item in items(run.diagnosis()).items():
        if isinstance(item, Incident) and item.step <= step <= item.last_step:
            return name, item
    return None


def start() -> int:
    """Where to begin: at the origin of the incident, in a repeat of it where something not finite begins, else at 0."""
    if incident is None or incident[1].severity == Severity.INFO:
        return 0
    path = incident[1].path
    if path and incident[1].step == chosen.step:
        return seen.position(path[0].seq)
    return next(iter(marked(seen, Kind.NONFINITE).tolist()), 0)


def worst_step() -> int | None:
    """The step to begin with: that of what the verdict is about."""
    primary = run.diagnosis().primary
    return primary.step if primary else None


def choose_other(chosen: TracedStep) -> TracedStep | None:
    """Another traced step to go through in lockstep."""
    at = traced.index(chosen)
    asked = told("against")
    near = range(max(at - _OFFERED, 0), at + _OFFERED)
    keyed = {f"{one.step}-{one.source}": (place, one) for place, one in enumerate(traced) if one != chosen}
    named = {name: one for name, (place, one) in keyed.items() if place in near or name == asked}
    if not named:
        return None
    words = {_ALONE: "Nothing", **{name: traced_words(one) for name, one in named.items()}}
    picked = named.get(choose("against", "Compare with", list(words), words.__getitem__))
    if picked is None:
        tell(against=None)
    return picked


def debugger(place: Cursor, other: TracedStep | None) -> None:
    """All that moves: drawn again at every beat, and nothing else of the page."""
    if place.playing:
        place.beat(seen)
        if not place.playing:
            st.rerun()
    place.tell(seen)
    lock = recordings.compare(run, chosen, other) if other else None
    words = st.session_state.get(FIND) or ""
    found = find(seen, words)
    wanted = jumps(seen)
    if words:
        wanted.append(Jump("F", "found", found))
    if lock is not None:
        wanted.append(Jump("D", "difference", lock.notable))
    transport(seen, place, wanted)
    detail = op_detail(seen, place.at)
    replay_track(run, chosen, other, place, detail.twins)
    left, right = st.columns([4, 5], gap="medium")
    with left:
        show_lists(place, found)
    with right:
        op_card(detail)
        show_ways(detail)
        operand_table(detail.reads, detail.writes)
        if other is not None:
            show_counterpart(place, other)
        show_dataflow(detail, place)
    if not place.playing:
        show_histograms(place)
        write_address()


def show_lists(place: Cursor, found: IntArray) -> None:
    """Ops around the cursor, all or those that the search finds, and the tree of modules."""
    st.text_input("Find", key=FIND, placeholder="Find ops: softmax, blocks.3, float32", label_visibility="collapsed")
    if len(found):
        ops_around(seen, found, place.at, place.move)
    else:
        paragraph("No op of this step has all of these words in its name, module, type, file or line.")
    st.caption("Bars: the magnitudes of the result, within what its dtype holds")
    st.caption("Modules, open around the op, with what they gave so far")
    modules(seen, place.at, place.move)


def show_dataflow(detail: OpDetail, place: Cursor) -> None:
    """What it read from, who reads it, its other half; each leads there."""
    if detail.producers:
        st.caption("It read what these wrote")
        neighbours("replay-producers", "Ops that it read from", detail.producers, place.move)
    if detail.readers:
        more = detail.reader_count - len(detail.readers)
        st.caption("Read by" + (f" (and {more:,} more)" if more else ""))
        neighbours("replay-readers", "Ops that read it", detail.readers, place.move)
    if detail.twins:
        backward = seen.backward[detail.line.position]
        st.caption("In forward this was" if backward else "In backward this becomes")
        neighbours("replay-twins", "Its other half", detail.twins, place.move)


def show_counterpart(place: Cursor, other: TracedStep) -> None:
    """The same op in the other step."""
    lock = recordings.compare(run, chosen, other)
    partner = int(lock.partner[place.at])
    heading(traced_words(other))
    paragraph(DIFFERENCES[lock.of(place.at)])
    if partner >= 0:
        theirs = op_detail(recordings.load(run, other), partner)
        operand_table(theirs.reads, theirs.writes)


def show_histograms(place: Cursor) -> None:
    """Where the values of the result lie; not while playing, because it takes a moment to draw."""
    if picture := magnitudes_html(magnitudes(recordings.histograms(run, chosen, place.at))):
        heading("Magnitudes of what it wrote, against what each dtype can hold")
        st.html(picture)


def show_ways(detail: OpDetail) -> None:
    """The ways to other pages."""
    with link_row():
        if incident is not None:
            to_incident(incident[0], "Incident")
        to_scale(chosen.step, "Loss scale at this step")
        if detail.line.module:
            to_precision(detail.line.module, chosen.step, chosen.source, "Precision of this module")


def show_comparison(other: TracedStep) -> None:
    """Where the two part, in a sentence."""
    lock = recordings.compare(run, chosen, other)
    words = f"Against {traced_words(other).lower()}: "
    if lock.first is None:
        paragraph(words + "every value that both have is the same.")
        return
    place = seen.site_of(lock.first)
    where = f" in {place.module}" if place.module else ""
    sentence = f"{words}the first op whose values differ is number {int(seen.seq[lock.first]):,}, {place.op}{where}."
    if len(lock.notable) and int(lock.notable[0]) != lock.first:
        sentence += f" From number {int(seen.seq[lock.notable[0]]):,} on they differ by more than digits."
    paragraph(sentence)


run = loader.current()
page_head("Replay", run.diagnosis().run.name)
traced = recordings.traced(run)
if not traced:
    paragraph("No step of this run was traced op by op. Trace one in every so many steps:")
    st.code("ampscope.watch(model, scaler, every=500)", language="python")
    st.stop()
first, second = st.columns(2)
with first:
    chosen = choose_traced(traced, first=worst_step())
with second:
    other = choose_other(chosen)
live.part(partial(newer, shown=traced[0].step, link=lambda step, words: to_replay(step, label=words)))
seen = recordings.load(run, chosen)
if not len(seen):
    paragraph("The disk budget of this run has dropped the ops of this step.")
    st.stop()
incident = incident_at(chosen.step)
place = cursor(run.path, seen, start())
if other is not None:
    show_comparison(other)
free_keyboard()
st.fragment(debugger, run_every=BEAT if place.playing else None)(place, other)
