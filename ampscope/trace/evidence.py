"""Evidence has one type for incidents and one for findings: capture writes it as JSON, analysis reads it back.

A trace is someone else's: a part of the text that is damaged, or of another type than is said here, reads as if it had
not been written.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from ampscope.trace.schema import FindingRow, IncidentRow, Phase
from ampscope.trace.schema.tables import details

_NOTHING = object()
_MOST_DIGITS = 18  # of the number of an op: all that an int64 may have
_COLUMN: Mapping[str, bool] = {"column": True}  # marks a field that is a column of its own, not part of the JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLine:
    """A line of the user's program."""

    file: str = ""
    line: int = 0
    function: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLine(ProgramLine):
    """A line that calls a watched model."""

    autocast: str = ""  #: dtype of the autocast region around it; empty outside of one
    tensors: int = 0  #: how many tensors the call returned, one or a tuple; 0 for anything else


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedError(ProgramLine):
    """A call that raised, with the user's line that made it."""

    error: str = "an error"  #: name of the exception's class
    message: str = ""  #: its first line
    op: str = ""  #: the ATen overload; empty where the line does not show a call of torch
    module: str = ""  #: qualified name of the innermost watched module
    module_type: str = ""
    dtype: str = ""  #: of the tensor that the call was made on
    value: float | None = None  #: the number that does not fit the dtype
    does_not_fit: bool = False  #: torch refused a number for that reason
    phase: str = Phase.FORWARD
    parameters: int = 0  #: of the optimizer that a scaler was to step, where none of them has a gradient
    frozen: int = 0  #: of these, how many require none
    foreign: int = 0  #: and how many are no watched model's


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Gradients that were reduced across ranks, as this rank alone would have sent them."""

    by: str = ""  #: what reduced them; empty where it is not known
    ranks: int = 0
    hook: str = ""  #: communication hook; empty without one
    dtype: str = ""  #: in which they were sent
    largest: float = 0.0  #: greatest magnitude among them in the replay
    overflows: bool = False  #: one of them does not fit the dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class BadTensor:
    """A weight, a buffer or optimizer state that was found not finite between two steps."""

    kind: str = ""  #: a `StateKind`
    name: str = ""
    owner: str = ""  #: the parameter that optimizer state belongs to
    module: str = ""
    dtype: str = ""
    nan: int = 0
    inf: int = 0
    numel: int = 0
    finite_at: int | None = None  #: the last step after which it was seen finite
    bad_at: int = 0  #: the step after which it was found so
    when: str = ""  #: a `Looked`
    source: ProgramLine | None = None  #: the line that read it: where the optimizer stepped by a number


@dataclass(frozen=True, slots=True, kw_only=True)
class LostUpdates:
    """A tensor in half precision whose updates are rounded away; all sizes are means over its elements."""

    kind: str = ""  #: a `StateKind`; empty for a buffer, or an average of the loop's own
    name: str = ""
    owner: str = ""  #: the parameter that optimizer state belongs to
    module: str = ""
    dtype: str = ""
    numel: int = 0
    since: int = 0  #: the first step of those looked at
    last: int = 0  #: the last of them
    looks: int = 0
    share: float = 0.0  #: of the elements, those that have not moved
    value: float = 0.0
    update: float = 0.0
    spacing: float = 0.0  #: from a number of its dtype to the next, at its values
    off_by: float = 0.0  #: how far it is from where float32 would have it


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierCast:
    """A cast that the loop made before its step, and that the step read."""

    since: int = 0  #: the first step that read such values
    read: str = ""  #: the dtype that was cast; empty for a grid that was made in half precision
    dtype: str = ""
    source: ProgramLine = ProgramLine()


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierCall(ProgramLine):
    """A call that the loop made before its step, and that an operand of the step was made by."""

    name: str = ""  #: of the torch function
    dtype: str = ""  #: of what it returned


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBefore:
    """Names the calls that make an operand before the step, as seen where the loop was listened to."""

    step: int = 0  #: before which they were seen
    calls: tuple[EarlierCall, ...] = ()  #: in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Holds what was seen at a step that went wrong; ops are numbered as in the trace of that step."""

    bad_params: tuple[str, ...] = field(default=(), metadata=_COLUMN)  #: whose gradient, or new value, was not finite
    over_budget: bool = field(default=False, metadata=_COLUMN)  #: not replayed: replays had used up their time
    # of a replay
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)  #: of each input that is not finite, its bad rows
    reduction: Reduction | None = None
    compiled: bool = False  #: the model ran as compiled code
    called_from: tuple[CallLine, ...] = ()
    made_before: dict[str, MadeBefore] = field(default_factory=dict)  #: by input, if nobody heard it made
    # of what outlives a step
    finite_at: dict[str, int] = field(default_factory=dict)  #: of each bad buffer, the last step that left it finite
    state: tuple[BadTensor, ...] = ()
    still: tuple[LostUpdates, ...] = ()  #: buffers, or averages of the loop's own
    held: tuple[LostUpdates, ...] = ()  #: weights and optimizer state
    count: int = 0  #: how many are held; ``held`` has the first of them
    # of what the loop writes between two steps
    source: ProgramLine | None = None  #: the line that writes it
    carried: tuple[str, ...] = ()  #: what it is called
    in_float32: str = ""  #: what the same calls came to in float32, a `Trial`
    read: bool = False  #: a step has read it
    remains: bool = False  #: it was not finite still when the run ended, and is kept of the model's own
    # of errors, and of losses that nothing shows
    exception: RaisedError | None = None
    ops: tuple[int, ...] = ()  #: overflows that vanished again
    hidden: tuple[tuple[int, int], ...] = ()  #: overflows that made finite numbers: each with the op that hid it
    gradients_apart: float | None = None  #: from those in float32, as a share of their size
    loss_apart: float | None = None
    lost: dict[str, float] = field(default_factory=dict)  #: by parameter, the share of its gradient that is missing
    distinct: dict[int, tuple[int, int]] = field(default_factory=dict)  #: by cast: values before it, and after it
    changed: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  #: by cast: numbers that are others after it, of all
    cast_before: dict[int, EarlierCast] = field(default_factory=dict)  #: by the op that read what it gave

    def as_json(self) -> str:
        """Writes all that is not a column and not as it is by default."""
        return json.dumps(_written(self))

    @staticmethod
    def of(row: IncidentRow) -> Evidence:
        """Reads the evidence of an incident's row, its columns included."""
        return replace(_of_text(row.evidence), bad_params=tuple(row.bad_params), over_budget=row.over_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingEvidence:
    """Holds what was seen of a mistake in the loop."""

    framework: str = ""  #: the one that unscales and steps for the user, where one does
    parameters: tuple[str, ...] = ()  #: the first of those concerned
    count: int = 0  #: of all of them
    attempts: int = 0  #: steps in which it was so
    learns: bool = False  #: the learning rate is not zero
    ranks: int = 0  #: of the process group
    device: str = ""  #: type of device that an autocast region is for
    tensors: str = ""  #: types of device that the model is on
    scaler_is_off: bool = False
    half: int = 0  #: parameters in half precision that a scaler unscales,
    of: int = 0  #: of so many,
    cast: bool = False  #: which the scaler took before, so that they were cast since
    dtype: str = ""  #: half precision in which trained parameters were for a while
    kept_by: str = ""  #: file and line that made of scaled gradients what an earlier iteration has kept
    was: float | None = None  #: the scale of the scaler before
    starts: float | None = None  #: that of the one which took its place
    optimizer_steps: int | None = None  #: that an optimizer had made before a scaler without a past served it

    def as_json(self) -> str:
        """Writes all that is not as it is by default."""
        return json.dumps(_written(self))

    @staticmethod
    def of_row(row: FindingRow) -> FindingEvidence:
        """Reads the evidence of a finding's row."""
        return read(FindingEvidence, details(row.evidence))


#: Nothing was seen of a mistake but that it was made.
NO_EVIDENCE = FindingEvidence()


T = TypeVar("T")
_Reader = Callable[[object], object]


@lru_cache(maxsize=256)
def _of_text(text: str) -> Evidence:
    return read(Evidence, details(text))


def read(form: type[T], found: object) -> T:
    """Makes a dataclass of a mapping; a field of which it says nothing, or nothing that fits, keeps its default."""
    known = found if isinstance(found, dict) else {}
    values = {name: reader(known[name]) for name, reader in _readers(form).items() if name in known}
    return form(**{name: value for name, value in values.items() if value is not _NOTHING})


_known: dict[type, dict[str, _Reader]] = {}


def _readers(form: Any) -> dict[str, _Reader]:
    """Returns what reads each field of a dataclass, worked out once."""
    if form not in _known:
        kinds = typing.get_type_hints(form)
        written = [each.name for each in fields(form) if not each.metadata.get("column")]
        _known[form] = {name: _reader(kinds[name]) for name in written}
    return _known[form]


def _reader(kind: type[T]) -> _Reader:
    """Returns what makes a value of a type of one that was read from JSON, or `_NOTHING`."""
    if is_dataclass(kind):
        return lambda value: read(kind, value) if isinstance(value, dict) else _NOTHING
    base, inner = typing.get_origin(kind), [_reader(each) for each in typing.get_args(kind) if each is not Ellipsis]
    if base is tuple and len(inner) > 1:
        return lambda value: _each(inner, value) if isinstance(value, list) else _NOTHING
    if base is tuple:
        return lambda value: _fitting(map(inner[0], value)) if isinstance(value, list) else _NOTHING
    if base is dict:
        return lambda value: _pairs(inner[0], inner[1], value) if isinstance(value, dict) else _NOTHING
    if base is types.UnionType:
        return lambda value: next((made for each in inner if (made := each(value)) is not _NOTHING), _NOTHING)
    return _PLAIN[kind]


def _each(readers: Sequence[_Reader], values: Sequence[object]) -> object:
    made = [reader(value) for reader, value in zip(readers, values, strict=False)]
    return tuple(made) if len(made) == len(readers) and _NOTHING not in made else _NOTHING


def _fitting(values: Iterable[object]) -> tuple[object, ...]:
    return tuple(value for value in values if value is not _NOTHING)


def _pairs(key: _Reader, value: _Reader, found: Mapping[str, object]) -> dict[object, object]:
    pairs = [(key(name), value(each)) for name, each in found.items()]
    return {name: each for name, each in pairs if name is not _NOTHING and each is not _NOTHING}


def _whole(value: object) -> object:
    """Returns a whole number, also where it is the key of an object and thus a text."""
    if isinstance(value, str) and value.isdecimal() and len(value) <= _MOST_DIGITS:
        return int(value)
    return value if type(value) is int else _NOTHING


def _number(value: object) -> object:
    """Returns a number as a float; a whole one that no float holds is damage."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return _NOTHING
    return float(value) if isinstance(value, (int, float)) else _NOTHING


_PLAIN: dict[type, _Reader] = {
    str: lambda value: value if isinstance(value, str) else _NOTHING,
    bool: lambda value: value if isinstance(value, bool) else _NOTHING,
    int: _whole,
    float: _number,
    type(None): lambda value: None if value is None else _NOTHING,
}


def _written(made: Any) -> dict[str, object]:
    found = {each.name: (each, getattr(made, each.name)) for each in fields(made) if not each.metadata.get("column")}
    return {name: _plain(value) for name, (each, value) in found.items() if value != _default(each)}


def _default(of: Field[T]) -> object:
    return of.default if of.default_factory is MISSING else of.default_factory()


def _plain(value: object) -> object:
    if is_dataclass(value):
        return _written(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value
