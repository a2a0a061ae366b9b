"""A mean of squares less the square of the mean, which cancels and overflows, as the mean of centred squares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor

from ampscope.capture.replay.cures.forms.call_form import Call, CallForm, CallPlace, Compared
from ampscope.capture.replay.cures.forms.failed_call import FailedCall
from ampscope.capture.replay.cures.forms.mathematics.followed import Followed
from ampscope.capture.replay.cures.forms.mathematics.operands import after, before, name, place
from ampscope.capture.torch_support.user_line import Place
from ampscope.trace.schema import Form

#: Ops that fail on a variance that is negative or zero, and those by whose result one fails that overflows.
_READS = frozenset({"sqrt", "rsqrt", "pow", "log", "div", "reciprocal"})
_SQUARES = frozenset({"pow", "mul"})
_PASSES = frozenset({"_to_copy", "clone", "add", "mul", "clamp", "clamp_min", "sqrt"})


class _Is(Enum):
    """The relations of a tensor to the one that it was computed from."""

    SQUARE = auto()
    MEAN = auto()
    MEAN_OF_SQUARE = auto()
    SQUARE_OF_MEAN = auto()


class _Part(NamedTuple):
    kind: _Is
    of: Tensor
    along: tuple[Any, bool] = (None, False)  #: of a mean, the dimensions, and whether they are kept


_AFTER_MEAN = {None: _Is.MEAN, _Is.SQUARE: _Is.MEAN_OF_SQUARE}
_AFTER_SQUARE = {None: _Is.SQUARE, _Is.MEAN: _Is.SQUARE_OF_MEAN}


class Centred(CallForm):
    """``(x - x.mean()).square().mean()`` for ``x.square().mean() - x.mean().square()``.

    Args:
        parts: The lines that calculate the squares and the means.
    """

    form = Form.CENTRED

    def __init__(self, parts: frozenset[CallPlace]) -> None:
        super().__init__(frozenset({"sub"}))
        self._parts = parts
        self._known: Followed[_Part] = Followed()

    def release(self) -> None:
        """See `CallForm.release`."""
        self._known.clear()

    def fits(self, call: Call) -> bool:
        """See `CallForm.fits`."""
        return self._variance(call) is not None

    def follows(self, call: Call, place: Callable[[], Place]) -> bool:
        """See `CallForm.follows`."""
        made = call.name == "mean" or _is_square(call)
        return made and (self._known.reads(call) or any(each.is_at(place()) for each in self._parts))

    def saw(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.saw`."""
        given = call.operands[0] if call.operands else None
        if isinstance(given, Tensor):
            known = self._known.of(given)
            kinds = _AFTER_MEAN if call.name == "mean" else _AFTER_SQUARE
            kind = kinds.get(known.kind if known is not None else None)
            along = _along(call) if call.name == "mean" else known.along if known is not None else (None, False)
            if kind is not None and along is not None:
                self._known.note(result, _Part(kind, known.of if known is not None else given, along))
        return ()

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        part = self._variance(call)
        return NotImplemented if part is None else _centred(part.of, part)

    def good(self, before: Tensor) -> Tensor:
        """See `CallForm.good`: a variance below zero was not."""
        return before.isfinite() & (before >= 0)

    def compared(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.compared`: what the code means is known better than it was computed.

        Where numbers are rounded by one unit of eps, their variance moves by as many as they are larger than their
        deviation.
        """
        part = self._variance(call)
        if part is None:
            return ()
        exact = _centred(part.of.double(), part)
        larger = (_mean(part.of.double().square(), *part.along) / exact).sqrt()
        return (Compared(call(), result, exact, condition=larger.nan_to_num(nan=1.0, posinf=1.0).clamp_min(1.0)),)

    def _variance(self, call: Call) -> _Part | None:
        """Returns the tensor of which a difference is the variance, and along what; None where none is known."""
        if len(call.operands) != 2 or call.kwargs:
            return None
        squares, mean = map(self._known.of, call.operands)
        if squares is None or mean is None or squares.of is not mean.of or squares.along != mean.along:
            return None
        return squares if (squares.kind, mean.kind) == (_Is.MEAN_OF_SQUARE, _Is.SQUARE_OF_MEAN) else None


def _is_square(call: Call) -> bool:
    """Whether a call squares one tensor."""
    if call.name == "square":
        return True
    one, other = (*call.operands[:2], None, None)[:2]
    return (call.name == "pow" and not isinstance(other, Tensor) and other == 2) or (
        call.name == "mul" and one is other
    )


def _along(call: Call) -> tuple[Any, bool] | None:
    """The dimensions of a mean, and whether they are kept; None where it is given more than that."""
    named = dict(zip(("dim", "keepdim"), call.args[1:], strict=False)) | {
        {"axis": "dim"}.get(each, each): value for each, value in call.kwargs.items()
    }
    dims = named.get("dim")
    known = named.keys() <= {"dim", "keepdim"} and len(call.args) <= 3
    return (tuple(dims) if isinstance(dims, list) else dims, bool(named.get("keepdim", False))) if known else None


def _mean(given: Tensor, dims: Any, keeps: bool) -> Tensor:
    return given.mean() if dims is None else given.mean(dims, keeps)


def _centred(given: Tensor, part: _Part) -> Tensor:
    dims, _ = part.along
    return _mean((given - _mean(given, dims, True)).square(), *part.along)


def of_variance(call: FailedCall) -> Iterator[CallForm]:
    """The variance that a failed op reads, or of which it is the square, by centred squares."""
    near = after(call, call.seq, _PASSES | {"mean"}) if call.name in _SQUARES else iter(())
    behind = before(call, call.seq, _PASSES) if call.name in _READS else iter(())
    for seq in (*near, *behind):
        parts = _parts(call, seq) if name(call, seq) == "sub" else []
        low = call.graph.output(seq).min
        if parts and (call.name in _SQUARES or low is None or not low > 0):
            form = Centred(frozenset(place(call, each) for each in parts))
            form.at = place(call, seq)
            yield form
            return


def _parts(call: FailedCall, difference: int) -> list[int]:
    """The squares and means of which a difference makes the variance; empty where it is something else."""
    first, second = (_reads(call, difference, arg) for arg in (0, 1))
    if first is None or second is None or name(call, first) != "mean" or not _squares(call, second):
        return []
    square, mean = _reads(call, first, 0), _reads(call, second, 0)
    if square is None or mean is None or not _squares(call, square) or name(call, mean) != "mean":
        return []
    return [first, second, square, mean] if _reads(call, square, 0) == _reads(call, mean, 0) else []


def _reads(call: FailedCall, seq: int, arg: int) -> int | None:
    """The op that gave an operand, before a cast."""
    found = next((edge.from_seq for edge in call.graph.inputs[seq] if edge.arg == arg), None)
    return _reads(call, found, 0) if found is not None and name(call, found) == "_to_copy" else found


def _squares(call: FailedCall, seq: int) -> bool:
    if name(call, seq) == "pow":
        return call.graph.scalars(seq).get("exponent") == 2
    return name(call, seq) == "mul" and _reads(call, seq, 0) == _reads(call, seq, 1) is not None
