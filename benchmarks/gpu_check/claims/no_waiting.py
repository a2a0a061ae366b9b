"""An ordinary watched step waits for the device no more often than an unwatched one."""

from __future__ import annotations

import warnings

import torch

from gpu_check.claim import Claim, expect, need_cuda
from gpu_check.recorded import switched_off
from gpu_check.trainings import Loop, watch

#: Past the steps at a run's start in which AMPscope looks closely, and not one at which it takes samples.
ORDINARY = 20


def _waits(loop: Loop) -> tuple[int, int]:
    """How often one step waits: in forward and backward, and in its ending."""
    return _counted(loop.forward_backward), _counted(loop.finish)


def _counted(do: object) -> int:
    assert callable(do)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            do()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def _compared(device: torch.device, *, fused: bool = False, scaled: bool = True, allowed: int = 0) -> str:
    need_cuda(device, "its count of synchronising calls")
    plain, loop = (Loop(device, fused=fused, scaled=scaled) for _ in range(2))
    scope = watch(loop)
    for _ in range(ORDINARY):
        plain.step()
        loop.step()
    torch.cuda.synchronize()
    usual, ours = _waits(plain), _waits(loop)
    scope.close()
    off = switched_off(scope.folder)
    expect(not off, f"a part of AMPscope failed: {off}")
    said = f"forward and backward {ours[0]} (unwatched {usual[0]}), the ending {ours[1]} (unwatched {usual[1]})"
    expect(ours[0] <= usual[0] and ours[1] <= usual[1] + allowed, said)
    return said


CLAIMS = (
    Claim("waits", "an untraced step with a scaler waits only where the unwatched one does", _compared),
    Claim("waits-fused", "the same with a fused optimizer", lambda device: _compared(device, fused=True)),
    Claim(
        "waits-unscaled",
        "without a scaler it waits once: for the gradients' norm, before the weights move",
        lambda device: _compared(device, scaled=False, allowed=1),
    ),
)
