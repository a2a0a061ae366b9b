"""A traced step against another: where the two part, and the same op in both."""

from __future__ import annotations

from ampscope.analysis.replay.op_detail import op_detail
from ampscope.analysis.replay.timeline import Difference
from ampscope.analysis.tables.traced_steps import TracedStep
from blocks.basics.text import heading, paragraph
from blocks.choices.traced_step_box import step_words
from blocks.debugger.op_card import operand_table
from data.run_snapshot import RunSnapshot
from data.step_results import lockstep_of, recording_of

_DIFFERENCES = {
    Difference.NONE: "Both gave the same, to the last digit of the bounds.",
    Difference.DIGITS: "Both gave values of about the same size.",
    Difference.SIZE: "Their largest magnitudes are a factor of 2 or more apart.",
    Difference.KIND: "Both gave values that are not finite, and not the same ones.",
    Difference.FINITE: "One gave finite values, the other did not.",
    Difference.ALONE: "The other step has no such op.",
}


def first_difference(run: RunSnapshot, step: TracedStep, other: TracedStep) -> None:
    """Says in a sentence at which op the two steps part."""
    recording, lockstep = recording_of(run, step), lockstep_of(run, step, other)
    words = f"Against {step_words(other).lower()}: "
    if lockstep.first is None:
        paragraph(words + "every value that both have is the same.")
        return
    site = recording.site_of(lockstep.first)
    where = f" in {site.module}" if site.module else ""
    number = int(recording.seq[lockstep.first])
    sentence = f"{words}the first op whose values differ is number {number:,}, {site.op}{where}."
    if len(lockstep.notable) and int(lockstep.notable[0]) != lockstep.first:
        notable = int(recording.seq[lockstep.notable[0]])
        sentence += f" From number {notable:,} on they differ by more than digits."
    paragraph(sentence)


def counterpart(run: RunSnapshot, step: TracedStep, other: TracedStep, position: int) -> None:
    """The op at ``position`` as it was in the other step."""
    lockstep = lockstep_of(run, step, other)
    partner = int(lockstep.partner[position])
    heading(step_words(other))
    paragraph(_DIFFERENCES[lockstep.of(position)])
    if partner >= 0:
        theirs = op_detail(recording_of(run, other), partner)
        operand_table(theirs.reads, theirs.writes, "The same in the other step")
