"""One call of the user's code in another form, inside the modules that make it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from ampscope.capture.heal.cures.converted_forward import ConvertedForward, convert
from ampscope.capture.heal.cures.in_replays import ModulesConverted, Without
from ampscope.capture.heal.cures.lasting_cure import LastingCure
from ampscope.capture.replay.changes import ReplayChange
from ampscope.capture.replay.cures.forms.call_form import Call, CallForm, CallPlace, OperandBound
from ampscope.capture.replay.cures.forms.mathematics.bounds import DivisorBound
from ampscope.capture.replay.cures.forms.mathematics.empty import KeptRows, ZeroInfinity
from ampscope.capture.replay.cures.forms.mathematics.safe_where import SafeWhere
from ampscope.capture.replay.cures.forms.range.constants import Constant
from ampscope.capture.torch_support.user_line import user_place
from ampscope.trace.schema import CureKind

#: Forms that a call may have in the live model, each by what the trace calls it: they know nothing but this one call.
LIVE: dict[str, type[CallForm]] = {
    "constant": Constant,
    "bound": OperandBound,
    "divisor": DivisorBound,
    "safe_where": SafeWhere,
    "kept_rows": KeptRows,
    "zero_infinity": ZeroInfinity,
}


class OneForm(LastingCure):
    """A call in another form.

    Args:
        form: The form, of a class in `LIVE`.
        at: The line that makes the call.
        modules: The modules whose code that is, by qualified name.
    """

    kind = CureKind.FORM

    def __init__(self, form: CallForm, at: CallPlace, modules: Mapping[str, nn.Module]) -> None:
        self._form = form
        self._at = at
        self._held = dict(modules)
        self.modules = tuple(modules)
        self._forwards: list[ConvertedForward] = []

    @property
    def text(self) -> str:
        """See `LastingCure.text`."""
        return f"{self._what} at {self._at.file}:{self._at.line}"

    @property
    def _what(self) -> str:
        form, value = self._form, self._form.value or 0.0
        if isinstance(form, Constant):
            return f"{value:g} in the place of {form.was or 0.0:g}"
        if isinstance(form, (KeptRows, ZeroInfinity)):
            return "rows without a key zero" if isinstance(form, KeptRows) else "targets without an alignment left out"
        if isinstance(form, SafeWhere):
            return f"the operand of {'/'.join(sorted(form.calls))} 1 where that is {form.unsafe}"
        operand = "the divisor" if isinstance(form, DivisorBound) else f"the operand of {'/'.join(sorted(form.calls))}"
        return f"{operand} kept at {'least' if _is_lowest(form) else 'most'} {value:g}"

    @property
    def code(self) -> str:
        """See `LastingCure.code`."""
        return f"# {self.text} (ampscope fix shows the line)"

    @property
    def detail(self) -> dict[str, Any]:
        """See `LastingCure.detail`."""
        form = self._form
        written = {
            "is": next(name for name, kind in LIVE.items() if type(form) is kind),
            "calls": sorted(form.calls),
            "argument": form.argument,
            "value": form.value,
            "was": form.was,
            "lowest": _is_lowest(form),
            "keeps": isinstance(form, SafeWhere) and form.keeps,
            "file": self._at.file,
            "line": self._at.line,
        }
        return {"form": written, "formed": list(self.modules)}

    def change(self) -> ReplayChange:
        """See `LastingCure.change`."""
        return ModulesConverted(self.modules, self._inside)

    def without(self) -> ReplayChange:
        """See `LastingCure.without`."""
        return Without(self.modules)

    def _inside(self) -> TorchFunctionMode:
        return _InForm(self._form, self._at)

    def apply(self) -> None:
        """See `LastingCure.apply`."""
        if not self._forwards:
            self._forwards = [convert(module, self._inside) for module in self._held.values()]

    def lift(self) -> None:
        """See `LastingCure.lift`."""
        while self._forwards:
            self._forwards.pop().let_go()


def form_of(written: Any) -> tuple[CallForm, CallPlace] | None:
    """A form and its place, from what was written of them; None where they are not known here."""
    if not isinstance(written, dict) or written.get("is") not in LIVE:
        return None
    kind, at = LIVE[written["is"]], CallPlace(str(written.get("file", "")), int(written.get("line", 0)))
    value, calls = float(written.get("value") or 0.0), frozenset(map(str, written.get("calls", ())))
    if issubclass(kind, (KeptRows, ZeroInfinity)):
        return kind(), at
    if issubclass(kind, SafeWhere):
        return kind(calls, keeps=bool(written.get("keeps"))), at
    if issubclass(kind, OperandBound):
        argument = int(written.get("argument") or 0)
        return kind(calls, argument, value, lowest=bool(written.get("lowest"))), at
    return Constant(float(written.get("was") or 0.0), value, at, None), at


def _is_lowest(form: CallForm) -> bool:
    return isinstance(form, OperandBound) and form.lowest


class _InForm(TorchFunctionMode):
    """Makes one call of the body in its other form."""

    def __init__(self, form: CallForm, at: CallPlace) -> None:
        super().__init__()
        self._form = form
        self._at = at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        plain = isinstance(func, OpOverload) or getattr(func, "__name__", "") in ("__get__", "__set__")
        result = NotImplemented if plain or not self._is_it(call) else self._form.instead(call)
        return call() if result is NotImplemented else result

    def _is_it(self, call: Call) -> bool:
        """Whether a call is the one that is meant; its line, which takes longest to find, is looked at last."""
        form = self._form
        if (form.calls and call.name not in form.calls) or not form.fits(call):
            return False
        place = user_place()
        return place is not None and self._at.is_at(place)
