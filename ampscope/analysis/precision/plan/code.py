"""A precision plan as code to paste."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ampscope.analysis.precision.plan.formats import MX, SCALED
from ampscope.analysis.precision.plan.modules import ModulePlan

_TORCHAO = """\
from torchao.float8 import convert_to_float8_training

LOWER = {{
{names}
}}


def is_lower(module, name):
    return name in LOWER and module.in_features % 16 == 0 and module.out_features % 16 == 0


convert_to_float8_training(model, module_filter_fn=is_lower)"""
_TF32 = "torch.backends.cuda.matmul.allow_tf32 = True\ntorch.backends.cudnn.allow_tf32 = True"


def code_for(name: str, modules: Sequence[ModulePlan]) -> str:
    """What lets a run compute in a format where its modules fit it; empty where none was measured, or does.

    Modules that were not measured are left as they are: torchao converts those alone that are known to fit, and
    `keep_fp32` gets those that are known not to.

    Args:
        name: The format.
        modules: What is known of each.
    """
    judged = [(each.module, each.module_type, each.formats[name].fits) for each in modules]
    low = [module for module, _, fits in judged if fits]
    high = [module for module, _, fits in judged if fits is False and module]
    if name in SCALED or name in MX:
        linear = [module for module, kind, fits in judged if fits and kind == "Linear"]
        return _TORCHAO.format(names=_listed(linear)) if linear and name == SCALED[0] else ""
    if name == "tf32":
        return _TF32 if low and not high else ""
    return f"ampscope.keep_fp32(model, [\n{_listed(high)}\n])" if high else ""


def _listed(names: Collection[str]) -> str:
    return "\n".join(f"    {_quoted(name)}," for name in names)


def _quoted(name: str) -> str:
    text = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
