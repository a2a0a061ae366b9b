"""Calls of `ampscope.watch` that are refused: each says what to do, and nothing is installed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import ampscope
from ampscope.errors import AmpscopeError, WatchError
from tests.support.training.small_loop import make_scaler, mlp
from tests.support.training.torch_state import installed

#: `ampscope.watch` for calls that no type checker would let pass.
WATCH: Callable[..., Any] = ampscope.watch


class TestRefusals:
    """Only the user's own mistakes raise; each names what to do, and nothing is installed."""

    CALLS: ClassVar[dict[str, Callable[[Path, nn.Module], Any]]] = {
        "no model": lambda folder, model: WATCH(None),
        "a class": lambda folder, model: WATCH(nn.Linear),
        "parameters": lambda folder, model: WATCH(model.parameters()),
        "an empty list": lambda folder, model: WATCH([]),
        "an empty dict": lambda folder, model: WATCH({}),
        "a mixed list": lambda folder, model: WATCH([model, 3]),
        "arguments swapped": lambda folder, model: WATCH(make_scaler(), model),
        "an optimizer as scaler": lambda folder, model: WATCH(model, torch.optim.SGD(model.parameters())),
        "a foreign scaler": lambda folder, model: WATCH(model, object()),
        "the scaler's class": lambda folder, model: WATCH(model, torch.amp.GradScaler),
        "another model's optimizer": lambda folder, model: WATCH(model, optimizer=torch.optim.SGD(mlp().parameters())),
        "an optimizer's name": lambda folder, model: WATCH(model, optimizer="adam"),
        "an optimizer's class": lambda folder, model: WATCH(model, optimizer=torch.optim.Adam),
        "every=-1": lambda folder, model: WATCH(model, every=-1),
        "every=1.5": lambda folder, model: WATCH(model, every=1.5),
        "every=True": lambda folder, model: WATCH(model, every=True),
        "every='all'": lambda folder, model: WATCH(model, every="all"),
        "overhead=2": lambda folder, model: WATCH(model, overhead=2),
        "overhead=nan": lambda folder, model: WATCH(model, overhead=float("nan")),
        "overhead='low'": lambda folder, model: WATCH(model, overhead="low"),
        "disk_budget=5": lambda folder, model: WATCH(model, disk_budget=5),
        "disk_budget=2e9": lambda folder, model: WATCH(model, disk_budget=2e9),
        "a file as folder": lambda folder, model: WATCH(model, dir=folder / "file"),
        "a folder below a file": lambda folder, model: WATCH(model, dir=folder / "file" / "run"),
        "a folder that cannot be made": lambda folder, model: WATCH(model, dir="/proc/no/such"),
        "a number as folder": lambda folder, model: WATCH(model, dir=5),
        "a lazy model": lambda folder, model: WATCH(nn.LazyLinear(3), dir=folder / "lazy"),
    }

    @pytest.mark.parametrize("call", CALLS)
    def test_a_wrong_call(self, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "file").write_text("in the way")
        model, before, threads = mlp(), installed(), threading.active_count()
        with pytest.raises(WatchError) as caught:
            self.CALLS[call](tmp_path, model)
        assert len(str(caught.value)) > 30, "says what is wrong and what to do"
        assert isinstance(caught.value, AmpscopeError)
        assert installed() == before
        assert [type(module) for module in model.modules()] == [type(module) for module in mlp().modules()]
        assert threading.active_count() == threads
        assert not (tmp_path / "ampscope_runs").exists()

    @pytest.mark.parametrize("part", ["a submodule", "a wrapper", "the model and another"])
    def test_a_second_watch_of_a_part_of_the_model(self, part: str, watch: Any, tmp_path: Path) -> None:
        model = mlp()
        scope = watch(model)
        others = {"a submodule": model[0], "a wrapper": nn.Sequential(model), "the model and another": [model, mlp()]}
        again: Any = others[part]
        between = installed()
        with pytest.raises(WatchError, match=r"already watched.*close"):
            ampscope.watch(again, dir=tmp_path / "second")
        assert installed() == between
        assert str(scope.folder) in repr(scope)

    def test_a_folder_that_another_process_writes(self, tmp_path: Path) -> None:
        from ampscope.trace.files.folder_lock import FolderLock

        (tmp_path / "rank=0").mkdir()
        lock = FolderLock(tmp_path / "rank=0")
        with pytest.raises(WatchError, match="another process is writing this run"):
            ampscope.watch(mlp(), dir=tmp_path)
        lock.release()

    def test_a_folder_that_may_not_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Permissions do not stop a superuser, so the refusal is played."""

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied")

        before = installed()
        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(WatchError, match="Permission denied"):
            ampscope.watch(mlp(), dir=tmp_path / "run")
        assert installed() == before
