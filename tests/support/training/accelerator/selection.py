"""Which tests of a process need the fake accelerator, and may have it."""

from __future__ import annotations

import os

import pytest

REQUIRED = os.environ.get("AMPSCOPE_REQUIRE_ACCELERATOR") == "1"


def prepare(items: list[pytest.Item]) -> None:
    """Gives this process the accelerator if every test of it wants that; skips those that do otherwise.

    A process that has one is another process: torch asks it for streams and events, and so does AMPscope.
    """
    wanting = [item for item in items if item.get_closest_marker("accelerator")]
    if not wanting:
        return
    reason = "" if len(wanting) == len(items) else "needs processes of its own: pytest -m accelerator"
    reason = reason or _registered()
    if reason:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=reason))


def _registered() -> str:
    """Registers the device, or returns why that is not possible."""
    if os.name != "posix":
        return "the fake accelerator is built for POSIX systems alone"
    pytest.importorskip("torch")
    from tests.support.training.accelerator import build, fake_device

    try:
        fake_device.register()
    except build.NoCompilerError as error:
        if REQUIRED:
            pytest.exit(f"AMPSCOPE_REQUIRE_ACCELERATOR=1, but {error}", returncode=1)
        return str(error)
    return ""
