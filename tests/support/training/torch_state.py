"""Everything of torch, of a model and of a scaler that a watch may have dressed up or hooked into."""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer


def global_hooks() -> dict[str, Any]:
    """Those of every module of the process, by where torch keeps them."""
    return {name: value for name, value in vars(torch_module).items() if name.startswith("_global_")}


def installed() -> dict[str, Any]:
    """The process-wide places; equal before a watch and after it."""
    return {
        "backward": torch.autograd.backward,
        "scaler": dict(vars(torch.amp.GradScaler)),
        "autocast cache": torch.clear_autocast_cache,
        "before optimizers": list(torch_optimizer._global_optimizer_pre_hooks),
        "after optimizers": list(torch_optimizer._global_optimizer_post_hooks),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "module hooks": {name: repr(hooks) for name, hooks in global_hooks().items()},
        "call": nn.Module.__call__,
        "save": (torch.save, torch.serialization.save, safetensors.torch.save_file),
    }


#: The process-wide places of a process that has watched nothing. A test before may have left a scope open, which the
#: next ``watch`` closes: where a watch ends that began so, they are like this again, not as they were before it.
AT_REST = installed()


def settings() -> list[Any]:
    """What a thread computes under."""
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.is_anomaly_enabled(),
        torch.autograd._engine_run_backward,  # type: ignore[attr-defined]  # none that it exports
    ]


def dress(*things: Any) -> list[Any]:
    """The classes and attributes of modules (all the way down), scalers and optimizers."""
    found: list[Any] = []
    for thing in things:
        for part in thing.modules() if isinstance(thing, nn.Module) else [thing]:
            hooks = {name: len(value) for name, value in vars(part).items() if "hook" in name and value}
            attributes = sorted(set(vars(part)) - {"_opt_called"})  # torch's own mark of a scaler that has stepped
            found.append((type(part), attributes, hooks))
    return found
