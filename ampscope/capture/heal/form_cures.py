"""One call of the user's code in another form, inside the modules that make it, or in the loss code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from ampscope.capture.changes.replaced_calls import FormInLoss, LossForms, made
from ampscope.capture.changes.replay_change import ReplayChange
from ampscope.capture.heal.lasting_cure import LastingCure
from ampscope.capture.heal.module_cures import ConvertedForward, ModulesConverted, Without, convert
from ampscope.capture.torch_support.user_line import user_place
from ampscope.cures.call_form import Call, CallForm, CallPlace
from ampscope.trace.schema import LOSS_CODE, CureKind

#: Why a call of the loss code stays as it is written.
IN_CHECKPOINT = "it is called within a checkpoint, which calls it once more in the backward"


class OneForm(LastingCure):
    """A call in another form.

    Args:
        form: The form, which knows nothing but this one call.
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
        return f"{self._form.told} at {self._at.file}:{self._at.line}"

    @property
    def code(self) -> str:
        """See `LastingCure.code`."""
        return f"# {self.text} (ampscope fix shows the line)"

    @property
    def detail(self) -> dict[str, Any]:
        """See `LastingCure.detail`."""
        written = {**self._form.written(), "file": self._at.file, "line": self._at.line}
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
        form: The form; it may know what other calls of the loop have returned.
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


class _InForm(TorchFunctionMode):
    """Makes one call of the body in its other form."""

    def __init__(self, form: CallForm, at: CallPlace) -> None:
        super().__init__()
        self._form = form
        self._at = at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        plain = isinstance(func, OpOverload) or getattr(func, "__name__", "") in ("__get__", "__set__")
        result = NotImplemented if plain or not self._is_it(call) else made(self._form, call)
        return call() if result is NotImplemented else result

    def _is_it(self, call: Call) -> bool:
        """Whether a call is the one that is meant; its line, which takes longest to find, is looked at last."""
        form = self._form
        if (form.calls and call.name not in form.calls) or not form.fits(call):
            return False
        place = user_place()
        return place is not None and self._at.is_at(place)
