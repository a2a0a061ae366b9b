"""What all tests share: one thread to a process, GPU tests skipped where there is no GPU, a folder for a run."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.training.accelerator import selection
from tests.support.training.injuries import soak

# Before torch is imported, here and in what tests start: as many processes run as there are cores, and the threads of
# several more would spin for each other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes are started: the sources are compiled by one of them, for all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a browser, a training in another process, a server are all waited for."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(trylast=True)  # what is not asked for has been left out by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    selection.prepare(items)
    _skip_without_gpu(items)


def pytest_collection_finish() -> None:
    """What has been imported and collected stays, and no collection of garbage looks through it again.

    Each `ampscope.watch` after the first makes one: a third of a second where all is imported that tests need.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """It is taken away in order as the process ends."""
    gc.unfreeze()


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    torch = pytest.importorskip("torch")  # asked for here alone: the reader's tests run without torch
    if torch.cuda.is_available():
        return
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ended = (report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, []))
    if lines := soak.table(report for report in ended if isinstance(report, pytest.TestReport)):
        terminalreporter.section("soak")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def compiled_code_is_forgotten() -> Iterator[None]:
    """A process that has compiled anything is watched otherwise, and the next test's may not be one."""
    yield
    if getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", None):
        sys.modules["torch"].compiler.reset()


@pytest.fixture(autouse=True)
def no_hook_is_left_behind() -> Iterator[None]:
    """What a test leaves on every module of the process, the next one meets: it is taken off and told at once."""
    yield
    modules = sys.modules.get("torch.nn.modules.module")
    if modules is None or not modules._has_any_global_hook():
        return
    gc.collect()  # a scope that nobody holds any more takes its own hooks with it
    left = [hook for name in dir(modules) if name.startswith("_global_") for hook in _hooks_of(getattr(modules, name))]
    assert not left, f"hooks of every module were left on: {left}"


def _hooks_of(registry: object) -> list[object]:
    """Those of a registry, which is empty then."""
    if not isinstance(registry, dict):
        return []
    hooks = [hook for hook in registry.values() if callable(hook)]
    registry.clear()
    return hooks


@pytest.fixture(params=["cpu", pytest.param("fake", marks=pytest.mark.accelerator)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """For what holds on every device: the tests that ask for it run on the host and on the fake accelerator.

    Tensors and layers are made there, as in a script that has called ``torch.set_default_device``.
    """
    kind: str = request.param
    if kind == "cpu":
        yield kind
        return
    sys.modules["torch"].set_default_device(kind)
    try:
        yield kind
    finally:
        sys.modules["torch"].set_default_device(None)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Where a test's run may be recorded; it does not exist yet."""
    return tmp_path / "run"
