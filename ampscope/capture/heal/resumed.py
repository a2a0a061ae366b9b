"""Makes again, as a run is resumed, what it had changed when it ended before."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from ampscope.capture.heal.cures.lasting_cure import LastingCure
from ampscope.capture.heal.cures.loss_scale import ScaleBound
from ampscope.capture.heal.cures.modules import Both, ConversionsWider, ModulesKept
from ampscope.capture.heal.cures.one_form import FormOfLossCode, OneForm, form_of
from ampscope.capture.heal.told import Change
from ampscope.capture.keep_fp32.keeping import Outputs
from ampscope.capture.replay.cures.forms.in_loss import LossForms
from ampscope.capture.torch_support.dtypes import torch_dtype
from ampscope.capture.torch_support.models import Models
from ampscope.trace.schema import LOSS_CODE, CureKind, said


def of_models(step: int, text: str, models: Models, loss: LossForms | None = None) -> tuple[LastingCure, Change] | None:
    """A change of modules, or of the loss code, from what was written of it; None for others, and of what is not there.

    Args:
        step: At which it was made.
        text: What was written of it.
        models: The watched models.
        loss: The forms that calls of the loss code have; None where these are left alone.
    """
    detail = json.loads(text)
    modules = {models.names[id(module)]: module for module in models.modules}
    if "form" in detail:
        form, formed = form_of(detail["form"]), _found(detail.get("formed"), modules)
        one = OneForm(*form, formed) if form and formed else None
        if form and loss is not None and detail.get("formed") == [LOSS_CODE]:
            one = FormOfLossCode(*form, loss)
        return (one, _change(step, one, detail)) if one is not None else None
    kept, converted = (_found(detail.get(name), modules) for name in ("kept", "converted"))
    if (not kept and not converted) or kept is None or converted is None:
        return None
    places = tuple(map(str, detail.get("places", ())))
    cure: LastingCure
    if kept and converted:
        cure = Both(ModulesKept(kept, _outputs(detail)), ConversionsWider(converted, places))
    else:
        cure = ModulesKept(kept, _outputs(detail)) if kept else ConversionsWider(converted, places)
    return cure, _change(step, cure, detail)


def of_scaler(step: int, text: str, scaler: Any) -> tuple[LastingCure, Change] | None:
    """A bound on the loss scale; None for other changes."""
    detail = json.loads(text)
    bound = detail.get("bound")
    if not isinstance(bound, (int, float)):
        return None
    cure = ScaleBound(scaler, float(bound))
    return cure, _change(step, cure, detail)


def _outputs(detail: dict[str, Any]) -> dict[str, Outputs]:
    always, fitting = detail.get("outputs") or {}, detail.get("fitting_outputs") or {}
    asked = [(always, False), (fitting, True)]
    return {name: Outputs(torch_dtype(each), fits) for names, fits in asked for name, each in names.items()}


def _found(names: Any, modules: dict[str, nn.Module]) -> dict[str, nn.Module] | None:
    """Modules by name; None where one is not there."""
    asked = [str(name) for name in names or ()]
    return {name: modules[name] for name in asked} if set(asked) <= modules.keys() else None


def _change(step: int, cure: LastingCure, detail: dict[str, Any]) -> Change:
    kind = said(CureKind, str(detail.get("kind", "")), cure.kind)
    return Change(step, int(detail.get("optimizer", 0)), kind, cure.text, cure.modules, cure.code, cure.detail)
