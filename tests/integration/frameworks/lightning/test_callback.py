"""What `WatchCallback` does around a fit: where the run goes, what is logged, and when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import pytorch_lightning
from lightning.pytorch.loggers import CSVLogger

import ampscope
from ampscope.errors import WatchError
from ampscope.integrations.lightning import WatchCallback
from ampscope.trace.schema import EventKind, Table
from tests.integration.frameworks.lightning.small_lit import Classifier, batches, loader, scaled, trainer


class Stops(pl.Callback):
    """Leaves the training by an exception."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise self.error


def steps(folder: Path) -> list[int]:
    return [row.step for row in ampscope.open_run(folder).rows(Table.STEPS)]


def kinds(folder: Path) -> list[str]:
    wanted = (EventKind.START, EventKind.RESUME, EventKind.NOTE, EventKind.CLOSE)
    return [row.kind for row in ampscope.open_run(folder).rows(Table.EVENTS) if row.kind in wanted]


def test_the_run_lies_beside_the_log_and_the_figures_are_in_it(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="logs")
    fitted = trainer(tmp_path, WatchCallback(quiet=True), logger=logger, plugins=scaled(), log_every_n_steps=2)
    fitted.fit(Classifier(), loader(batches(8, bad=[3])))
    assert steps(Path(logger.log_dir) / "ampscope") == list(range(8))
    header, *lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    logged = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    last = [row for row in logged if row.get("ampscope/loss_scale")][-1]
    assert last["step"] == "7"
    assert float(last["ampscope/loss_scale"]) == 128.0
    assert float(last["ampscope/skipped_share"]) == pytest.approx(1 / 8)
    assert 0 <= float(last["ampscope/observing_share"]) <= 1


def test_a_log_without_figures(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fitted = trainer(tmp_path, WatchCallback(quiet=True, log=False), logger=logger, log_every_n_steps=1)
    fitted.fit(Classifier(), loader(batches(2)))
    assert "ampscope" not in (Path(logger.log_dir) / "metrics.csv").read_text()


def test_without_a_logger_the_run_lies_in_the_root(tmp_path: Path) -> None:
    for expected in ("ampscope", "ampscope-1"):
        callback = WatchCallback(quiet=True)
        trainer(tmp_path, callback).fit(Classifier(), loader(batches(2)))
        assert callback.scope is not None
        assert callback.scope.folder == tmp_path / expected


def test_options_are_those_of_watch(tmp_path: Path) -> None:
    callback = WatchCallback(quiet=True, dir=tmp_path / "mine", every=1, name="named")
    trainer(tmp_path, callback).fit(Classifier(), loader(batches(2)))
    run = ampscope.open_run(tmp_path / "mine")
    assert (run.manifest.name, run.manifest.configuration["every"]) == ("named", 1)
    with pytest.raises(WatchError, match="every"):
        trainer(tmp_path, WatchCallback(every=-1)).fit(Classifier(), loader(batches(2)))


def test_a_resumed_training_goes_on_in_its_run(tmp_path: Path) -> None:
    data = batches(4)
    first = trainer(tmp_path, WatchCallback(quiet=True), plugins=scaled(), logger=CSVLogger(tmp_path))
    first.fit(Classifier(), loader(data))
    first.save_checkpoint(tmp_path / "saved.ckpt")
    callback = WatchCallback(quiet=True)
    second = trainer(tmp_path, callback, plugins=scaled(), logger=CSVLogger(tmp_path), max_epochs=2)
    second.fit(Classifier(), loader(data), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    folder = Path(first.loggers[0].log_dir or "") / "ampscope"
    assert callback.scope is not None
    assert callback.scope.folder == folder
    assert steps(folder) == list(range(8))
    assert kinds(folder) == ["start", "close", "resume", "close"]
    diagnosis = ampscope.diagnose(folder)
    assert (diagnosis.verdict, diagnosis.findings) == ("healthy", ())


def test_a_run_that_is_gone_is_not_gone_on_with(tmp_path: Path) -> None:
    callback = WatchCallback(quiet=True)
    callback.load_state_dict({"folder": str(tmp_path / "elsewhere")})
    trainer(tmp_path, callback).fit(Classifier(), loader(batches(2)))
    assert steps(tmp_path / "ampscope") == [0, 1]


def test_another_fit_of_the_same_trainer_is_the_same_run(tmp_path: Path) -> None:
    fitted, model = trainer(tmp_path, WatchCallback(quiet=True)), Classifier()
    fitted.fit(model, loader(batches(2)))
    fitted.fit_loop.max_epochs = 2
    fitted.fit(model, loader(batches(2)))
    assert kinds(tmp_path / "ampscope") == ["start", "close", "resume", "close"]
    assert steps(tmp_path / "ampscope") == [0, 1, 2, 3]


def test_the_verdict_is_told_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, WatchCallback()).fit(Classifier(), loader(batches(2)))
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ampscope: ")]
    assert lines[-1].startswith("ampscope: healthy: ")
    assert lines[-1].endswith(f"Look: ampscope diagnose {tmp_path / 'ampscope'}")


@pytest.mark.parametrize("error", [KeyError("stopped"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_training_that_is_stopped_is_closed(error: BaseException, tmp_path: Path) -> None:
    model = Classifier()
    callback = WatchCallback(quiet=True)
    with pytest.raises((type(error), SystemExit)):
        trainer(tmp_path, callback, Stops(error)).fit(model, loader(batches(5)))
    assert kinds(tmp_path / "ampscope") == ["start", "note", "close"]
    assert steps(tmp_path / "ampscope") == [0, 1, 2]
    assert type(model) is Classifier
    assert "ampscope" not in type(model.first).__mro__[0].__dict__.get("__module__", "")


def test_the_other_package_of_lightning(tmp_path: Path) -> None:
    class Twin(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Classifier()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.inner(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return self.inner.configure_optimizers()

    fitted = pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=cast(Any, [WatchCallback(quiet=True)]),
    )
    fitted.fit(Twin(), loader(batches(3)))
    assert steps(tmp_path / "ampscope") == [0, 1, 2]
    assert ampscope.diagnose(tmp_path / "ampscope").verdict == "healthy"
