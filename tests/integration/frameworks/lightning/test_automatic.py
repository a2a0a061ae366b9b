"""Lightning steps the optimizer: healthy trainings stay what they were, a batch that overflows is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn

import ampscope
from ampscope.integrations.lightning import WatchCallback
from ampscope.trace.schema import Table
from tests.integration.frameworks.lightning.small_lit import (
    Batch,
    Classifier,
    alike,
    batches,
    loader,
    scaled,
    trainer,
    weights,
)

#: What a user may ask of a trainer, with what makes a batch of it break.
SETTINGS: dict[str, dict[str, Any]] = {
    "16-mixed": {"plugins": scaled},
    "16-mixed, accumulated and clipped": {
        "plugins": scaled,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
    },
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-mixed, accumulated": {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
    "32": {"precision": "32-true"},
}


def fit(root: Path, data: list[Batch], *callbacks: Any, norm: Any = nn.LayerNorm, **options: Any) -> list[torch.Tensor]:
    """Trains a classifier; its weights afterwards."""
    torch.manual_seed(0)
    model = Classifier(norm)
    plugins = options.pop("plugins", None)
    trainer(root, *callbacks, **options, **({"plugins": plugins()} if plugins else {})).fit(model, loader(data))
    return weights(model)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_healthy_training_stays_what_it_was(setting: str, tmp_path: Path) -> None:
    data = batches(8)
    unwatched = fit(tmp_path, data, norm=nn.BatchNorm1d, **SETTINGS[setting])
    callback = WatchCallback(quiet=True)
    assert alike(fit(tmp_path, data, callback, norm=nn.BatchNorm1d, **SETTINGS[setting]), unwatched)
    assert callback.scope is not None
    diagnosis = ampscope.diagnose(callback.scope.folder)
    assert (diagnosis.verdict, diagnosis.incidents, diagnosis.findings) == ("healthy", (), ())
    steps = 8 // SETTINGS[setting].get("accumulate_grad_batches", 1)
    assert (diagnosis.run.steps, diagnosis.run.skipped) == (steps, 0)


@pytest.mark.parametrize("setting", ["16-mixed", "16-mixed, accumulated and clipped"])
def test_an_overflow_is_named_and_counted_once(setting: str, tmp_path: Path) -> None:
    data = batches(12, bad=[5])
    unwatched = fit(tmp_path, data, **SETTINGS[setting])
    callback = WatchCallback(quiet=True)
    assert alike(fit(tmp_path, data, callback, **SETTINGS[setting]), unwatched)
    assert callback.scope is not None
    diagnosis = ampscope.diagnose(callback.scope.folder)
    accumulated = SETTINGS[setting].get("accumulate_grad_batches", 1)
    assert (diagnosis.run.steps, diagnosis.run.skipped) == (12 // accumulated, 1)
    assert diagnosis.findings == ()
    (incident,) = diagnosis.incidents
    assert (incident.step, incident.cause, incident.op) == (5 // accumulated, "fp16_overflow", "aten.mul.Tensor")
    assert incident.replay == "exact"
    assert incident.source is not None
    assert incident.source.file.endswith("small_lit.py")
    assert incident.source.code == "squared = hidden * hidden"


@pytest.mark.parametrize("setting", ["bf16-mixed", "bf16-mixed, accumulated", "32"])
def test_a_bad_batch_without_a_scaler_is_replayed_before_the_optimizer_writes(setting: str, tmp_path: Path) -> None:
    data = batches(12, bad=[5], value=math.nan)
    unwatched = fit(tmp_path, data, **SETTINGS[setting])
    callback = WatchCallback(quiet=True)
    assert alike(fit(tmp_path, data, callback, **SETTINGS[setting]), unwatched)
    assert callback.scope is not None
    incident = ampscope.diagnose(callback.scope.folder).incidents[0]
    accumulated = SETTINGS[setting].get("accumulate_grad_batches", 1)
    assert (incident.step, incident.cause, incident.replay) == (5 // accumulated, "bad_input", "exact")


def test_a_replay_leaves_the_classes_of_the_loop_as_they_were(tmp_path: Path) -> None:
    fit(tmp_path, batches(4, bad=[1]), WatchCallback(quiet=True), **SETTINGS["16-mixed"])
    assert not hasattr(LightningOptimizer.step, "hooked")
    wrapped = LightningOptimizer(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    assert not hasattr(type(wrapped).step, "hooked")


def test_steps_after_a_skip_are_steps(tmp_path: Path) -> None:
    callback = WatchCallback(quiet=True)
    fit(tmp_path, batches(10, bad=[4]), callback, **SETTINGS["16-mixed"])
    assert callback.scope is not None
    rows = ampscope.open_run(callback.scope.folder).rows(Table.STEPS)
    assert [row.step for row in rows if row.skipped] == [4]


def test_on_a_cpu_without_a_scaler_of_its_own_16_mixed_is_bf16(tmp_path: Path) -> None:
    callback = WatchCallback(quiet=True, every=1)
    fit(tmp_path, batches(2), callback, precision="16-mixed")
    assert callback.scope is not None
    run = ampscope.open_run(callback.scope.folder)
    assert [row.scale for row in run.rows(Table.STEPS)] == [None, None]
    dtypes = {dtype for row in run.rows(Table.SITES) for dtype in row.out_dtypes}
    assert "bfloat16" in dtypes
    assert "float16" not in dtypes
