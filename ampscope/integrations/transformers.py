"""The callback that watches a ``Trainer`` of transformers."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import ampscope
from ampscope.capture.hooks.amp_objects import as_called
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.torch_support.guard import Guard
from ampscope.integrations._framework_run import calling, run_folder, verdict_line

#: Name of a run in ``output_dir``: with an underscore, it stays out of what ``push_to_hub`` uploads from there.
NAME = "_ampscope"


class WatchCallback(TrainerCallback):
    """Watches each training of a ``Trainer``, from ``on_train_begin`` to ``on_train_end``.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[WatchCallback()])

    The model as the loop calls it (compiled, ``DistributedDataParallel``) and the scaler are found. A run lies in
    ``output_dir/_ampscope``; a training that resumes from a checkpoint goes on in the newest run there, any other
    begins a new one. With every loss the trainer logs the run's figures (``ampscope/loss_scale`` and the
    others of `LiveFigures`), and at the end the verdict is told.

    A training that an exception leaves is watched until the next one begins or the process ends; as a context
    manager, the callback ends it there and then.

    Args:
        log: Whether figures are added to the trainer's log.
        options: For `ampscope.watch`: ``every``, ``overhead``, ``dir`` and so on.

    Attributes:
        scope: The run of the latest training; None before the first.
    """

    def __init__(self, *, log: bool = True, **options: Any) -> None:
        self.scope: ampscope.Scope | None = None
        self._log = log
        self._options = options
        self._open: ampscope.Scope | None = None
        self._guard = Guard("the figures in the trainer's log", self._note)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Begins a run, or goes on with that of the checkpoint.

        Raises:
            WatchError: The options cannot be honoured, or this model cannot be watched.
        """
        self.close()
        trainer = calling(self._is_called_by)
        if trainer is not None:
            self._log_before_others(trainer)
        called = getattr(trainer, "model_wrapped", None)
        folder = self._options.get("dir") or self._run_folder(args, state)
        self.scope = self._open = ampscope.watch(
            called if called is not None else as_called(model),
            getattr(optimizer, "scaler", None),
            **{**self._options, "dir": folder},
        )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds the run's figures to the log of a training step."""
        if not self._log or self._open is None or logs is None or "loss" not in logs:
            return
        with self._guard:
            figures = self._open.figures().by_name()
            logs.update(figures)
            if state.log_history:
                state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the run and tells the verdict."""
        ended = self._open
        self.close()
        if ended is not None and state.is_world_process_zero and not self._options.get("quiet", False):
            Terminal(ended.folder, quiet=False).line(verdict_line(ended.folder))

    def close(self) -> None:
        """Ends the run in progress, if there is one. Safe to call twice."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def __enter__(self) -> WatchCallback:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._note(f"left by {type(error).__name__}: {error}")
        self.close()

    def _run_folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        return run_folder(str(args.output_dir), resume=state.global_step > 0, name=NAME)

    def _is_called_by(self, thing: object) -> bool:
        return isinstance(thing, Trainer) and self in thing.callback_handler.callbacks

    def _log_before_others(self, trainer: Trainer) -> None:
        """Comes first among the callbacks, so that all who report a log find the figures in it."""
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)

    def _note(self, text: str) -> None:
        if self._open is not None:
            self._open.note(text)
