"""The kernel of `FusedLook` has a file of its own: Triton takes long to import, and is not everywhere."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # `full_statistics` asks first
    triton = None


def look(  # noqa: PLR0917  # a kernel is called with positions
    values: Any,
    size: Any,
    extremes: Any,
    counts: Any,
    step: Any,
    BLOCK: tl.constexpr,  # noqa: N803  # as Triton's own are
) -> None:
    """Takes a tensor's numbers into extremes (least, greatest, largest finite magnitude) and counts (NaN, +inf, -inf).

    Each program goes through one block in ``step``, so that few of them meet at the six results.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCK
    least, greatest = float("inf"), float("-inf")
    most = -1.0
    nan, up, down = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    while block < size:
        at = block + tl.arange(0, BLOCK)
        there = at < size
        x = tl.load(values + at, mask=there, other=0.0).to(tl.float32)
        is_nan = there & (x != x)  # noqa: PLR0124  # what NaN alone is
        is_up, is_down = there & (x == float("inf")), there & (x == float("-inf"))
        is_number = there & ~is_nan
        least = tl.minimum(least, tl.min(tl.where(is_number, x, float("inf")), 0))
        greatest = tl.maximum(greatest, tl.max(tl.where(is_number, x, float("-inf")), 0))
        most = tl.maximum(most, tl.max(tl.where(is_number & ~is_up & ~is_down, tl.abs(x), -1.0), 0))
        nan += tl.sum(is_nan.to(tl.int64), 0)
        up += tl.sum(is_up.to(tl.int64), 0)
        down += tl.sum(is_down.to(tl.int64), 0)
        block += step
    tl.atomic_min(extremes, least)
    tl.atomic_max(extremes + 1, greatest)
    tl.atomic_max(extremes + 2, most)
    tl.atomic_add(counts, nan)
    tl.atomic_add(counts + 1, up)
    tl.atomic_add(counts + 2, down)


#: `look` as it is launched; None without Triton.
KERNEL = triton.jit(do_not_specialize=["size", "step"])(look) if triton else None
