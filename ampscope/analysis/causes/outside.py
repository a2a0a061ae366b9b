"""Causes from outside the step's arithmetic: what came in non-finite, and what does not repeat in a replay."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.causes.cause_entry import CauseEntry, Match, Occurrence, OpRule, Reason, Turn
from ampscope.analysis.origin.op_facts import Executed
from ampscope.analysis.results import Remedy
from ampscope.analysis.words.wording import op_in_words
from ampscope.trace.schema import Node
from ampscope.trace.vocabulary import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class CameIn(Reason):
    """A value that the step was given was not finite."""

    name: str  #: of the input, parameter or buffer
    rows: tuple[int, ...] = ()  #: the indices of an input's first dimension that held it, as far as they are known


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSince(Reason):
    """A value was finite when it was written, and was not when it was read."""

    seen_in: str  #: the op that read it


def _input(op: Executed) -> Match | None:
    return Match(Cause.BAD_INPUT, CameIn(name=op.site.name)) if op.site.op == Node.INPUT else None


def _weight(op: Executed) -> Match | None:
    return Match(Cause.BAD_WEIGHT, CameIn(name=op.site.name)) if op.site.op == Node.PARAMETER else None


def _buffer(op: Executed) -> Match | None:
    return Match(Cause.BAD_BUFFER, CameIn(name=op.site.name)) if op.site.op == Node.BUFFER else None


def _name(occurrence: Occurrence, otherwise: str) -> str:
    return occurrence.reason.name if isinstance(occurrence.reason, CameIn) else otherwise


def _bad_input(occurrence: Occurrence) -> str:
    text = f"{_name(occurrence, 'An input')} held non-finite values before the model touched it"
    reason = occurrence.reason
    if isinstance(reason, CameIn) and reason.rows:
        return f"{text}, at index {', '.join(map(str, reason.rows))} of its first dimension."
    return f"{text}."


def _bad_weight(occurrence: Occurrence) -> str:
    return f"The parameter {_name(occurrence, '')} held non-finite values before the step."


def _bad_buffer(occurrence: Occurrence) -> str:
    return f"The buffer {_name(occurrence, '')} held non-finite values before the step."


def _does_not_repeat(occurrence: Occurrence) -> str:
    if isinstance(occurrence.reason, ChangedSince):
        wrote, read = occurrence.op_in_words, op_in_words(occurrence.reason.seen_in)
        return (
            f"What {wrote} wrote was finite, yet {read} read a non-finite value there: something outside torch changed "
            "it."
        )
    return "The same calls on the same values came out finite when they were run again."


def _eager_is_finite(_: Occurrence) -> str:
    return (
        "torch.compile is in use, and the same calls on the same values came out finite when they were run again as "
        "eager code: the compiled code computes otherwise, or the fault does not repeat."
    )


_CLEAN_STATE = (
    Remedy(
        text="Load a checkpoint from before it went bad, and keep non-finite values out of it.",
        code="if value.isfinite().all():\n    self.buffer.copy_(value)",
    ),
)

ENTRIES = (
    CauseEntry(
        cause=Cause.BAD_INPUT,
        noun="a batch that was already bad",
        sentence=_bad_input,
        remedies=(
            Remedy(
                text="Find and clean the samples before they reach the model.",
                code="assert x.isfinite().all(), 'non-finite batch'",
            ),
        ),
        rules=(OpRule(Turn.ENTRY, _input),),
    ),
    CauseEntry(
        cause=Cause.BAD_WEIGHT,
        noun="a weight that was already bad",
        sentence=_bad_weight,
        remedies=_CLEAN_STATE,
        rules=(OpRule(Turn.ENTRY, _weight),),
    ),
    CauseEntry(
        cause=Cause.BAD_BUFFER,
        noun="a buffer that was already bad",
        sentence=_bad_buffer,
        remedies=_CLEAN_STATE,
        rules=(OpRule(Turn.ENTRY, _buffer),),
    ),
    CauseEntry(
        cause=Cause.HARDWARE_TRANSIENT,
        noun="a fault that does not repeat",
        sentence=_does_not_repeat,
        remedies=(
            Remedy(
                text="The same calls on the same values are finite when run again: suspect the device, its memory "
                "or driver, or code that writes into tensors behind torch's back."
            ),
        ),
        recognised_in="analysis.causes.recognition",
        cured_by_precision=False,
    ),
    CauseEntry(
        cause=Cause.COMPILED_ONLY,
        noun="compiled code that computes otherwise than eager code",
        sentence=_eager_is_finite,
        remedies=(
            Remedy(
                text="Train some steps without compiled code, on the same batches: if they stay finite, the compiler's "
                "output is to blame.",
                code='torch.compiler.set_stance("force_eager")',
            ),
            Remedy(
                text="Have inductor round to half precision where eager code does.",
                code="torch._inductor.config.emulate_precision_casts = True",
            ),
        ),
        recognised_in="analysis.diagnosis.context",
        cured_by_precision=False,
    ),
)
