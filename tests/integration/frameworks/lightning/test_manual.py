"""The user steps two optimizers in ``training_step``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ampscope
from ampscope.integrations.lightning import WatchCallback
from ampscope.trace.schema import Table
from tests.integration.frameworks.lightning.gan import Gan
from tests.integration.frameworks.lightning.small_lit import (
    Batch,
    alike,
    batches,
    loader,
    scaled,
    trainer,
    weights,
)

PRECISIONS: dict[str, dict[str, Any]] = {"16-mixed": {"plugins": scaled}, "bf16-mixed": {"precision": "bf16-mixed"}}


def fit(
    root: Path,
    data: list[Batch],
    *callbacks: Any,
    toggles: bool = True,
    clips: bool = False,
    unscales: bool = False,
    **options: Any,
) -> list[Tensor]:
    torch.manual_seed(0)
    model = Gan(toggles=toggles, clips=clips, unscales=unscales)
    plugins = options.pop("plugins", None)
    trainer(root, *callbacks, **options, **({"plugins": plugins()} if plugins else {})).fit(model, loader(data))
    return weights(model)


@pytest.mark.parametrize("toggles", [True, False], ids=["toggled", "not toggled"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_optimizers_are_counted_apart(precision: str, toggles: bool, tmp_path: Path) -> None:
    data = batches(6)
    unwatched = fit(tmp_path, data, toggles=toggles, **PRECISIONS[precision])
    callback = WatchCallback(quiet=True)
    assert alike(fit(tmp_path, data, callback, toggles=toggles, **PRECISIONS[precision]), unwatched)
    assert callback.scope is not None
    diagnosis = ampscope.diagnose(callback.scope.folder)
    assert (diagnosis.verdict, diagnosis.incidents, diagnosis.findings) == ("healthy", (), ())
    rows = ampscope.open_run(callback.scope.folder).rows(Table.STEPS)
    assert sorted((row.optimizer, row.step) for row in rows) == [(o, s) for o in range(2) for s in range(6)]
    assert not any(row.skipped for row in rows)


@pytest.mark.parametrize("toggles", [True, False], ids=["toggled", "not toggled"])
def test_the_generator_overflows_and_the_discriminator_steps(toggles: bool, tmp_path: Path) -> None:
    data = batches(8, bad=[4])
    unwatched = fit(tmp_path, data, toggles=toggles, **PRECISIONS["16-mixed"])
    callback = WatchCallback(quiet=True)
    assert alike(fit(tmp_path, data, callback, toggles=toggles, **PRECISIONS["16-mixed"]), unwatched)
    assert callback.scope is not None
    rows = ampscope.open_run(callback.scope.folder).rows(Table.STEPS)
    assert [(row.optimizer, row.step) for row in rows if row.skipped] == [(0, 4)]
    diagnosis = ampscope.diagnose(callback.scope.folder)
    assert diagnosis.findings == ()
    (incident,) = diagnosis.incidents
    assert (incident.step, incident.cause, incident.module) == (4, "fp16_overflow", "generator")
    assert incident.replay == "exact"
    assert incident.source is not None
    assert incident.source.code == "return hidden * hidden"


def test_a_bad_batch_without_a_scaler_is_named(tmp_path: Path) -> None:
    callback = WatchCallback(quiet=True)
    fit(tmp_path, batches(6, bad=[3], value=float("nan")), callback, clips=True, **PRECISIONS["bf16-mixed"])
    assert callback.scope is not None
    first = min(ampscope.diagnose(callback.scope.folder).incidents, key=lambda each: each.step)
    assert (first.step, first.cause, first.replay) == (3, "bad_input", "exact")


def test_gradients_clipped_while_scaled_are_a_mistake_of_the_users(tmp_path: Path) -> None:
    callback = WatchCallback(quiet=True)
    fit(tmp_path, batches(4), callback, clips=True, **PRECISIONS["16-mixed"])
    assert callback.scope is not None
    (finding,) = ampscope.diagnose(callback.scope.folder).findings
    assert finding.cause == "misuse_clip_before_unscale"
    assert finding.source is not None
    assert finding.source.file.endswith("gan.py")
    assert "self.clip_gradients" in finding.source.code
    (remedy,) = finding.remedies
    assert remedy.code.startswith("def on_before_optimizer_step(self, optimizer):\n    self.clip_gradients(")
    assert remedy.diff is None


def test_gradients_unscaled_for_the_wrapper_are_unscaled_twice(tmp_path: Path) -> None:
    callback = WatchCallback(quiet=True)
    fit(tmp_path, batches(4), callback, clips=True, unscales=True, **PRECISIONS["16-mixed"])
    assert callback.scope is not None
    diagnosis = ampscope.diagnose(callback.scope.folder)
    assert diagnosis.verdict == "problem"
    (finding,) = diagnosis.findings
    assert "a second time" in finding.explanation
    assert finding.source is not None
    assert finding.source.code == "plugin.scaler.unscale_(optimizer)"
    assert "on_before_optimizer_step" in finding.remedies[0].code


class ScaledByHand(Gan):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        plugin: Any = self.trainer.precision_plugin
        super().manual_backward(plugin.scaler.scale(loss), *args, **kwargs)


def test_a_loss_that_is_scaled_by_hand_is_scaled_twice(tmp_path: Path) -> None:
    callback = WatchCallback(quiet=True)
    model = ScaledByHand(toggles=True, clips=False)
    trainer(tmp_path, callback, plugins=scaled()).fit(model, loader(batches(4)))
    assert callback.scope is not None
    (finding,) = ampscope.diagnose(callback.scope.folder).findings
    assert "scaled already" in finding.explanation
    assert finding.source is not None
    assert finding.source.code == "super().manual_backward(plugin.scaler.scale(loss), *args, **kwargs)"
    assert finding.remedies[0].code == "self.manual_backward(loss)"
