"""What AMPscope says about each loop: nothing where the loop is right, the user's own line where it is not.

What its parts hear of the loop matches the protocol of steps, which is looked at as it trains.
"""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from ampscope.analysis.results import Diagnosis
from ampscope.trace.schema import ScalerAction, StepRow, Table
from ampscope.trace.vocabulary import Cause, Verdict
from tests.integration.loops import deprecated, plain
from tests.integration.loops.trained import Trained, Watch, exact_state
from tests.integration.step_order.heard import heard
from tests.integration.step_order.protocol import assert_protocol
from tests.support.paths import ROOT as REPOSITORY


def _watched(train: Callable[[Watch], Trained], folder: Path) -> tuple[Trained, ampscope.Run, Diagnosis]:
    scopes: list[ampscope.Scope] = []

    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=folder))

    with heard() as told:
        trained = train(watch)
        scopes[0].close()
    assert_protocol(told)
    run = ampscope.open_run(folder)
    return trained, run, ampscope.diagnose(run)


def _steps(run: ampscope.Run) -> list[StepRow]:
    return run.rows(Table.STEPS)


def _line_of(function: Callable[..., object], code: str) -> int:
    """The line number, in its file, of the one line of ``function`` that contains ``code``."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = (number for number, line in enumerate(lines) if code in line)
    return first + offset


def _assert_healthy(diagnosis: Diagnosis) -> None:
    assert diagnosis.verdict is Verdict.HEALTHY
    assert diagnosis.primary is None
    assert diagnosis.findings == ()
    assert all(incident.cause.is_benign for incident in diagnosis.incidents)


def test_the_recipe_is_healthy_and_its_calibration_is_called_so(run_folder: Path) -> None:
    trained, run, diagnosis = _watched(plain.train, run_folder)
    _assert_healthy(diagnosis)
    assert Cause.BENIGN_INITIAL_CALIBRATION in {incident.cause for incident in diagnosis.incidents}
    rows = _steps(run)
    assert [row.step for row in rows] == list(range(len(trained.losses)))
    assert [row.step for row in rows if row.skipped] == trained.skipped
    assert [row.loss for row in rows] == pytest.approx(trained.losses, rel=1e-6)
    assert rows[0].scale == 65536.0


@pytest.mark.filterwarnings("ignore:`torch.cuda.amp:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning")
def test_the_deprecated_names_are_watched_all_the_same(run_folder: Path) -> None:
    trained, run, diagnosis = _watched(deprecated.train, run_folder)
    assert trained.losses == deprecated.train().losses
    if trained.scaler.is_enabled():
        _assert_healthy(diagnosis)
    else:  # they mean CUDA, and there is none
        assert [each.cause for each in diagnosis.incidents] == []
        assert [each.cause for each in diagnosis.findings] == [Cause.AMP_WITHOUT_EFFECT]
    rows = _steps(run)
    assert [row.loss for row in rows] == pytest.approx(trained.losses, rel=1e-6)
    assert [row.step for row in rows if row.skipped] == trained.skipped
    assert all((row.scale is None) == (not trained.scaler.is_enabled()) for row in rows)


class TestRelation:
    """The BERT-like classifier with gradient accumulation, clipping and a warm-up schedule."""

    @pytest.fixture(autouse=True)
    def needs_transformers(self) -> None:
        pytest.importorskip("transformers")

    def test_the_correct_variant_draws_no_finding(self, run_folder: Path) -> None:
        from tests.integration.loops import relation

        trained, run, diagnosis = _watched(relation.train, run_folder)
        _assert_healthy(diagnosis)
        assert [row.micro_batches for row in _steps(run)] == [relation.ACCUMULATION] * len(trained.losses)

    def test_skips_while_accumulating_draw_no_finding_either(self, run_folder: Path) -> None:
        from tests.integration.loops import relation

        trained, run, diagnosis = _watched(lambda watch: relation.train(watch, init_scale=2.0**24), run_folder)
        _assert_healthy(diagnosis)
        assert [row.step for row in _steps(run) if row.skipped] == trained.skipped != []

    def test_the_variant_from_the_web_is_told_that_it_clips_scaled_gradients(self, run_folder: Path) -> None:
        from tests.integration.loops import relation

        _, _, diagnosis = _watched(relation.train_as_found, run_folder)
        assert diagnosis.verdict is Verdict.PROBLEM
        assert diagnosis.primary is not None
        assert diagnosis.primary.kind == "finding"
        assert diagnosis.primary.cause is Cause.MISUSE_CLIP_BEFORE_UNSCALE
        source = diagnosis.primary.source
        assert source is not None
        assert Path(source.file).name == "relation.py"
        assert source.line == _line_of(relation.train_as_found, "clip_grad_norm_")
        assert source.function == "train_as_found"

    @pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
    def test_the_variant_from_the_web_also_steps_its_schedule_on_skips(self, run_folder: Path) -> None:
        from tests.integration.loops import relation

        _, _, diagnosis = _watched(lambda watch: relation.train_as_found(watch, init_scale=2.0**26), run_folder)
        causes = [finding.cause for finding in diagnosis.findings]
        assert sorted(causes) == [Cause.MISUSE_CLIP_BEFORE_UNSCALE, Cause.MISUSE_SCHEDULER_ORDER]
        assert diagnosis.primary is not None
        assert diagnosis.primary.cause is Cause.MISUSE_CLIP_BEFORE_UNSCALE


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training on the digits that ended after one epoch: its run and its checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    _train(folder, "--epochs", "1")
    return folder


class TestDigits:
    """The convolutional network that is stopped, and resumed in a new process."""

    STEPS = 8  #: in an epoch
    ORDERS = (
        pytest.param((), id="load, watch"),
        pytest.param(("--watch-before-loading",), id="watch, load", marks=pytest.mark.slow),
    )

    @pytest.fixture(autouse=True)
    def needs_sklearn(self) -> None:
        pytest.importorskip("sklearn")

    def test_it_is_healthy(self, run_folder: Path) -> None:
        from tests.integration.loops import digits

        trained, _, diagnosis = _watched(digits.train, run_folder)
        _assert_healthy(diagnosis)
        assert trained.skipped, "the loop is meant to calibrate"

    @pytest.fixture
    def copy(self, stopped: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(stopped, tmp_path / "copy"))

    @pytest.mark.parametrize("order", ORDERS)
    def test_a_resume_in_a_new_process_goes_on_with_the_same_history(self, copy: Path, order: Sequence[str]) -> None:
        _train(copy, "--epochs", "2", "--resume", "--state", copy / "state.json", *order)
        run = ampscope.open_run(copy / "run")
        rows = _steps(run)
        assert [row.step for row in rows] == list(range(2 * self.STEPS))
        assert [row.segment for row in rows] == [0] * self.STEPS + [1] * self.STEPS
        actions = [row.action for row in run.rows(Table.SCALER_EVENTS)]
        assert ScalerAction.STATE_SAVED in actions
        diagnosis = ampscope.diagnose(run)
        _assert_healthy(diagnosis)
        assert diagnosis.run.segments == 2
        _assert_trained_as_if_never_stopped(json.loads((copy / "state.json").read_text()))

    @pytest.mark.parametrize("order", ORDERS)
    def test_a_resume_that_forgets_the_scaler_is_found(self, copy: Path, order: Sequence[str]) -> None:
        _train(copy, "--epochs", "2", "--resume", "--forget-scaler", *order)
        diagnosis = ampscope.diagnose(ampscope.open_run(copy / "run"))
        assert diagnosis.verdict is Verdict.PROBLEM
        assert [finding.cause for finding in diagnosis.findings] == [Cause.MISUSE_SCALER_STATE_NOT_RESTORED]
        assert diagnosis.primary == diagnosis.findings[0]
        assert diagnosis.findings[0].step == self.STEPS


def _assert_trained_as_if_never_stopped(state: dict[str, str]) -> None:
    """``state`` of a watched and resumed training is bit for bit that of one that was neither."""
    from tests.integration.loops import digits

    straight = exact_state(digits.train(epochs=2))
    parts = (".model.", ".grad.", ".optimizer.", ".scaler.")
    expected = {name: bits.hex() for name, bits in straight.items() if name.startswith(parts)}
    assert {name: state.get(name) for name in expected} == expected


def _train(folder: Path, *arguments: str | Path) -> None:
    """Run the digits program, watched, in a process of its own."""
    program = [sys.executable, "-m", "tests.integration.loops.digits"]
    _call([*program, "--run", folder / "run", "--checkpoint", folder / "checkpoint.pt", *arguments])


def _call(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_the_loops_train_unwatched() -> None:
    losses = plain.train().losses
    assert sum(losses[-8:]) < sum(losses[:8]) / 2
    assert torch.isfinite(torch.tensor(losses)).all()
