"""Which entries of a tape a step is made of: what it calls, and whatever that depends on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampscope.capture.replay.tape.entry import Entry, EntryKind


def needed(entries: Sequence[Entry], start: int, since: int, also: Iterable[int] = ()) -> list[int]:
    """Numbers of the entries that make the step which begins at ``since``.

    These are its backward passes, its differentiable module calls (they may change buffers), and whatever those
    depend on, before ``since`` too.

    Args:
        entries: The entries of the tape.
        start: Number of the first of them.
        since: Number of the first entry of the step.
        also: Further entries that are asked for.
    """
    writers: dict[int, list[int]] = {}  # entry -> the in-place entries that change its results later
    front = list(also)
    for number, entry in enumerate(entries, start):
        if number >= since and (entry.kind is EntryKind.BACKWARD or entry.is_training_call) and number not in front:
            front.append(number)
        for result in entry.also_writes:
            writers.setdefault(result.entry, []).append(number)
    wanted = set(front)
    while front:
        number = front.pop()
        read = [result.entry for result in entries[number - start].earlier]
        for other in (*read, *writers.get(number, ())):
            if other not in wanted and other >= start:
                wanted.add(other)
                front.append(other)
    return sorted(wanted)


def written_after_backward(entries: Sequence[Entry], start: int, since: int) -> tuple[int, ...]:
    """Numbers of the entries that write in place after the last backward of a step.

    Args:
        entries: The entries of the tape.
        start: Number of the first of them.
        since: Number of the first entry of the step.
    """
    numbered = list(enumerate(entries, start))
    backwards = [number for number, entry in numbered if number >= since and entry.kind is EntryKind.BACKWARD]
    return tuple(number for number, entry in numbered if entry.in_place and backwards and number > backwards[-1])
