"""What a loss scaler did, in a few sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampscope.analysis.scale.moves import Direction, Move
from ampscope.analysis.scale.scale_history import ScaleHistory
from ampscope.analysis.scale.skip_runs import CALIBRATION_STEPS
from ampscope.analysis.words.scale_words import in_words, times

#: The halvings that calibration may take: 65536 halves 16 times on its way to 1.
CALIBRATION_CHANGES = 16
#: Halvings in a row after calibration that are a fall rather than a probe.
FALL = 3


def scale_story(history: ScaleHistory) -> tuple[str, ...]:
    """The history as sentences, oldest first; none for a run without a scaler."""
    if history.first is None or history.current is None:
        return ()
    return tuple(_sentences(history, history.first, history.current))


def _sentences(history: ScaleHistory, first: float, current: float) -> Iterator[str]:
    if not history.moves:
        yield f"The scale stayed at {in_words(first)} throughout."
        return
    rest = list(history.moves)
    if _calibrates(rest[0]):
        move = rest.pop(0)
        yield f"It calibrated from {in_words(move.before)} to {in_words(move.after)} in {_steps(move.changes)}."
    else:
        yield f"It started at {in_words(rest[0].before)}."
    for stretch in _stretches(rest):
        yield _tell(stretch)
    yield f"It is now {in_words(current)}."


def _calibrates(move: Move) -> bool:
    early = move.first_step < CALIBRATION_STEPS and move.changes <= CALIBRATION_CHANGES
    return move.direction == Direction.DOWN and early


def _stretches(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Growths and the backoffs that answer them belong together; falls and deliberate changes stand alone."""
    probing: list[Move] = []
    for move in moves:
        if _stands_alone(move):
            if probing:
                yield probing
            yield [move]
            probing = []
        else:
            probing.append(move)
    if probing:
        yield probing


def _stands_alone(move: Move) -> bool:
    return move.direction in (Direction.SET, Direction.LOADED) or (
        move.direction == Direction.DOWN and move.changes >= FALL
    )


def _tell(stretch: list[Move]) -> str:
    first, last = stretch[0], stretch[-1]
    match first.direction:
        case Direction.SET:
            return f"At step {last.last_step:,} it was set to {in_words(last.after)} by hand."
        case Direction.LOADED:
            return f"At step {last.last_step:,} it was set to {in_words(last.after)} from a checkpoint."
        case Direction.DOWN if first.changes >= FALL:
            return _fall(first)
        case _:
            return _probing(stretch)


def _fall(move: Move) -> str:
    span = f"Between steps {move.first_step:,} and {move.last_step:,}"
    return f"{span} it fell from {in_words(move.before)} to {in_words(move.after)} in {_steps(move.changes)}."


def _probing(stretch: list[Move]) -> str:
    grew = sum(move.changes for move in stretch if move.direction == Direction.UP)
    fell = sum(move.changes for move in stretch if move.direction == Direction.DOWN)
    top = max(max(move.before, move.after) for move in stretch)
    low = min(min(move.before, move.after) for move in stretch)
    if not fell:
        return f"Then it grew {times(grew)}, to {in_words(stretch[-1].after)}."
    if not grew:
        return f"At step {stretch[0].first_step:,} it backed off {times(fell)}, to {in_words(stretch[-1].after)}."
    return f"Then it grew {times(grew)} and backed off {times(fell)}, between {in_words(low)} and {in_words(top)}."


def _steps(count: int) -> str:
    return "one skipped step" if count == 1 else f"{count:,} skipped steps"
