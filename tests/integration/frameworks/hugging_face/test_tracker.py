"""`WatchTracker` among an accelerator's trackers: begins with ``init_trackers``, ends with ``end_training``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

import ampscope
from ampscope.errors import WatchError
from ampscope.integrations.accelerate import WatchTracker
from ampscope.trace.schema import EventKind, Table
from tests.integration.frameworks.hugging_face.small_accelerator import (
    ACCUMULATE,
    STEPS,
    forget_accelerate,
    make_accelerator,
    train,
)
from tests.support.training.torch_state import installed
from tests.support.training.twin_runs import differences


class Kept(GeneralTracker):  # type: ignore[misc]  # accelerate ships no types
    """Keeps what it is given to log, with the step."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> None:
        return None

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append((step, dict(values)))


def begin(accelerator: Accelerator) -> None:
    accelerator.init_trackers("project", config={"lr": 0.01})


def test_a_training_with_trackers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = installed()
    expected = train(make_accelerator("fp16"))
    forget_accelerate()
    kept = Kept()
    accelerator = make_accelerator("fp16", log_with=[kept, WatchTracker()], project_dir=tmp_path)
    assert differences(train(accelerator, begin, end=True), expected) == []
    assert installed() == before
    run = ampscope.open_run(tmp_path / "ampscope")
    assert [row.step for row in run.rows(Table.STEPS)] == list(range(STEPS))
    assert [row.text for row in run.rows(Table.EVENTS, kind=EventKind.NOTE)] == ['configuration: {"lr": 0.01}']
    step, figures = kept.logged[-1]
    assert step == STEPS * ACCUMULATE - 1
    names = "loss_scale", "grad_norm", "skipped_share", "headroom_bits", "observing_share"
    assert set(figures) <= {f"ampscope/{name}" for name in names}
    assert {"ampscope/loss_scale", "ampscope/skipped_share", "ampscope/observing_share"} <= set(figures)
    assert "ampscope: healthy: No numerical fault" in capfd.readouterr().err


def test_trackers_that_are_started_too_early(tmp_path: Path) -> None:
    accelerator = make_accelerator("bf16", log_with=[WatchTracker()], project_dir=tmp_path)
    with pytest.raises(WatchError, match=r"after accelerator\.prepare"):
        begin(accelerator)


def test_a_tracker_that_refuses_the_figures_stops_nothing(tmp_path: Path) -> None:
    class Refuses(Kept):
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            if "loss" not in values:
                raise ValueError("no such figure")

    accelerator = make_accelerator("bf16", log_with=[Refuses(), WatchTracker(quiet=True)], project_dir=tmp_path)
    with pytest.warns(RuntimeWarning, match="no such figure"):
        train(accelerator, begin, end=True)
    assert len(ampscope.open_run(tmp_path / "ampscope").rows(Table.STEPS)) == STEPS
