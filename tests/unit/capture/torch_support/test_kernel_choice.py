"""The settings by which torch chooses kernels: read as they are, set for a while, and left as they were found."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ampscope.capture.torch_support import call_state


def _sdpa() -> Any:
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


def _precision(place: tuple[str, str], value: str) -> Callable[[], Any]:
    def change() -> Any:
        torch._C._set_fp32_precision_setter(*place, value)

    return change


#: What changes a setting for good, by the name under which it is recorded.
CHANGES: dict[str, Callable[[], Any]] = {
    "deterministic_algorithms": lambda: torch.use_deterministic_algorithms(mode=True, warn_only=True),
    "cudnn": lambda: torch._C._set_cudnn_enabled(False),
    "cudnn_benchmark": lambda: torch._C._set_cudnn_benchmark(True),
    "cudnn_deterministic": lambda: torch._C._set_cudnn_deterministic(True),
    "sdpa_flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "sdpa_math": lambda: torch.backends.cuda.enable_math_sdp(False),
    "sdpa_mem_efficient": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "sdpa_cudnn": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "fp16_reduced_precision_reduction": lambda: torch._C._set_cublas_allow_fp16_reduced_precision_reduction(
        False, False
    ),
    "bf16_reduced_precision_reduction": lambda: torch._C._set_cublas_allow_bf16_reduced_precision_reduction(
        False, False
    ),
    "fp32_precision_generic_all": _precision(("generic", "all"), "tf32"),
    "fp32_precision_cuda_matmul": _precision(("cuda", "matmul"), "tf32"),
    "fp32_precision_cuda_conv": _precision(("cuda", "conv"), "ieee"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_of_then_is_set_again_and_the_present_one_comes_back(name: str) -> None:
    present = call_state.kernels_now()
    with call_state.kernels_chosen(present):
        pass
    assert call_state.kernels_now() == present
    try:
        CHANGES[name]()
        then = call_state.kernels_now()
        assert call_state.kernels_by_name(then)[name] != call_state.kernels_by_name(present)[name]
    finally:
        _restore(present)
    assert call_state.kernels_now() == present
    with call_state.kernels_chosen(then):
        assert call_state.kernels_now() == then
    assert call_state.kernels_now() == present


def _restore(present: call_state.KernelChoice) -> None:
    for setting, value in zip(call_state._KERNEL_SETTINGS, present, strict=True):
        if setting.get() != value:
            setting.put(value)


def test_the_order_of_attention_kernels_is_one_of_them() -> None:
    with _sdpa():
        then = call_state.kernels_now()
    named = call_state.kernels_by_name(then)
    assert named["sdpa_priority"][:2] == [SDPBackend.EFFICIENT_ATTENTION.value, SDPBackend.MATH.value]
    assert (named["sdpa_flash"], named["sdpa_math"]) == (False, True)


def test_a_precision_that_was_said_for_all_does_not_stay_said_for_one() -> None:
    put = partial(torch._C._set_fp32_precision_setter, "generic", "all")
    present = call_state.kernels_now()
    try:
        put("tf32")
        then = call_state.kernels_now()
        put("none")
        with call_state.kernels_chosen(then):
            pass
        put("ieee")
        assert call_state.kernels_by_name(call_state.kernels_now())["fp32_precision_cuda_matmul"] == "ieee"
    finally:
        put("none")
    assert call_state.kernels_now() == present


def test_what_this_torch_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def getter(backend: str, op: str) -> str:
        if op == "rnn":
            raise RuntimeError(f"Invalid (backend, op) pair: ({backend}, {op})")
        return "none"

    monkeypatch.setattr(torch._C, "_get_fp32_precision_getter", getter)
    monkeypatch.delattr(torch._C, "_get_fa3_sdp_enabled", raising=False)
    names = [setting.name for setting in call_state._settings_found()]
    assert "fp32_precision_cuda_matmul" in names
    assert "fp32_precision_cuda_rnn" not in names
    assert "sdpa_flash_3" not in names


def test_nothing_is_set_where_nothing_was_noted() -> None:
    with _sdpa():
        inside = call_state.kernels_now()
        with call_state.kernels_chosen(None):
            assert call_state.kernels_now() == inside


def test_what_is_read_can_be_written_down() -> None:
    named = call_state.kernels_by_name(call_state.kernels_now())
    assert {"deterministic_algorithms", "sdpa_priority", "fp32_precision_cuda_matmul"} <= named.keys()
    assert json.loads(json.dumps(named)).keys() == named.keys()
