"""Finds out how a step's gradients are reduced across ranks, as far as this rank knows without asking another."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ampscope.capture.torch_support.communication import process_group
from ampscope.capture.torch_support.guard import Suppressed

#: Parts of the names of torch's own communication hooks, and the dtype to which they cast what is sent.
_CASTS = {"fp16_compress": torch.float16, "bf16_compress": torch.bfloat16}


class GradientReduction(NamedTuple):
    """The reduction of a step's gradients across ranks."""

    by: str  #: what did it, by its name; empty where collectives ran of which it is not known what they sent
    ranks: int
    hook: str = ""  #: the communication hook through which it went
    dtype: torch.dtype | None = None  #: to which the hook casts what is sent; None: not known to cast


def wrapper_of(module: nn.Module) -> nn.Module | None:
    """The ``DistributedDataParallel`` that a module is, or in whose forward it is called now; None outside of any."""
    kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    if kind is None:
        return None
    outer = getattr(module, "_orig_mod", module)
    is_one = type.__subclasscheck__(kind, type(outer))  # it is an ABC, which asks in Python
    return outer if is_one else getattr(kind, "_active_ddp_module", None)


def synchronising(wrapper: nn.Module | None) -> nn.Module | None:
    """``wrapper`` itself where the backward of a call that is made now reduces gradients; None within ``no_sync``."""
    return wrapper if getattr(wrapper, "require_backward_grad_sync", False) else None


def left_apart(roots: Iterable[nn.Module]) -> tuple[list[str], int] | None:
    """Parameters put into a model after ``DistributedDataParallel`` was built, whose gradients it does not reduce.

    Args:
        roots: The watched models, as the user holds them.

    Returns:
        Their names, and the number of ranks; None where there are none.
    """
    for root in roots:
        wrapper: Any = wrapper_of(root)
        known = getattr(wrapper, "_module_parameters", None)
        if known is None or (ranks := int(wrapper.process_group.size())) == 1:
            continue
        reduced, ignored = set(map(id, known)), getattr(wrapper, "parameters_to_ignore", ())
        trained = [each for each in wrapper.module.named_parameters() if each[1].requires_grad]
        names = [name for name, each in trained if id(each) not in reduced and name not in ignored]
        if names:
            return names, ranks
    return None


def of_step(wrappers: Iterable[nn.Module], collectives: int | None) -> GradientReduction | None:
    """How the gradients of a step were reduced; None where they were not.

    Args:
        wrappers: What `synchronising` gave for the step's calls.
        collectives: How many collectives ran since the step's first backward began; None: not known.
    """
    for wrapper in wrappers:
        group: Any = wrapper.process_group
        hook = _hook(wrapper)
        if group.size() == 1 and not hook:
            continue
        dtype = next((dtype for part, dtype in _CASTS.items() if part in hook.lower()), None)
        return GradientReduction(type(wrapper).__name__, int(group.size()), hook, dtype)
    joined = process_group.rank_of()
    if joined is None or joined[1] == 1 or collectives == 0:
        return None
    return GradientReduction("", joined[1])


def plain_group(wrappers: Iterable[Any]) -> Any | None:
    """The process group of all wrappers, where none has a communication hook; None where they have not one alone."""
    found = list(wrappers)
    groups = {id(wrapper.process_group): wrapper.process_group for wrapper in found}
    return groups.popitem()[1] if len(groups) == 1 and not any(map(_hook, found)) else None


def _hook(wrapper: Any) -> str:
    """The name of the communication hook that was registered; empty without one."""
    with Suppressed():
        own = [hook.__qualname__ for hook, _ in wrapper._comm_hooks]
        return str(own[0] if own else wrapper._get_ddp_logging_data().get("comm_hook", ""))
    return ""
