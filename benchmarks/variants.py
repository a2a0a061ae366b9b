"""Who looks on: nobody, AMPscope, and the tools that people use today. Each has a training of its own."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from workload import Place, Size, Training


class Unavailable(Exception):
    """A variant that cannot be measured here; the message says why."""


class Variant:
    """A training that is stepped in blocks; subclasses say what looks on."""

    def __init__(self, size: Size, place: Place) -> None:
        self.training = Training(size, place)

    def around_block(self) -> contextlib.AbstractContextManager[object]:
        """Entered before a block of steps and left after it; whatever is process-wide belongs here."""
        return contextlib.nullcontext()

    def step(self) -> None:
        self.training.step()

    def close(self) -> dict[str, Any]:
        """Take the onlooker away; returns facts worth reporting."""
        return {}


class AmpscopeDefault(Variant):
    """``ampscope.watch(model, scaler)``: a scope that stays open, as it does in a training script."""

    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, size: Size, place: Place) -> None:
        super().__init__(size, place)
        try:
            watch = importlib.import_module("ampscope").watch
        except ImportError as missing:
            raise Unavailable(str(missing)) from missing
        self.folder = tempfile.TemporaryDirectory()
        run = Path(self.folder.name) / "run"
        self.scope = watch(self.training.model, self.training.scaler, dir=run, **self.options)

    def close(self) -> dict[str, Any]:
        self.scope.close()
        written = sum(file.stat().st_size for file in self.scope.folder.rglob("*") if file.is_file())
        self.folder.cleanup()
        return {"trace_bytes": written}


class AmpscopeEveryStep(AmpscopeDefault):
    """``ampscope.watch(model, scaler, every=1)``: each step traced op by op."""

    options = MappingProxyType({"every": 1})


class AmpscopeLogged(AmpscopeDefault):
    """``ampscope.watch(model, scaler, log_to=TensorBoard(folder))``: figures go there at one step in ten."""

    def __init__(self, size: Size, place: Place) -> None:
        self.events = tempfile.TemporaryDirectory()
        try:
            tracker = importlib.import_module("ampscope.integrations.trackers").TensorBoard
            importlib.import_module("torch.utils.tensorboard")
        except ImportError as missing:
            raise Unavailable(str(missing)) from missing
        self.options = MappingProxyType({"log_to": tracker(self.events.name)})
        super().__init__(size, place)

    def close(self) -> dict[str, Any]:
        facts = super().close()
        self.events.cleanup()
        return facts


class Anomaly(Variant):
    """``torch.autograd.set_detect_anomaly(True, check_nan=True)``."""

    def around_block(self) -> contextlib.AbstractContextManager[object]:
        return torch.autograd.set_detect_anomaly(True, check_nan=True)


class DebugModeRecords(Variant):
    """torch's ``DebugMode``, one a step, as it keeps every record: which ops ran, without values."""

    def __init__(self, size: Size, place: Place) -> None:
        super().__init__(size, place)
        try:
            self.mode = importlib.import_module("torch.utils._debug_mode").DebugMode
        except ImportError as missing:
            raise Unavailable(str(missing)) from missing

    def step(self) -> None:
        with self.mode():
            self.training.step()


class DebugModeHashes(DebugModeRecords):
    """``DebugMode`` with a hash of every output: the nearest it has to a tensor's statistics."""

    def step(self) -> None:
        with self.mode(), self.mode.log_tensor_hashes():
            self.training.step()


class UnderflowOverflow(Variant):
    """Transformers' ``DebugUnderflowOverflow``: hooks on each module, forward only."""

    def __init__(self, size: Size, place: Place) -> None:
        super().__init__(size, place)
        try:
            debug = importlib.import_module("transformers.debug_utils")
        except ImportError as missing:
            raise Unavailable(str(missing)) from missing
        self.debug = debug.DebugUnderflowOverflow(self.training.model)


UNWATCHED = "unwatched"
VARIANTS: dict[str, Callable[[Size, Place], Variant]] = {
    UNWATCHED: Variant,
    "ampscope": AmpscopeDefault,
    "ampscope every=1": AmpscopeEveryStep,
    "ampscope log_to": AmpscopeLogged,
    "detect_anomaly": Anomaly,
    "DebugMode": DebugModeRecords,
    "DebugMode + hashes": DebugModeHashes,
    "DebugUnderflowOverflow": UnderflowOverflow,
}
