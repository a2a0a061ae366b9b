"""What `WatchCallback` does around a training: where the run goes, what is logged, and when it ends."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

import ampscope
from ampscope.errors import WatchError
from ampscope.integrations.transformers import WatchCallback
from ampscope.trace.schema import EventKind, Table
from tests.integration.frameworks.hugging_face.small_trainer import STEPS, make_trainer, overflowing, train
from tests.support.training.torch_state import dress, installed


class Reporter(TrainerCallback):
    """Keeps what it is given to report, as the integrations of loggers do."""

    def __init__(self) -> None:
        self.reported: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.reported.append(dict(logs))


class Stopped(TrainerCallback):
    """A training that an exception leaves."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyError("stopped")


def steps(folder: Path) -> list[int]:
    return [row.step for row in ampscope.open_run(folder).rows(Table.STEPS)]


def test_every_reporter_gets_the_figures(tmp_path: Path) -> None:
    before, after = Reporter(), Reporter()
    callback = WatchCallback(quiet=True)
    made = make_trainer(tmp_path, "fp16", [before, overflowing("fp16"), callback, after])
    train(made)
    for entries in (before.reported, after.reported, made.state.log_history):
        losses = [entry for entry in entries if "loss" in entry]
        assert len(losses) == STEPS
        assert {"ampscope/loss_scale", "ampscope/skipped_share", "ampscope/observing_share"} <= losses[-1].keys()
        assert losses[-1]["ampscope/skipped_share"] > 0
        assert not any("ampscope/loss_scale" in entry for entry in entries if "loss" not in entry)


def test_a_log_without_figures(tmp_path: Path) -> None:
    made = make_trainer(tmp_path, "bf16", [WatchCallback(quiet=True, log=False)])
    train(made)
    assert not any(name.startswith("ampscope") for entry in made.state.log_history for name in entry)


def test_resuming_goes_on_in_the_run_and_beginning_anew_does_not(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    train(make_trainer(tmp_path, "fp16", [WatchCallback(quiet=True)], **{**saving, "max_steps": 4}))
    resumed = make_trainer(tmp_path, "fp16", [WatchCallback(quiet=True)], **saving)
    train(resumed, resume_from_checkpoint=True)
    assert steps(tmp_path / "_ampscope") == list(range(STEPS))
    events = ampscope.open_run(tmp_path / "_ampscope").rows(Table.EVENTS)
    assert [row.kind for row in events if row.kind in (EventKind.START, EventKind.RESUME)] == ["start", "resume"]
    assert ampscope.diagnose(tmp_path / "_ampscope").verdict == "healthy"
    train(make_trainer(tmp_path, "fp16", [WatchCallback(quiet=True)]))
    assert steps(tmp_path / "_ampscope-1") == list(range(STEPS))


def test_the_run_is_not_uploaded_with_the_model(tmp_path: Path) -> None:
    """What ``push_to_hub`` leaves out of the folder it uploads."""
    source = inspect.getsource(Trainer.push_to_hub)
    (left_out,) = re.findall(r'ignore_patterns=\["([^"]+)"', source)
    train(made := make_trainer(tmp_path, "bf16", [callback := WatchCallback(quiet=True)], max_steps=1))
    assert callback.scope is not None
    assert fnmatch.fnmatch(str(callback.scope.folder.relative_to(str(made.args.output_dir))), left_out)


def test_the_verdict_is_told_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(make_trainer(tmp_path, "bf16", [WatchCallback()], max_steps=2))
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ampscope: ")]
    assert lines[-1].startswith("ampscope: healthy: No numerical fault in 2 steps; checked: ")
    assert str(tmp_path / "_ampscope") in lines[-1]


def test_nothing_is_left_in_the_process(tmp_path: Path) -> None:
    before = installed()
    made = make_trainer(tmp_path, "fp16", [callback := WatchCallback(quiet=True)], max_steps=2)
    assert made.model is not None
    plain = [type(part) for part in (*made.model.modules(), made.accelerator.scaler)]
    train(made)
    assert installed() == before
    assert [kind for kind, _, _ in dress(made.model, made.accelerator.scaler)] == plain
    assert "closed" in repr(callback.scope)


def test_as_a_context_an_exception_ends_the_run(tmp_path: Path) -> None:
    before = installed()
    with pytest.raises(KeyError), WatchCallback(quiet=True) as callback:
        train(make_trainer(tmp_path, "bf16", [callback, Stopped()]))
    assert installed() == before
    notes = [row.text for row in ampscope.open_run(tmp_path / "_ampscope").rows(Table.EVENTS, kind=EventKind.NOTE)]
    assert notes == ["left by KeyError: 'stopped'"]


def test_the_next_training_ends_what_an_exception_left(tmp_path: Path) -> None:
    stopped = Stopped()
    made = make_trainer(tmp_path, "bf16", [callback := WatchCallback(quiet=True), stopped])
    with contextlib.suppress(KeyError):
        train(made)
    left = callback.scope
    made.remove_callback(stopped)
    train(made)
    assert "closed" in repr(left)
    assert (steps(tmp_path / "_ampscope"), steps(tmp_path / "_ampscope-1")) == ([0, 1], list(range(STEPS)))


def test_options_go_to_watch(tmp_path: Path) -> None:
    train(make_trainer(tmp_path / "out", "bf16", [WatchCallback(quiet=True, dir=tmp_path / "mine", every=2)]))
    traced = [row.step for row in ampscope.open_run(tmp_path / "mine").rows(Table.STEPS) if row.traced]
    assert traced == [0, 2, 4]
    with pytest.raises(WatchError, match="every=-1"):
        train(make_trainer(tmp_path / "out", "bf16", [WatchCallback(every=-1)]))
