"""What a run had changed when it ended before, made again as it is resumed."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from ampscope.capture.heal.cures.lasting_cure import LastingCure
from ampscope.capture.heal.cures.loss_scale import ScaleBound
from ampscope.capture.heal.cures.modules import Both, ConversionsWider, ModulesKept
from ampscope.capture.heal.cures.one_form import OneForm, form_of
from ampscope.capture.heal.told import Change
from ampscope.capture.keep_fp32.keeping import Outputs
from ampscope.capture.torch_support.dtypes import torch_dtype
from ampscope.capture.torch_support.models import Models
from ampscope.trace.schema import CureKind, said


def of_models(step: int, text: str, models: Models) -> tuple[LastingCure, Change] | None:
    """A change of modules, from what was written of it; None for other changes, and where a module is not there."""
    detail = json.loads(text)
    modules = {models.names[id(module)]: module for module in models.modules}
    if "form" in detail:
        form, formed = form_of(detail["form"]), _found(detail.get("formed"), modules)
        return (one := OneForm(*form, formed), _change(step, one, detail)) if form and formed else None
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
