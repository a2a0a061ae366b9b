"""What a second run of a step that came out finite says of the first: where they part."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.origin.step_graph import StepGraph, public_phase
from ampscope.analysis.words.wording import op_in_words
from ampscope.provenance import How, parting
from ampscope.trace.schema import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondRun:
    """How two runs of one step differ, up to the op at which the first went wrong."""

    how: How | None  #: None where all that was traced is the same
    seq: int  #: the first op of which they do not say the same
    phase: str  #: its `Phase`
    missing: str  #: what is missing for a proof that nothing but chance lies between them, in words


def second_run(real: StepGraph, again: StepGraph, until: int) -> SecondRun | None:
    """Compares the trace of a step as it ran with that of its replay.

    Args:
        real: The best trace of the step.
        again: That of its faithful replay.
        until: The op at which the step went wrong.

    Returns:
        How they part; None where the step was not traced as it ran.
    """
    if not real.source.startswith(Source.LIVE):
        return None
    found = parting(real, again, until)
    if found is None:
        same = "all that was traced of it was the same both times, so that nobody saw what wrote what is not finite"
        return SecondRun(how=None, seq=until, phase=real.site(until).phase, missing=same)
    op = op_in_words(real.site(found.seq).op)
    missing = {
        How.DIGITS: f"{op} does not give the same digits of the same operands",
        How.UNMEASURED: f"{op} could not be compared, for its values were not measured",
    }
    phase = public_phase(real.site(found.seq).phase)
    return SecondRun(how=found.how, seq=found.seq, phase=phase, missing=missing.get(found.how, ""))
