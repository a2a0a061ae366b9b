"""Files that the loop saves its state to are taken down, and saving stays what it was."""

from __future__ import annotations

import inspect
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ampscope
from ampscope.trace.schema import EventKind, Table
from tests.support.training.small_models import TwoLayers
from tests.support.training.torch_state import installed
from tests.support.training.training_loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("strict_guards")


class Files:
    """A watched training that saves, and what was taken down of it."""

    def __init__(self, watch: Any, folder: Path) -> None:
        self.loop = TrainingLoop()
        adam: Any = torch.optim.AdamW(self.loop.model.parameters(), 0.01)
        self.loop.optimizer = adam
        self.scope = watch(self.loop.model, self.loop.scaler)
        self.folder = folder

    @property
    def seen(self) -> list[dict[str, Any]]:
        self.scope.close()
        rows = ampscope.open_run(self.scope.folder).rows(Table.EVENTS, kind=EventKind.SAVED)
        return [json.loads(row.text) for row in rows]

    def path(self, name: str = "a.pt") -> str:
        return str(self.folder / name)


@pytest.fixture
def files(watch: Any, tmp_path: Path) -> Files:
    torch.manual_seed(0)
    return Files(watch, tmp_path)


class TestWhatIsTakenDown:
    def test_weights_and_optimizer_in_a_nested_dict(self, files: Files) -> None:
        files.loop.step(3)
        states = {"model": files.loop.model.state_dict(), "optimizer": files.loop.optimizer.state_dict()}
        torch.save({"step": 3, "states": states}, files.path())
        held = ["weights", "optimizer"]
        assert files.seen == [{"path": files.path(), "holds": held, "after": {"0": 2}, "open": False, "whole": held}]

    @pytest.mark.parametrize(
        ("part", "holds"),
        [
            (lambda loop: loop.model.state_dict(), ["weights"]),
            (lambda loop: loop.model, ["weights"]),
            (lambda loop: {"net": loop.model}, ["weights"]),
            (lambda loop: nn.ModuleList([loop.model]), ["weights"]),
            (lambda loop: loop.model.first.weight.detach()[:1], ["weights"]),
            (lambda loop: loop.optimizer.state_dict(), ["optimizer"]),
            (lambda loop: (1, [loop.optimizer]), []),
            (lambda loop: loop.optimizer, ["optimizer"]),
            (lambda loop: {"loss": 3.0, "x": torch.ones(3)}, []),
            (lambda loop: TwoLayers().state_dict(), []),
            (lambda loop: torch.eye(3).to_sparse(), []),
            (lambda loop: None, []),
        ],
    )
    def test_whose_memory_it_is(self, files: Files, part: Callable[[TrainingLoop], Any], holds: list[str]) -> None:
        files.loop.step(2)
        torch.save(part(files.loop), files.path())
        assert [each["holds"] for each in files.seen] == ([holds] if holds else [])

    def test_a_part_is_not_the_whole(self, files: Files) -> None:
        files.loop.step(2)
        first: Any = files.loop.model.first
        torch.save(first.state_dict(), files.path())
        assert [(each["holds"], each["whole"]) for each in files.seen] == [(["weights"], [])]

    def test_safetensors(self, files: Files) -> None:
        files.loop.step()
        safetensors.torch.save_file(files.loop.model.state_dict(), filename=files.path("a.safetensors"))
        assert files.seen[0]["path"] == files.path("a.safetensors")

    def test_an_open_file_has_a_path_and_memory_has_none(
        self, files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        files.loop.step()
        torch.save(files.loop.model.state_dict(), io.BytesIO())
        with Path("b.pt").open("wb") as file:
            torch.save(files.loop.model.state_dict(), file)
        torch.save(obj=files.loop.model.state_dict(), f=Path("c.pt"))
        assert [each["path"] for each in files.seen] == [str(tmp_path / "b.pt"), str(tmp_path / "c.pt")]

    def test_credentials_are_left_out_of_paths(self, files: Files) -> None:
        files.loop.step()
        torch.save(files.loop.model, files.path("x hf_aBcDeFgH1234567890"))
        assert files.seen[0]["path"] == files.path("x ...redacted")

    def test_before_the_first_step_and_within_one(self, files: Files) -> None:
        torch.save(files.loop.model, files.path())
        files.loop.step()
        files.loop.loss().backward()
        torch.save(files.loop.model, files.path())
        assert [(each["after"], each["open"]) for each in files.seen] == [({"0": -1}, False), ({"0": 0}, True)]

    def test_where_saving_failed_there_is_no_file(self, files: Files) -> None:
        files.loop.step()
        with pytest.raises(RuntimeError, match="Parent directory"):
            torch.save(files.loop.model.state_dict(), files.path("no/such/folder.pt"))
        assert files.seen == []

    def test_steps_of_several_optimizers_are_told_apart(self, watch: Any, tmp_path: Path) -> None:
        model = TwoLayers()
        both = [torch.optim.SGD(part.parameters(), 0.01) for part in (model.first, model.second)]
        scope = watch(model)
        for _ in range(2):
            for optimizer in both:
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
        torch.save(model, tmp_path / "a.pt")
        scope.close()
        (row,) = ampscope.open_run(scope.folder).rows(Table.EVENTS, kind=EventKind.SAVED)
        assert json.loads(row.text)["after"] == {"0": 1, "1": 1}


class TestSavingStaysWhatItWas:
    def test_it_is_put_on_and_taken_off(self, watch: Any) -> None:
        before = installed()["save"]
        scope = watch(TwoLayers())
        assert torch.save is not before[0]
        assert torch.save is torch.serialization.save
        scope.close()
        assert installed()["save"] == before

    def test_signature_name_and_pickle(self, watch: Any) -> None:
        originals: dict[Any, Any] = {torch: torch.save, safetensors.torch: safetensors.torch.save_file}
        told = {home: (inspect.signature(save), save.__doc__, save.__name__) for home, save in originals.items()}
        watch(TwoLayers())
        for home, save in ((torch, torch.save), (safetensors.torch, safetensors.torch.save_file)):
            assert (inspect.signature(save), save.__doc__, save.__name__) == told[home]
            assert pickle.loads(pickle.dumps(save)) is save  # noqa: S301  # our own bytes

    def test_the_same_bytes_and_the_same_error(self, files: Files) -> None:
        files.loop.step()
        plain, watched = io.BytesIO(), io.BytesIO()
        inspect.unwrap(torch.save)(files.loop.model.state_dict(), plain)
        save: Any = torch.save
        assert save(files.loop.model.state_dict(), watched) is None
        assert plain.getvalue() == watched.getvalue()
        with pytest.raises(TypeError, match="save\\(\\) missing"):
            torch.save()  # type: ignore[call-arg]  # the user's mistake

    def test_no_value_is_read(self, files: Files) -> None:
        class Seen(torch.utils._python_dispatch.TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()
                self.ops: list[str] = []

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.ops.append(str(func))
                return func(*args, **(kwargs or {}))

        files.loop.step(2)
        state = {"model": files.loop.model.state_dict(), "optimizer": files.loop.optimizer.state_dict()}
        with Seen() as plain:
            inspect.unwrap(torch.save)(state, files.path())
        with Seen() as watched:
            torch.save(state, files.path())
        assert watched.ops == plain.ops
        assert len(files.seen) == 1

    def test_somebody_else_may_wrap_it_meanwhile(self, watch: Any) -> None:
        original, scope = torch.save, watch(TwoLayers())
        inner = torch.save

        def others(*args: Any, **kwargs: Any) -> None:
            inner(*args, **kwargs)

        torch.save = others
        try:
            scope.close()
            assert torch.save is others
            torch.save({}, io.BytesIO())
        finally:
            torch.save = inner
        watch(TwoLayers()).close()  # the last to leave gives back what nobody stands around any more
        assert torch.save is original


@pytest.mark.filterwarnings("ignore:ampscope. the look at saved files:RuntimeWarning")
def test_a_fault_of_ours_ends_the_part_alone(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    from ampscope.capture.loop_state import saved_files
    from ampscope.capture.torch_support import guard

    def fails(_: Any) -> Any:
        raise KeyError("ours")

    monkeypatch.setattr(guard, "RAISE", False)
    monkeypatch.setattr(saved_files, "path_of", fails)
    files.loop.step()
    for _ in range(2):
        torch.save(files.loop.model.state_dict(), files.path())
    files.loop.step()
    assert Path(files.path()).exists()
    assert files.seen == []
    warnings = ampscope.open_run(files.scope.folder).rows(Table.EVENTS, kind=EventKind.WARNING)
    assert [row.text.partition(" switched")[0] for row in warnings] == ["the look at saved files"]
