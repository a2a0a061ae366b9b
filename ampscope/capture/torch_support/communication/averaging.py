"""The one collective of AMPscope's own: gradients averaged over ranks that have all agreed to begin it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampscope.capture.torch_support import torch_private


def why_not(gradients: Mapping[str, Tensor]) -> str:
    """Why gradients cannot be averaged, in words; empty where they can."""
    plain = all(type(each) is Tensor and each.layout is torch.strided for each in gradients.values())
    return "" if plain else "a gradient is sparse, or of a class of its own"


def signature(gradients: Mapping[str, Tensor]) -> list[list[str]]:
    """Lists each gradient's name, shape and dtype in a fixed order, which has to be the same on all ranks."""
    return [[name, str(tuple(each.shape)), str(each.dtype)] for name, each in sorted(gradients.items())]


class Averaging:
    """Gradients of this rank, laid out to be averaged as ``DistributedDataParallel`` does.

    Args:
        gradients: By name; none of them is changed.
    """

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        self._like = dict(sorted(gradients.items()))
        kinds = dict.fromkeys((each.dtype, each.device) for each in self._like.values())
        with torch.no_grad():
            self._flat = {kind: torch.cat([each.reshape(-1) for each in self._of(kind)]) for kind in kinds}

    def _of(self, kind: tuple[torch.dtype, torch.device]) -> list[Tensor]:
        return [each for each in self._like.values() if (each.dtype, each.device) == kind]

    def over(self, group: Any) -> dict[str, Tensor]:
        """The average over the ranks of a process group, by name. Communicates: all of them must call it now."""
        with torch.no_grad(), contextlib.ExitStack() as past:
            for aside in torch_private.past_modes():
                past.enter_context(aside)
            for flat in self._flat.values():
                dist.all_reduce(flat.mul_(1.0 / group.size()), group=group)
        at = dict.fromkeys(self._flat, 0)
        averaged: dict[str, Tensor] = {}
        for name, like in self._like.items():
            kind = (like.dtype, like.device)
            averaged[name] = self._flat[kind][at[kind] : at[kind] + like.numel()].reshape(like.shape)
            at[kind] += like.numel()
        return averaged
