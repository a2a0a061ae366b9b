"""The least and the greatest number of a tensor, as a trace has them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ampscope.capture.tracing.full_statistics import Census, FusedLook, has_triton
from ampscope.capture.tracing.light_statistics import Slots
from gpu_check.claim import Claim, Skipped, expect, need_cuda

#: More elements than a 32-bit number counts.
VAST = 2**31 + 17
_EXACT = ("min", "max", "nan", "posinf", "neginf", "max_finite")


def _tensors(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    images = torch.randn(4, 8, 9, 7, device=device).to(dtype)
    yield "one number", images[0, 0, 0, 0]
    yield "contiguous", images
    yield "channels_last", images.to(memory_format=torch.channels_last)
    yield "strided", images[:, ::2, 1:, ::3]
    yield "expanded", images[:1].expand(4, 8, 9, 7)
    yield "transposed", images.transpose(0, 3)
    yield "with inf", images.clone().index_put_((torch.tensor(1, device=device),), torch.tensor(math.inf).to(images))
    yield "with NaN", images.clone().index_fill_(0, torch.tensor([2], device=device), math.nan)
    yield "odd start", images.flatten()[1:]


def _as_torch_says(device: torch.device) -> str:
    count = 0
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        slots, expected = Slots(), []
        for name, tensor in _tensors(device, dtype):
            slots.measure(tensor)
            expected.append((name, float(tensor.min()), float(tensor.max())))
        for (name, low, high), seen in zip(expected, slots.read(), strict=True):
            same = _equal(seen.min, low) and _equal(seen.max, high)
            expect(same, f"{dtype}, {name}: {seen.min} and {seen.max} for {low} and {high}")
            count += 1
    return f"{count} tensors"


def _equal(seen: float | None, true: float | None) -> bool:
    if seen is None or true is None:
        return seen is true
    return seen == true or (math.isnan(seen) and math.isnan(true))


def _fused(device: torch.device) -> str:
    need_cuda(device, "a kernel that Triton builds")
    if not has_triton():
        raise Skipped("needs Triton")
    count = 0
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        fused, census = FusedLook(device), Census()
        seen = [tensor for _, tensor in _tensors(device, dtype) if fused.accepts(tensor)]
        for tensor in seen:
            fused.look(tensor)
            census.measure(tensor)
        for tensor, ours, torchs in zip(seen, fused.read(), census.read(), strict=True):
            same = all(_equal(getattr(ours, name), getattr(torchs, name)) for name in _EXACT)
            expect(same, f"{dtype}, {tuple(tensor.shape)}: {ours} for {torchs}")
            count += 1
    return f"{count} tensors"


def _vast(device: torch.device) -> str:
    need_cuda(device, "tensors of more than 2^31 elements")
    free, _ = torch.cuda.mem_get_info(device)
    if free < 3 * VAST:
        raise Skipped(f"needs {3 * VAST >> 30} GiB of free memory")
    tensor = torch.zeros(VAST, device=device, dtype=torch.float16)
    tensor[-1], tensor[5] = 3.0, -2.0
    slots = Slots()
    slots.measure(tensor)
    (seen,) = slots.read()
    expect((seen.min, seen.max) == (-2.0, 3.0), f"{seen.min} and {seen.max} for -2 and 3")
    return f"{VAST} elements"


CLAIMS = (
    Claim(
        "extremes",
        "extremes of half, bfloat16, float, double in any layout are those of min() and max()",
        _as_torch_says,
    ),
    Claim("extremes-fused", "AMPscope's own kernel sees in every tensor what torch's see", _fused),
    Claim("extremes-vast", "of more than 2^31 elements too", _vast),
)
