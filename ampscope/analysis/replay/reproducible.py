"""The kept operands by which an incident can be shown: the op's call, as its replay made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.analysis.results import Diagnosis, Incident
from ampscope.analysis.words import when_in_words
from ampscope.errors import NothingToReproduce
from ampscope.trace.files.saved_operands import SavedOperands, operand_files, read_operands
from ampscope.trace.read.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproducible:
    """An incident whose op can be called again."""

    number: int  #: position among the diagnosis's incidents, from 1
    incident: Incident
    saved: SavedOperands


def reproducible(run: Run, diagnosis: Diagnosis, number: int | None = None) -> Reproducible:
    """An incident of ``diagnosis`` and the operands of its op.

    Args:
        run: The run.
        diagnosis: Its diagnosis.
        number: Position among the diagnosis's incidents, from 1. Default: the primary one, or else the first whose
            operands were kept.

    Raises:
        NothingToReproduce: There is no such incident, or the operands of its op were not kept; the message says why.
        RunDamaged: A file of operands cannot be read.
    """
    incidents = diagnosis.incidents
    if not incidents:
        raise NothingToReproduce(f"no step of {run.path} went wrong, so there is nothing to reproduce")
    if number is not None and not 1 <= number <= len(incidents):
        raise NothingToReproduce(f"there is no incident {number}: the run has {_listed(incidents)}")
    wanted = [number] if number is not None else _in_order(diagnosis)
    for each in wanted:
        found = _kept_of(run, incidents[each - 1])
        if found is not None:
            return Reproducible(number=each, incident=incidents[each - 1], saved=found)
    raise NothingToReproduce(_why_not(run, incidents[wanted[0] - 1]))


def _kept_of(run: Run, incident: Incident) -> SavedOperands | None:
    """Returns the kept operands of an incident's call, from its own rank or from one that failed as it did."""
    by_rank = (_saved_on(run, rank) for rank in (incident.rank, *incident.also_on))
    return next((found for saved in by_rank if (found := operands_of(incident, saved)) is not None), None)


def _saved_on(run: Run, rank: int) -> list[SavedOperands]:
    return [read_operands(path) for path in operand_files(run.path, rank)]


def operands_of(incident: Incident, saved: Sequence[SavedOperands]) -> SavedOperands | None:
    """The call among those kept on one rank nearest to where the incident begins; None where none belongs to it."""
    order = [node.seq for node in incident.path]
    on_path = [each for each in saved if each.call.step == incident.step and each.call.seq in order]
    if on_path:
        return min(on_path, key=lambda each: order.index(each.call.seq))
    return next((each for each in saved if _is_same_failure(incident, each)), None)


def _is_same_failure(incident: Incident, saved: SavedOperands) -> bool:
    """Whether a call is of the incident's op and line, in one of its repeats."""
    call, source = saved.call, incident.source
    place = (source.file, source.line) if source is not None else ("", 0)
    same = (call.op, call.module, call.file, call.line) == (incident.op, incident.module, *place)
    return same and incident.step <= call.step <= incident.last_step


def _in_order(diagnosis: Diagnosis) -> list[int]:
    """The numbers of all incidents, the primary one first."""
    numbered = enumerate(diagnosis.incidents, 1)
    return [number for number, _ in sorted(numbered, key=lambda one: one[1] != diagnosis.primary)]


def _listed(incidents: Sequence[Incident]) -> str:
    shown = "; ".join(f"{n}: step {one.step}, {one.cause}" for n, one in enumerate(incidents[:8], 1))
    return f"{shown}; and {len(incidents) - 8} more" if len(incidents) > 8 else shown


def _why_not(run: Run, incident: Incident) -> str:
    saved = _saved_on(run, incident.rank)
    if not saved and not run.manifest.configuration.get("save_tensors"):
        return (
            f"{run.path} holds no tensor values; record the run again with ampscope.watch(..., save_tensors=True), "
            f"which keeps the operands of the op that fails"
        )
    why = f"its replay was {incident.replay}" if incident.replay != "exact" else "they were too large, or one of many"
    steps = sorted({each.call.step for each in saved})
    kept = f"kept are those of step {', '.join(map(str, steps))}" if steps else "none were kept there"
    return f"the operands of the incident at {when_in_words(incident)} were not kept ({why}); {kept}"
