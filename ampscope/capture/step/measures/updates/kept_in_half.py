"""Finds the weights and the state that an optimizer writes in half precision, and takes a sample of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.dtypes import HALF
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.trace.schema import StateKind

#: Elements of a tensor that are compared from look to look.
SAMPLE = 1 << 12


class KeptInHalf(NamedTuple):
    """A parameter, or what an optimizer keeps of one, that has a half-precision dtype."""

    kind: StateKind
    parameter: nn.Parameter  #: whose update it is
    owner: str  #: the parameter's qualified name
    name: str  #: the same; of state what the optimizer calls it
    tensor: Tensor

    @property
    def key(self) -> tuple[str, str]:
        """The names of the parameter and of what is kept of it, by which the tensor is known."""
        return self.owner, self.name


def kept_in_half(optimizer: Optimizer, models: Models) -> Iterator[KeptInHalf]:
    """The half-precision weights of ``optimizer`` that have gradients, and its half-precision state of any weight."""
    view = OptimizerView(optimizer)
    for parameter, gradient in view.with_gradients:
        known = models.parameters.get(id(parameter))
        state = view.state.get(parameter)
        kept = state if isinstance(state, dict) else {}
        half = [(str(key), each) for key, each in kept.items() if type(each) is Tensor and each.dtype in HALF]
        if known is None or not (half or parameter.dtype in HALF):
            continue
        if type(parameter) is not nn.Parameter or not _is_plain(parameter) or not _is_plain(gradient):
            continue
        if parameter.dtype in HALF:
            yield KeptInHalf(StateKind.WEIGHT, parameter, known[0], known[0], parameter)
        for key, value in half:
            if value.shape == parameter.shape and _is_plain(value) and f"max_{key}" not in kept:  # the largest counts
                yield KeptInHalf(StateKind.OPTIMIZER, parameter, known[0], key, value)


def sampled(tensor: Tensor) -> Tensor:
    """A sample of a tensor's elements, the same ones of every tensor of its shape."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0
