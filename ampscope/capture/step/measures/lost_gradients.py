"""Signs of gradients that were lost to precision, and how much of them is missing beside a float32 replay's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.step.measures import gradients
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.readback import Parcel
from ampscope.provenance import LOST_SHARE
from ampscope.trace.dtypes import FINFO

#: Scaled gradients that stay below float16's smallest normal number may have lost a part of themselves.
_TINY = FINFO["float16"].smallest_normal
#: Elements of a gradient that are compared at once, for what that takes beside it.
_AT_ONCE = 1 << 22


class Sign(NamedTuple):
    """What a parameter's gradient looks like from outside."""

    zeros: float  #: share of elements that are exactly zero
    tiny: bool  #: its largest element, times the loss scale, is below what float16 holds well


class Signs:
    """What the gradients of an optimizer look like from outside, on its way to the host.

    Args:
        optimizer: Whose gradients.
        models: The watched models.
        scale: The loss scale; None without a scaler.
        scaled: The gradients carry it still.
    """

    def __init__(self, optimizer: Optimizer, models: Models, scale: Tensor | None, *, scaled: bool) -> None:
        found = [(name, g) for name, g in gradients.owned(optimizer, models) if _is_comparable(g)]
        self._models = models
        self._scaled = scaled
        self._sizes = {name: gradient.numel() for name, gradient in found}
        largest = torch._foreach_norm([g for _, g in found], math.inf) if found else ()
        nonzero = {f"nonzero {name}": gradient.count_nonzero() for name, gradient in found}
        most = {f"most {name}": norm for (name, _), norm in zip(found, largest, strict=True)}
        self._parcel = Parcel({**nonzero, **most, "scale": scale})

    @property
    def scale(self) -> float | None:
        """The loss scale; waits for what has not arrived."""
        return self._parcel.values()["scale"]

    def suspicious(self) -> dict[str, Sign]:
        """The parameters whose gradient may have lost something; waits for what has not arrived.

        Of an embedding, which has no gradient for what the batch does not mention, only one that is zero throughout
        counts.
        """
        factor = 1.0 if self._scaled else self.scale or 1.0
        looked_up, known = _looked_up(self._models), self._parcel.values()
        found = {}
        for name, size in self._sizes.items():
            nonzero, most = known[f"nonzero {name}"] or 0.0, known[f"most {name}"] or 0.0
            sign = Sign(1.0 - nonzero / size, 0.0 < most * factor < _TINY)
            if sign.tiny or sign.zeros > (LOST_SHARE if name not in looked_up else 1.0 - 0.5 / size):
                found[name] = sign
        return found


def lost_shares(ours: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> dict[str, float]:
    """The share of each gradient's mass that is missing, of those that miss more than `LOST_SHARE`.

    Args:
        ours: Gradients of half precision by parameter.
        wide: Those of float32, of the same scale.
    """
    shares = {}
    for name, gradient in wide.items():
        half = ours.get(name)
        if half is not None and _is_comparable(half) and half.shape == gradient.shape:
            share = _missing(half, gradient)
            if share > LOST_SHARE:
                shares[name] = share
    return shares


def total_norm(found: Mapping[str, Tensor]) -> float:
    """L2 norm of all gradients; waits for the device."""
    return float(sum(float(g.float().norm()) ** 2 for g in found.values() if _is_comparable(g)) ** 0.5)


def _missing(half: Tensor, wide: Tensor) -> float:
    whole = kept = zeroed = 0.0
    rows = max(1, _AT_ONCE * len(wide) // wide.numel()) if wide.dim() else 1
    parts = zip(torch.split(wide, rows), torch.split(half, rows), strict=True) if wide.dim() else [(wide, half)]
    for sizes, ours in ((part.detach().abs(), each.detach()) for part, each in parts):
        whole, kept = whole + _sum(sizes), kept + _sum(ours.abs())
        zeroed += _sum(sizes.masked_fill_(ours != 0, 0.0))
    if not (0.0 < whole < math.inf and math.isfinite(kept)):
        return 0.0
    return max(zeroed, whole - kept) / whole


def _sum(sizes: Tensor) -> float:
    return float(sizes.sum(dtype=torch.float64))


def _looked_up(models: Models) -> frozenset[str]:
    """Names of the weights of embeddings."""
    weights = [module.weight for module in models.modules if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    return frozenset(models.parameters[id(weight)][0] for weight in weights if id(weight) in models.parameters)


def _is_comparable(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.is_floating_point() and gradient.numel() > 0
