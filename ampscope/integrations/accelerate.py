"""The tracker with which an ``Accelerator`` watches what it has prepared."""

from __future__ import annotations

import json
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

import ampscope
from ampscope.capture.record.terminal import Terminal
from ampscope.capture.torch_support.guard import Guard
from ampscope.errors import WatchError
from ampscope.integrations._framework_run import calling, run_folder, verdict_line


class WatchTracker(GeneralTracker):  # type: ignore[misc]  # accelerate ships no types
    """Watches what an accelerator has prepared, from ``init_trackers`` to ``end_training``.

        accelerator = Accelerator(log_with=[WatchTracker(), "tensorboard"], project_dir="logs")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.init_trackers("my-project", config={"lr": 1e-3})

    The run lies in ``logging_dir/ampscope`` where the accelerator has a project folder, else below
    ``./ampscope_runs``. The configuration becomes a note of the run. With each ``accelerator.log``, its other
    trackers log the run's figures (``ampscope/loss_scale`` and the others of `LiveFigures`) too, and ``end_training``
    tells the verdict.

    Args:
        options: For `ampscope.watch`: ``every``, ``overhead``, ``dir`` and so on.

    Attributes:
        scope: The run; None before ``init_trackers``.
    """

    name = "ampscope"
    requires_logging_directory = False
    main_process_only = False  # every rank records its own part

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.scope: ampscope.Scope | None = None
        self._options = options
        self._accelerator: Any = None
        self._guard = Guard("what the accelerator's trackers are told", self._note)

    @property
    def tracker(self) -> ampscope.Scope | None:
        """The scope, for ``accelerator.get_tracker("ampscope", unwrap=True)``."""
        return self.scope

    def start(self) -> None:
        """Begins the run; called by ``init_trackers``.

        Raises:
            WatchError: Nothing was prepared yet, or the options cannot be honoured.
        """
        self._accelerator = calling(lambda thing: isinstance(thing, Accelerator) and self in thing.trackers)
        if self._accelerator is None:
            raise WatchError("WatchTracker is started by accelerator.init_trackers, after accelerator.prepare")
        home = self._accelerator.logging_dir
        folder = self._options.get("dir") or (run_folder(home) if home is not None else None)
        self.scope = ampscope.watch(self._accelerator, **{**self._options, "dir": folder})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Notes the configuration on the run's time line."""
        with self._guard:
            self._note(f"configuration: {json.dumps(values, default=str)}")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Has the accelerator's other trackers log the run's figures at this step."""
        if self.scope is None or self._guard.broken:
            return
        with self._guard:
            figures = self.scope.figures().by_name()
            for other in self._accelerator.trackers:
                if other is not self:
                    other.log(figures, step=step)

    def finish(self) -> None:
        """Ends the run and tells the verdict; called by ``end_training``."""
        if self.scope is None:
            return
        self.scope.close()
        if self._accelerator.is_main_process and not self._options.get("quiet", False):
            Terminal(self.scope.folder, quiet=False).line(verdict_line(self.scope.folder))
        self.scope = None

    def _note(self, text: str) -> None:
        if self.scope is not None:
            self.scope.note(text)
