"""Measures which share of its update a parameter kept in half precision loses to rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ampscope.capture.step.measures.updates.kept_in_half import sampled
from ampscope.capture.torch_support.dtypes import HALF
from ampscope.capture.torch_support.local_shards import has_arrived, local
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.readback import Values


class Kept(NamedTuple):
    """A parameter with a sample of its values before the optimizer stepped."""

    parameter: Tensor
    before: Tensor


def keep(optimizer: Optimizer, models: Models) -> dict[str, Kept]:
    """A sample of every half-precision parameter of ``optimizer`` that has a gradient and is to move, by name.

    Of an optimizer that is none of torch's, none: what it cannot write it may add to a later update (Kahan's sum). What
    a step of it is to write is found on copies, see `still_updates`.
    """
    found: dict[str, Kept] = {}
    view = OptimizerView(optimizer)
    if view.has_own_step:
        return found
    at_rest = view.at_rest
    for parameter in view.parameters:
        known = models.parameters.get(id(parameter))
        half = parameter.dtype in HALF and parameter.layout is torch.strided and parameter.numel()
        moves = parameter.grad is not None and id(parameter) not in at_rest
        if known is not None and half and moves and local(parameter).numel():
            found[known[0]] = Kept(parameter, sampled(local(parameter)).clone())
    return found


def counts(kept: Mapping[str, Kept], earlier: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How many elements had a gradient, and how many of them the step left exactly as they were; no wait.

    Args:
        kept: The parameters before the step.
        earlier: Samples of them at the look before. What has moved since is not held: an optimizer that rounds by
            chance, or adds up what it could not write, leaves in one step as it is what it moves in many.
    """
    found = {}
    for name, (parameter, before) in kept.items():
        if parameter.grad is None or parameter.grad.layout is not torch.strided or not has_arrived(parameter.grad):
            continue
        moved = sampled(local(parameter.grad)) != 0
        same = (sampled(local(parameter)) == before) & moved
        if name in earlier and earlier[name].shape == before.shape:
            same &= earlier[name] == before
        found[f"due {name}"], found[f"same {name}"] = moved.sum(), same.sum()
    return found


def share(known: Values, name: str) -> float | None:
    """The share of a parameter's due elements that were left as they were; None where none was due, or nobody looked.

    Args:
        known: What `counts` gave, on the host.
        name: Of the parameter.
    """
    due, same = known.get(f"due {name}"), known.get(f"same {name}")
    return same / due if due and same is not None else None
