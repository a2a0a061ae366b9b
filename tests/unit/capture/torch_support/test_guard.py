"""A part that faults is switched off with one warning; what a device has failed in is told as the training's own."""

from __future__ import annotations

import pytest
import torch

from ampscope.capture.torch_support.guard import Guard, is_of_device
from ampscope.trace.vocabulary import DEVICE_FAILED


def _told(error: Exception) -> tuple[str, str]:
    texts: list[str] = []
    guard = Guard("the step record", texts.append)
    with pytest.warns(RuntimeWarning) as warned, guard:
        raise error
    assert guard.broken
    return texts[0], str(warned[0].message)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ..."),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_what_a_device_failed_in_is_no_fault_of_ours(error: Exception) -> None:
    text, warning = _told(error)
    assert text.startswith(f"the step record switched itself off, {DEVICE_FAILED} (")
    assert str(error).splitlines()[0] in text
    assert "kernel errors" not in text
    assert warning.endswith("the training's next call on it raises the same")


@pytest.mark.parametrize(
    "error", [ValueError("CUDA error: no"), RuntimeError("shapes differ"), torch.OutOfMemoryError()]
)
def test_any_other_error_is(error: Exception) -> None:
    assert not is_of_device(error)
    text, warning = _told(error)
    assert f"switched itself off after {type(error).__name__}" in text
    assert "test_guard.py" in text
    assert warning.endswith("training goes on unchanged")
