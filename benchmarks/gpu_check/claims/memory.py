"""What a replay takes of the device's memory, and gives back."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from gpu_check.claim import Claim, expect, need_cuda
from gpu_check.recorded import rows, switched_off
from gpu_check.trainings import FRAME, Loop, watch

BAD = 12
WIDE = 4096
MIB = 2**20


class Wide(nn.Module):
    """Activations that weigh more than the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(FRAME, WIDE), nn.Linear(WIDE, 10)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.up(frames)
        for _ in range(6):
            x = nn.functional.gelu(x)
        logits: Tensor = self.head(x)
        return logits


class _Large(Loop):
    """A loop with a batch large enough for its activations to be seen."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, Wide)
        self.frames = self.frames.repeat(64, 1, 1)
        self.labels = self.labels.repeat(64, 1)


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def _given_back(device: torch.device) -> str:
    need_cuda(device, "an allocator that counts")
    loop = _Large(device)
    scope = watch(loop, replay_budget=0)
    for _ in range(BAD):
        loop.step()
    before = _allocated()
    torch.cuda.reset_peak_memory_stats()
    loop.step()
    usual = torch.cuda.max_memory_allocated()
    gradients = sum(p.grad.nbytes for p in loop.model.parameters() if p.grad is not None)
    torch.cuda.reset_peak_memory_stats()
    loop.step(loop.bad_frames())
    peak = torch.cuda.max_memory_allocated()
    loop.step()
    after = _allocated()
    scope.close()
    (incident,) = rows(scope.folder, "incidents")
    expect(incident["replay"] == "exact", f"the replay is {incident['replay']}: {incident['replay_reason']}")
    said = f"peak {peak / MIB:.0f} MiB, of another step {usual / MIB:.0f}; kept {(after - before) / MIB:+.2f} MiB"
    expect(after - before <= MIB // 4, said)
    expect(peak <= 1.1 * (usual + gradients), said)
    return said


def _out_of_memory(device: torch.device) -> str:
    need_cuda(device, "a limit on the memory")
    loop = _Large(device)
    scope = watch(loop)
    total = torch.cuda.get_device_properties(device).total_memory
    for _ in range(BAD):
        loop.step()
    before = _allocated()
    loop.forward_backward(loop.bad_frames())
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 16 * MIB) / total)
    loop.finish()
    torch.cuda.set_per_process_memory_fraction(1.0)
    losses = [float(loop.step()) for _ in range(3)]
    after = _allocated()
    scope.close()
    off = switched_off(scope.folder)
    expect(not off, f"a part of AMPscope failed: {off}")
    (incident,) = rows(scope.folder, "incidents", step=BAD)
    expect(incident["replay"] == "unavailable", f"the replay is {incident['replay']} without memory to run in")
    expect(all(map(torch.isfinite, torch.tensor(losses))), f"losses afterwards: {losses}")
    expect(after - before <= MIB // 4, f"{(after - before) / MIB:+.2f} MiB stay allocated")
    return f"unavailable ({incident['replay_reason']}); training went on"


CLAIMS = (
    Claim("memory", "a replay's peak is that of the step and its gradients, and all of it is given back", _given_back),
    Claim("out-of-memory", "a replay that runs out of memory is given up, and training goes on", _out_of_memory),
)
