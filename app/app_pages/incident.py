"""Incident: where was the bad value born, why, and what cures it?"""

from __future__ import annotations

from collections.abc import Sequence

import loader
import streamlit as st
from blocks.items import item_line, items
from blocks.notes import heading, page_head, paragraph
from blocks.path import path_chain
from blocks.plot import plot
from blocks.remedies import remedies
from blocks.table import table
from blocks.verdict import item_card
from charts.exponents import exponents_figure
from choice import choose
from markup import short
from phrases import part, span, trouble

from ampscope.analysis.results import Finding, Incident, Operand
from ampscope.analysis.wording import replay_in_words, trigger_in_words

#: Parameters named before the rest is only counted.
_NAMED = 12


def show_origin(incident: Incident) -> None:
    """The path beside how it was found."""
    if not incident.path:
        show_evidence(incident)
        return
    left, right = st.columns([3, 2], gap="large")
    with left:
        heading("From the origin to what it reached")
        path_chain(incident.path)
    with right:
        show_evidence(incident)


def show_cure(item: Incident | Finding) -> None:
    """What to change."""
    if item.remedies:
        heading("What to change")
        remedies(item)


def show_evidence(incident: Incident) -> None:
    """How it was found, what fp32 says, and which parameters it reached."""
    heading("How it was found")
    noticed = trigger_in_words(incident.trigger)
    if noticed:
        paragraph(f"Noticed because {noticed}.")
    if told := replay_in_words(incident):
        paragraph(told)
    if incident.fp32_ok is not None:
        paragraph(FP32[incident.fp32_ok])
    if incident.tripped:
        show_tripped(incident.tripped)


FP32 = {
    True: "In float32 the same step stays finite: the range of the dtype is to blame.",
    False: "In float32 the same step fails too: precision is not to blame.",
}


def show_tripped(names: Sequence[str]) -> None:
    """The parameters whose gradients were not finite."""
    heading("Gradients that were not finite")
    st.code("\n".join(short(name, 120) for name in names[:_NAMED]), language=None, wrap_lines=True)
    if len(names) > _NAMED:
        st.caption(f"and {len(names) - _NAMED:,} more parameters")


def show_operands(operands: Sequence[Operand]) -> None:
    """What the op read and wrote, in words and as magnitudes."""
    heading("What the op read and wrote")
    columns = ("Tensor", "Type", "Shape", "Values", "Not finite", "Exactly zero", "Subnormal")
    table(columns, [operand_row(operand) for operand in operands])
    figure = exponents_figure(operands)
    if figure is not None:
        heading("Their magnitudes against what each dtype can hold")
        plot(figure, key="exponents")


def operand_row(operand: Operand) -> tuple[str, ...]:
    """One tensor in words."""
    return (
        short(operand.role, 60),
        operand.dtype,
        operand.shape or "scalar",
        span(operand.min, operand.max),
        trouble(operand) or "none",
        part(operand.zeros, operand.numel),
        part(operand.subnormals, operand.numel),
    )


run = loader.current()
diagnosis = run.diagnosis()
named = items(diagnosis)
page_head("Incident", diagnosis.run.name)
if not named:
    paragraph("Nothing went wrong in this run, and no mistake in its loop was found.")
    st.stop()
item = named[choose("incident", "What to look at", list(named), lambda name: item_line(named[name]))]
item_card(item)
show_cure(item)
if isinstance(item, Incident):
    show_origin(item)
    if item.inputs or item.outputs:
        show_operands((*item.inputs, *item.outputs))
