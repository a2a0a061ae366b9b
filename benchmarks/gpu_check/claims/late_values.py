"""Values that arrive late are judged when they arrive, and are the right ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ampscope.capture.torch_support.readback import Parcel
from gpu_check.claim import Claim, another_device, expect, need_cuda
from gpu_check.recorded import rows, switched_off
from gpu_check.trainings import Loop, Transformer, watch

BAD = 12
#: Clock ticks that keep a GPU busy for some tens of milliseconds.
LONG = 100_000_000


class _WithBuffer(Transformer):
    """A transformer with a running value that nothing reads."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.poison = False

    def forward(self, frames: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(frames.float().abs().mean())
            if self.poison:
                self.seen.fill_(float("nan"))
        return super().forward(frames)


class _BadLoss(Loop):
    """A loop whose loss can be NaN while its gradients are finite."""

    poison = False

    def loss(self, logits: Tensor) -> Tensor:
        loss = super().loss(logits)
        return loss + float("nan") if self.poison else loss


def _reported(device: torch.device, loop: Loop, poisoned: nn.Module | Loop, trigger: str) -> str:
    scope = watch(loop)
    for step in range(BAD + 4):
        poisoned.poison = step == BAD  # type: ignore[union-attr]
        if device.type == "cuda":
            torch.cuda._sleep(LONG)
        loop.step()
    scope.close()
    off = switched_off(scope.folder)
    expect(not off, f"a part of AMPscope failed: {off}")
    found = {(row["step"], row["trigger"]) for row in rows(scope.folder, "incidents")}
    expect((BAD, trigger) in found, f"no {trigger} at step {BAD}; recorded: {sorted(found) or 'nothing'}")
    return f"{trigger} at step {BAD}"


def _loss(device: torch.device) -> str:
    loop = _BadLoss(device, fused=True)
    return _reported(device, loop, loop, "nonfinite_loss")


def _buffer(device: torch.device) -> str:
    loop = Loop(device, _WithBuffer, fused=True)
    return _reported(device, loop, loop.model, "nonfinite_buffer")


def _parcel(device: torch.device) -> str:
    need_cuda(device, "a device that can be kept busy")
    value = torch.full((), 1.0, device=device)
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        torch.cuda._sleep(LONG)
        value.fill_(2.0)
    parcel = Parcel({"value": value})
    expect(not parcel.arrived, "a value is said to have arrived before the device has made it")
    got = parcel.values()["value"]
    expect(got == 2.0, f"{got} arrived for 2.0")
    expect(parcel.arrived, "a value that was waited for has not arrived")
    return "not there at first, right after a wait"


def _far_parcel(device: torch.device) -> str:
    return _parcel(another_device(device))


CLAIMS = (
    Claim("late-loss", "fused optimizer, the device behind: a NaN loss with finite gradients is reported", _loss),
    Claim("late-buffer", "so is a buffer that became NaN", _buffer),
    Claim("parcel", "a value still on its way is not taken for one that has arrived", _parcel),
    Claim("parcel-elsewhere", "the same for a value on another device than the current one", _far_parcel),
)
