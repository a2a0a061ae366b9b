"""Advice to go back to a checkpoint names the file, where the run was seen to save any."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.results import Finding, Incident, Remedy, SavedFile, SavedFiles
from ampscope.analysis.words import counted
from ampscope.trace.vocabulary import HELD_OPTIMIZER, HELD_WEIGHTS, Severity

Item = TypeVar("Item", Incident, Finding)
_HELD = {HELD_WEIGHTS: "weights", HELD_OPTIMIZER: "optimizer state"}


def with_files(item: Item, saved: SavedFiles, *, is_primary: bool) -> Item:
    """An entry whose advice to go back to a checkpoint names the file; what is told first has that advice.

    Args:
        item: The incident or finding.
        saved: Which of the files are whole.
        is_primary: It is what a run is told first, and the state was ruined by it as far as is known.
    """
    told = in_words(saved)
    named: list[Remedy] = [_with(each, told) for each in item.remedies]
    if named == list(item.remedies) and is_primary and item.severity is Severity.ERROR:
        back = f"Go back to {cause_entry.CHECKPOINT}: later steps do not mend what is not finite in the state. {told}"
        helped: list[Remedy] = [each for each in named if each.verified is not False]
        named = [*helped, cause_entry.advice(cause_entry.BEFORE, back), *named[len(helped) :]]
    return replace(item, remedies=tuple(named))


def _with(remedy: Remedy, told: str) -> Remedy:
    return replace(remedy, text=f"{remedy.text} {told}") if cause_entry.CHECKPOINT in remedy.text else remedy


def in_words(saved: SavedFiles) -> str:
    """Names the last file that is whole, and counts those that are not."""
    return f"{_last(saved)} {_others(saved)}"


def _last(saved: SavedFiles) -> str:
    last = saved.last_whole
    if last is None:
        return "No file is known to have been saved while everything was whole."
    if saved.written_again is None:
        return f"The last file saved while everything was whole is {last.path}, {_when(last)}."
    return (
        f"The last save while everything was whole was to {last.path}, {_when(last)}; it was written again after step "
        f"{saved.written_again:,}, and what it held before is lost unless it was moved or copied."
    )


def _when(file: SavedFile) -> str:
    when = f"after step {file.step:,}" if file.step >= 0 else "before the first step"
    held = (f"part of the {_HELD[each]}" if each in file.parts else _HELD[each] for each in file.holds)
    return f"{when} ({' and '.join(held)})"


def _others(saved: SavedFiles) -> str:
    spoilt = saved.spoilt
    text = f"{counted(spoilt, 'file')} saved later {'holds' if spoilt == 1 else 'hold'} values that are not finite."
    if not saved.unknown:
        return text if spoilt else "None was saved later."
    first, last = saved.unknown_from or 0, saved.unknown_to or 0
    span = f"after step {first:,}" if first == last else f"after steps {first:,} to {last:,}"
    are = "is" if saved.unknown == 1 else "are"
    may = f"Whether {counted(saved.unknown, 'file')} saved {span} {are} whole is not known."
    return f"{text} {may}" if spoilt else may
