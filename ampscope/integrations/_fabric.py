"""A watched training with Lightning's Fabric, whose loop is the user's own."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import ampscope
from ampscope.capture.record.terminal import Terminal
from ampscope.integrations._run_folder import run_folder
from ampscope.integrations._verdict_line import verdict_line


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
