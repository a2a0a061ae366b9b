"""The callback that watches a ``Trainer`` of Lightning and, as a call, what Fabric has set up."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ampscope
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.torch_support.guard import Guard
from ampscope.errors import RunError, WatchError
from ampscope.integrations._framework_run import holds_run, run_folder, verdict_line

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class FabricRun:
    """The run of a loop with Fabric; a context manager that gives the scope.

    Args:
        fabric: The ``Fabric``, which knows the scaler and where logs go.
        model: What ``fabric.setup`` returned, or several of them.
        options: For `ampscope.watch`.

    Attributes:
        scope: The run.
    """

    def __init__(self, fabric: Any, model: Any, options: dict[str, Any]) -> None:
        self._fabric = fabric
        self._quiet = bool(options.get("quiet", False))
        self._told = False
        scaler = getattr(fabric.strategy.precision, "scaler", None)
        folder = options.get("dir") or self._beside_logs()
        self.scope = ampscope.watch(model, scaler, **{**options, "dir": folder})

    def log(self, step: int | None = None) -> None:
        """Logs the run's figures with ``fabric.log_dict``.

        Args:
            step: Where on the loggers' axis, as for ``fabric.log_dict``.
        """
        self._fabric.log_dict(self.scope.figures().by_name(), step=step)

    def close(self) -> None:
        """Ends the run and tells the verdict. Safe to call twice."""
        self.scope.close()
        if not self._told and not self._quiet and self._fabric.is_global_zero:
            Terminal(self.scope.folder, quiet=False).line(verdict_line(self.scope.folder))
        self._told = True

    def __enter__(self) -> ampscope.Scope:
        return self.scope

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.scope.note(f"left by {type(error).__name__}: {error}")
            self._told = self._told or not isinstance(error, Exception)
        self.close()

    def _beside_logs(self) -> Any:
        """Beside the first logger's files; several ranks may have numbered these differently, and meet above them."""
        for logger in self._fabric.loggers[:1]:
            home = getattr(logger, "log_dir" if self._fabric.world_size == 1 else "root_dir", None)
            if isinstance(home, (str, os.PathLike)):
                return run_folder(home)
        return None


#: Key of the run's folder in a checkpoint.
_FOLDER = "folder"


class WatchCallback(Callback):
    """Watches each ``fit`` of a ``Trainer``; its model, its scaler and the place of its logs are found.

        trainer = Trainer(precision="16-mixed", callbacks=[WatchCallback()])

    A run lies in ``log_dir/ampscope``, beside what the trainer's logger writes; without a logger, below
    ``default_root_dir``. A ``fit`` that resumes from a checkpoint (``ckpt_path=``) goes on in the run that the
    checkpoint was made in, where that is still there. Every ``log_every_n_steps`` the trainer's loggers get
    the run's figures (``ampscope/loss_scale`` and the others of `LiveFigures`), and the end of ``fit`` tells the
    verdict. Every rank records its own part; ranks exchange nothing for it.

    With Fabric, call it with what ``fabric.setup`` returned:

        with WatchCallback()(fabric, model):
            ...  # the loop

    Args:
        log: Whether figures go to the trainer's loggers.
        options: For `ampscope.watch`: ``every``, ``overhead``, ``dir`` and so on.

    Attributes:
        scope: The run of the latest ``fit``; None before the first.
    """

    def __init__(self, *, log: bool = True, **options: Any) -> None:
        self.scope: ampscope.Scope | None = None
        self._log = log
        self._options = options
        self._open = False
        self._folder: Path | None = None  # of the latest run
        self._trainer: weakref.ref[Any] | None = None  # that it is of
        self._resumed = False  # by a checkpoint, whoever its trainer was
        self._guard = Guard("the figures in Lightning's log", self._note)

    def __call__(self, fabric: Any, model: Any) -> FabricRun:
        """Watches what Fabric has set up, until the returned context is left.

        Args:
            fabric: The ``Fabric``.
            model: What ``fabric.setup`` returned for the model, or several of them.

        Raises:
            WatchError: The options cannot be honoured, or the model cannot be watched.
        """
        return FabricRun(fabric, model, self._options)

    # -- the life of a fit ----------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins a run, or goes on with the one of the checkpoint.

        Raises:
            WatchError: The options cannot be honoured, or the model cannot be watched.
        """
        if not trainer.strategy.restore_checkpoint_after_setup:  # else this callback's own state is still to come
            self._begin(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins the run at the latest here."""
        if not self._open:
            self._begin(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Hands the run's figures to the loggers, when it is their turn."""
        if not self._log or not self._open or self.scope is None or self._guard.broken:
            return
        with self._guard:
            if trainer._logger_connector.should_update_logs:
                for logger in trainer.loggers:
                    logger.log_metrics(
                        self.scope.figures().by_name(), step=trainer.fit_loop.epoch_loop._batches_that_stepped
                    )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the run while the model is still where it was trained."""
        self.close()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Tells the verdict."""
        self._tell_verdict(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the run; tells the verdict unless the user is in a hurry."""
        if self._open and self.scope is not None:
            self.scope.note(f"left by {type(exception).__name__}: {exception}")
            self.close()
            if isinstance(exception, Exception):
                self._tell_verdict(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ends a run that nothing else has ended."""
        self.close()

    def close(self) -> None:
        """Ends the run in progress, if there is one. Safe to call twice."""
        if self._open and self.scope is not None:
            self.scope.close()
        self._open = False

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the callback's state for a checkpoint: the run that it was made in."""
        return {_FOLDER: str(self._folder)} if self._folder is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has the next ``fit`` go on in the run that the checkpoint was made in."""
        folder = state_dict.get(_FOLDER)
        if isinstance(folder, str):
            self._folder, self._resumed = Path(folder), True

    # -- beginning and end ----------------------------------------------------------------------------------------

    def _begin(self, trainer: Any) -> None:
        self.close()
        same = self._resumed or (self._trainer is not None and self._trainer() is trainer)
        self._resumed = False
        self.scope = self._continued(trainer) if same else None
        if self.scope is None:
            self.scope = self._watch(trainer, self._options.get("dir") or new_run_folder(trainer))
        self._folder, self._trainer = self.scope.folder.absolute(), weakref.ref(trainer)
        self._open = True

    def _continued(self, trainer: Any) -> ampscope.Scope | None:
        """The run that this training began in; None where it cannot be gone on with: another process has done so."""
        if self._options.get("dir") is not None or self._folder is None or not holds_run(self._folder):
            return None
        with contextlib.suppress(RunError, WatchError):
            return self._watch(trainer, self._folder)
        return None

    def _watch(self, trainer: Any, folder: Any) -> ampscope.Scope:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return ampscope.watch(trainer.model, scaler, **{**self._options, "dir": folder})

    def _note(self, text: str) -> None:
        if self.scope is not None:
            self.scope.note(text)

    def _tell_verdict(self, trainer: Any) -> None:
        if self.scope is not None and trainer.is_global_zero and not self._options.get("quiet", False):
            Terminal(self.scope.folder, quiet=False).line(verdict_line(self.scope.folder))


def new_run_folder(trainer: Any) -> Path:
    """Returns the folder of a trainer's new run, the same on every rank.

    ``trainer.log_dir`` asks the other ranks, and AMPscope never communicates within a training. Where there are
    several, the place of the checkpoints tells what they have agreed upon.
    """
    if trainer.world_size == 1:
        return run_folder(_experiment_folder(trainer) or trainer.default_root_dir)
    checkpoints = getattr(trainer.checkpoint_callback, "dirpath", None)
    if checkpoints is not None and Path(checkpoints).name == "checkpoints":
        return run_folder(Path(checkpoints).parent)
    return run_folder(trainer.default_root_dir)


def _experiment_folder(trainer: Any) -> Path | None:
    """The folder in which the first logger keeps this training apart from others."""
    for logger in trainer.loggers[:1]:
        folder = getattr(logger, "log_dir", None)
        if isinstance(folder, (str, os.PathLike)):
            return Path(folder)
    return None
