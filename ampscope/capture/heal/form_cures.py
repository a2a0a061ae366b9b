"""One call of the user's code in another form, inside the modules that make it, or in the loss code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from ampscope.capture.changes.call_form import Call, CallForm, CallPlace, OperandBound
from ampscope.capture.changes.half_range import Constant, Float32Call
from ampscope.capture.changes.log_softmax import CrossEntropy, FromLogits
from ampscope.capture.changes.reductions import KeptRows, ZeroInfinity
from ampscope.capture.changes.replaced_calls import FormInLoss, LossForms
from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.changes.safe_operands import LOGARITHMS, DivisorBound, EndsBound, SafeWhere
from ampscope.capture.heal.lasting_cure import LastingCure
from ampscope.capture.heal.module_cures import ConvertedForward, ModulesConverted, Without, convert
from ampscope.capture.torch_support.user_line import user_place
from ampscope.trace.schema import LOSS_CODE, CureKind, Form, said

#: Forms that a call may have in the live model, each by what the trace calls it: they know nothing but this one call.
LIVE: dict[str, type[CallForm]] = {
    "constant": Constant,
    "bound": OperandBound,
    "divisor": DivisorBound,
    "ends": EndsBound,
    "safe_where": SafeWhere,
    "kept_rows": KeptRows,
    "zero_infinity": ZeroInfinity,
}
#: In the loss code also those that know what other calls of the loop's own have returned.
LIVE_IN_LOSS: dict[str, type[CallForm]] = {
    **LIVE,
    "in_float32": Float32Call,
    "from_logits": FromLogits,
    "cross_entropy": CrossEntropy,
}


#: Why a call of the loss code stays as it is written.
IN_CHECKPOINT = "it is called within a checkpoint, which calls it once more in the backward"


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
        if isinstance(form, (FromLogits, Float32Call)):
            asked = "the logarithm" if form.calls == LOGARITHMS else "/".join(sorted(form.calls))
            return f"{form.form} instead of {asked}" if isinstance(form, FromLogits) else f"{asked} in float32"
        if isinstance(form, Constant):
            return f"{value:g} instead of {form.was or 0.0:g}"
        if isinstance(form, (KeptRows, ZeroInfinity)):
            return "rows without a key zero" if isinstance(form, KeptRows) else "targets without an alignment left out"
        if isinstance(form, SafeWhere):
            return f"the operand of {'/'.join(sorted(form.calls))} 1 where that is {form.unsafe}"
        if isinstance(form, EndsBound):
            return f"the operand of {'/'.join(sorted(form.calls))} kept between {-value!r} and {value!r}"
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
            "is": next(name for name, kind in LIVE_IN_LOSS.items() if type(form) is kind),
            "calls": sorted(form.calls),
            "argument": form.argument,
            "value": form.value,
            "was": form.was,
            "lowest": _is_lowest(form),
            "keeps": isinstance(form, SafeWhere) and form.keeps,
            "file": self._at.file,
            "line": self._at.line,
            **_from_logits(form),
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


class FormOfLossCode(OneForm):
    """A call of the loop's own code in another form.

    Args:
        form: The form, of a class in `LIVE_IN_LOSS`.
        at: The line that makes the call.
        loss: The forms of the loss code in force.
    """

    def __init__(self, form: CallForm, at: CallPlace, loss: LossForms) -> None:
        super().__init__(form, at, {})
        self.modules = (LOSS_CODE,)
        self._loss = loss
        self._formed = FormInLoss(form, at)

    @property
    def why_lifted(self) -> str:
        """See `LastingCure.why_lifted`."""
        return IN_CHECKPOINT if self._formed.in_checkpoint else ""

    def change(self) -> ReplayChange:
        """See `LastingCure.change`."""
        return self._formed.again()

    def without(self) -> ReplayChange:
        """See `LastingCure.without`."""
        change = ReplayChange()
        change.without = self._formed
        return change

    def apply(self) -> None:
        """See `LastingCure.apply`."""
        self._loss.add(self._formed)

    def lift(self) -> None:
        """See `LastingCure.lift`."""
        self._loss.remove(self._formed)


def form_of(written: Any) -> tuple[CallForm, CallPlace] | None:
    """A form and its place, from what was written of them; None where they are not known here."""
    if not isinstance(written, dict) or written.get("is") not in LIVE_IN_LOSS:
        return None
    kind, at = LIVE_IN_LOSS[written["is"]], CallPlace(str(written.get("file", "")), int(written.get("line", 0)))
    value, calls = float(written.get("value") or 0.0), frozenset(map(str, written.get("calls", ())))
    if issubclass(kind, FromLogits):
        return _form_from_logits(kind, calls, written), at
    made: CallForm
    if issubclass(kind, (KeptRows, ZeroInfinity)):
        made = kind()
    elif issubclass(kind, Float32Call):
        made = kind(calls)
    elif issubclass(kind, SafeWhere):
        made = kind(calls, keeps=bool(written.get("keeps")))
    elif issubclass(kind, OperandBound):
        made = kind(calls, int(written.get("argument") or 0), value, lowest=bool(written.get("lowest")))
    else:
        made = Constant(float(written.get("was") or 0.0), value, at, None)
    return made, at


def _form_from_logits(kind: type[FromLogits], calls: frozenset[str], written: dict[str, Any]) -> FromLogits:
    made_at = CallPlace(str(written.get("made_file", "")), int(written.get("made_line", 0)))
    if issubclass(kind, CrossEntropy):
        return kind(made_at)
    form = said(Form, str(written.get("form", "")), Form.LOG_SOFTMAX)
    return kind(form, calls, str(written.get("made_by", "")), made_at)


def _from_logits(form: CallForm) -> dict[str, Any]:
    if not isinstance(form, FromLogits):
        return {}
    made = form.made_at
    return {"form": form.form, "made_by": form.made_by, "made_file": made.file, "made_line": made.line}


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
        result = NotImplemented if plain or not self._is_it(call) else self._form.made(call)
        return call() if result is NotImplemented else result

    def _is_it(self, call: Call) -> bool:
        """Whether a call is the one that is meant; its line, which takes longest to find, is looked at last."""
        form = self._form
        if (form.calls and call.name not in form.calls) or not form.fits(call):
            return False
        place = user_place()
        return place is not None and self._at.is_at(place)
