"""Reads and sets which kernels torch may choose from, and how exactly they compute, as contexts do around a call.

The functions are private names of torch's: one that a version lacks is left out.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from ampscope.capture.torch_support.guard import Suppressed

#: Values of the settings, in the order of `_SETTINGS`.
KernelChoice = tuple[Any, ...]


class _Setting(NamedTuple):
    """A setting of the process."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


#: Names of a setting, of what reads it and of what writes it, both below ``torch._C``.
_NAMED = (
    ("sdpa_flash", "_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("sdpa_flash_3", "_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    ("sdpa_mem_efficient", "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("sdpa_math", "_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("sdpa_cudnn", "_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("sdpa_overrideable", "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("sdpa_priority", "_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("sdpa_math_reduces_in_half", "_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("cudnn", "_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("cudnn_benchmark", "_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("cudnn_deterministic", "_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("mkldnn_deterministic", "_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    (
        "fp16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
    ),
    (
        "bf16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
    ),
    ("fp16_accumulation", "_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    (
        "cpu_fp16_reduced_precision_reduction",
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cpu_allow_fp16_reduced_precision_reduction",
    ),
)
#: Where torch keeps the precision of float32 products (TF32 among them); what is not said for one is said for all.
_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)
#: Functions outside of modules that have several kernels, among which a context may choose.
CHOOSING = frozenset(
    ("scaled_dot_product_attention", "multi_head_attention_forward", "linear", "bilinear", "matmul", "__matmul__")
) | frozenset(("mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "backward", "grad"))


def _found() -> Iterator[_Setting]:
    for name, get, put in _NAMED:
        if hasattr(torch._C, get) and hasattr(torch._C, put):
            yield _Setting(name, getattr(torch._C, get), partial(_spread, getattr(torch._C, put)))
    if hasattr(torch._C, "_set_deterministic_algorithms"):
        yield _Setting("deterministic_algorithms", _deterministic, _set_deterministic)
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        for place in filter(_is_known, _PRECISIONS):
            name = "fp32_precision_" + "_".join(place)
            put_precision = partial(torch._C._set_fp32_precision_setter, *place)
            yield _Setting(name, partial(torch._C._get_fp32_precision_getter, *place), put_precision)


def _is_known(place: tuple[str, str]) -> bool:
    """Whether this torch keeps a precision there; the pairs that it takes have changed from version to version."""
    with Suppressed() as suppressed:
        torch._C._get_fp32_precision_getter(*place)
    return suppressed.error is None


def _spread(put: Callable[..., None], value: Any) -> None:
    """Writes what may consist of two: whether sums may be rounded, and whether they may be split."""
    put(*value) if isinstance(value, tuple) else put(value)


def _deterministic() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


_SETTINGS = tuple(_found())
_READERS = tuple(setting.get for setting in _SETTINGS)


def current() -> KernelChoice:
    """The settings now: process-wide, reads no device."""
    return tuple(map(operator.call, _READERS))


def by_name(choice: KernelChoice) -> dict[str, Any]:
    """The settings for people to read."""
    return {setting.name: value for setting, value in zip(_SETTINGS, choice, strict=True)}


@contextlib.contextmanager
def made(choice: KernelChoice | None) -> Iterator[None]:
    """Sets for the body what is otherwise now, and nothing else: a precision may be said for one kind of op or for all.

    Args:
        choice: The settings; None leaves them as they are.
    """
    undo: list[tuple[_Setting, Any]] = []
    try:
        for setting, wanted in zip(_SETTINGS, choice or (), strict=False):
            now = setting.get()
            if now != wanted:
                undo.append((setting, now))
                setting.put(wanted)
        yield
    finally:
        for setting, before in reversed(undo):
            setting.put(before)
