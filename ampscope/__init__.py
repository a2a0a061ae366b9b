"""AMPscope: find out which op, module and line broke a PyTorch mixed-precision run, and what cures it.

The names below are loaded when first used: ``import ampscope`` needs neither torch nor a plotting library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ampscope import errors

if TYPE_CHECKING:
    from ampscope.analysis.diagnosis.diagnosis import diagnose
    from ampscope.capture.heal.healing import Healing
    from ampscope.capture.hooks.amp_objects import GradScaler, autocast
    from ampscope.capture.keep_fp32 import keep_fp32
    from ampscope.capture.record.alerts import Alert
    from ampscope.capture.scope import Scope
    from ampscope.capture.watch import watch
    from ampscope.trace.read.run import Run, open_run

__version__ = "0.9.0"

__all__ = [
    "Alert",
    "GradScaler",
    "Healing",
    "Run",
    "Scope",
    "__version__",
    "autocast",
    "diagnose",
    "errors",
    "keep_fp32",
    "open_run",
    "watch",
]

_HOMES = {
    "Alert": "ampscope.capture.record.alerts",
    "GradScaler": "ampscope.capture.hooks.amp_objects",
    "Healing": "ampscope.capture.heal.healing",
    "Run": "ampscope.trace.read.run",
    "Scope": "ampscope.capture.scope",
    "autocast": "ampscope.capture.hooks.amp_objects",
    "diagnose": "ampscope.analysis.diagnosis.diagnosis",
    "keep_fp32": "ampscope.capture.keep_fp32",
    "open_run": "ampscope.trace.read.run",
    "watch": "ampscope.capture.watch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ampscope' has no attribute {name!r}; it offers {', '.join(__all__)}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise errors.TorchMissing(
            f"ampscope.{name} needs torch, which is not installed: pip install 'ampscope[torch]'. Runs can be read "
            "without it.",
            name="torch",
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
