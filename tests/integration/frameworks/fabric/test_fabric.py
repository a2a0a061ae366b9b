"""Fabric around a loop of the user's: replays pass its guard on backward, names and lines are the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.loggers.csv_logs import CSVLogger

import ampscope
from ampscope.integrations.lightning import WatchCallback
from tests.integration.frameworks.fabric.small_fabric import (
    BAD,
    LARGE,
    STEPS,
    alike,
    fabric,
    train,
    unwatched,
)

PRECISIONS = ["16-mixed", "bf16-mixed", "32-true"]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_healthy_training_stays_what_it_was(precision: str, micro_batches: int, tmp_path: Path) -> None:
    expected = train(fabric(precision), unwatched, micro_batches=micro_batches)
    watch = WatchCallback(quiet=True, dir=tmp_path / "run")
    assert alike(train(fabric(precision), watch, micro_batches=micro_batches), expected)
    diagnosis = ampscope.diagnose(tmp_path / "run")
    assert (diagnosis.verdict, diagnosis.incidents, diagnosis.findings) == ("healthy", (), ())
    assert (diagnosis.run.steps, diagnosis.run.skipped, diagnosis.run.model) == (STEPS, 0, "Net")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_overflow_is_named(micro_batches: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"bad": LARGE, "micro_batches": micro_batches}
    expected = train(fabric("16-mixed"), unwatched, **options)
    watch = WatchCallback(quiet=True, dir=tmp_path / "run")
    assert alike(train(fabric("16-mixed"), watch, **options), expected)
    diagnosis = ampscope.diagnose(tmp_path / "run")
    assert (diagnosis.run.steps, diagnosis.run.skipped, diagnosis.findings) == (STEPS, 1, ())
    (incident,) = diagnosis.incidents
    assert (incident.step, incident.cause, incident.op, incident.replay) == (
        BAD,
        "fp16_overflow",
        "aten.mul.Tensor",
        "exact",
    )
    assert incident.source is not None
    assert incident.source.code == "squared = hidden * hidden"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_poisoned_batch_is_named(precision: str, tmp_path: Path) -> None:
    train(fabric(precision), WatchCallback(quiet=True, dir=tmp_path / "run"), bad=float("nan"))
    first = min(ampscope.diagnose(tmp_path / "run").incidents, key=lambda each: each.step)
    assert (first.step, first.cause, first.replay) == (BAD, "bad_input", "exact")
    assert first.source is not None
    assert first.source.file.endswith("small_fabric.py")


def test_watch_itself_takes_what_fabric_has_set_up(tmp_path: Path) -> None:
    made = fabric("bf16-mixed")
    train(made, lambda _, model: ampscope.watch(model, dir=tmp_path / "run", quiet=True), bad=float("nan"))
    first = min(ampscope.diagnose(tmp_path / "run").incidents, key=lambda each: each.step)
    assert (first.step, first.replay) == (BAD, "exact")


def test_the_run_lies_beside_the_log_and_says_its_verdict(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = CSVLogger(tmp_path, name="logs")
    made = fabric("16-mixed", loggers=logger)
    train(made, WatchCallback(), bad=LARGE)
    folder = Path(logger.log_dir) / "ampscope"
    assert ampscope.diagnose(folder).run.steps == STEPS
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ampscope: ")]
    assert told[-1].startswith("ampscope: problem: Step 5")
    assert told[-1].endswith(str(folder))


def test_figures_are_logged_when_the_loop_asks(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    made = fabric("16-mixed", loggers=logger)
    runs = []

    def watch(made: Any, model: Any) -> Any:
        runs.append(WatchCallback(quiet=True)(made, model))
        return runs[-1]

    train(made, watch)
    runs[0].log(step=STEPS)
    logger.save()
    header, line = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    logged = dict(zip(header.split(","), line.split(","), strict=True))
    assert (logged["step"], logged["ampscope/loss_scale"], logged["ampscope/skipped_share"]) == (
        str(STEPS),
        "256.0",
        "0.0",
    )


def test_a_loop_that_fails_is_closed(tmp_path: Path) -> None:
    def fails(model: Any, x: Any, y: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(fabric("32-true"), WatchCallback(quiet=True, dir=tmp_path / "run"), loss_of=fails)
    assert ampscope.open_run(tmp_path / "run").manifest.closed is not None


def test_clipping_by_torch_is_mended_in_terms_of_fabric(tmp_path: Path) -> None:
    train(fabric("16-mixed"), WatchCallback(quiet=True, dir=tmp_path / "run"), clips_itself=True)
    (finding,) = ampscope.diagnose(tmp_path / "run").findings
    assert finding.cause == "misuse_clip_before_unscale"
    assert finding.remedies[0].code.startswith("fabric.clip_gradients(model, optimizer")
