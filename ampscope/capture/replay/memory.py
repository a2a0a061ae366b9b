"""Whether another run of a step fits into memory, and giving back what one took that did not fit."""

from __future__ import annotations

import os

import torch

#: Share of the free memory that a replay may take.
SHARE = 0.8


def fits(needed: int, device: torch.device) -> bool:
    """Whether about ``needed`` bytes can be had on ``device`` without pressing the training out.

    Args:
        needed: Estimated size of the step's results, bytes.
        device: Where the model lives.
    """
    free = _free(device)
    return free is None or needed <= SHARE * free


def _free(device: torch.device) -> int | None:
    """Bytes free on a device, those the allocator keeps in reserve included; None where nobody can tell."""
    if device.type == "cuda":
        unused, _ = torch.cuda.mem_get_info(device)
        return int(unused + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def give_back(error: BaseException) -> None:
    """Returns the allocator's reserve after ``error`` ran out of memory: training finds the device as before."""
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
