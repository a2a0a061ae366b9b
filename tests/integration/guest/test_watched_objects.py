"""Watched models, scalers and optimizers are still what they were: types, copies, pickles, state dicts, exports."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.errors import WatchError
from ampscope.trace.schema import ReplayStatus, Table
from tests.support.training.model_parts import linear
from tests.support.training.small_loop import BATCH, WIDTH, make_scaler, mlp, train
from tests.support.training.small_models import TwoLayers
from tests.support.training.torch_state import installed
from tests.support.training.training_loop import TrainingLoop
from tests.support.training.twin_runs import Watched, train_both


@pytest.fixture
def loop() -> TrainingLoop:
    return TrainingLoop()


class TestWhileWatched:
    """What people do with a model and a scaler while they train."""

    @pytest.fixture(autouse=True)
    def watched(self, loop: TrainingLoop, watch: Any) -> None:
        watch(loop.model, loop.scaler)
        loop.step(3)

    def test_they_are_what_they_were(self, loop: TrainingLoop) -> None:
        assert isinstance(loop.model, TwoLayers)
        assert isinstance(loop.scaler, torch.amp.GradScaler)
        assert type(loop.model).__name__ == "TwoLayers"
        assert type(loop.model) == TwoLayers  # noqa: E721  # as people write it
        assert type(loop.scaler) is torch.amp.GradScaler
        assert {TwoLayers: 1}[type(loop.model)] == 1
        assert type(loop.model) in (nn.Linear, TwoLayers)
        assert loop.model.__class__ is TwoLayers
        assert type(loop.model).__module__ == "tests.support.training.small_models"
        assert type(loop.model).__qualname__ == "TwoLayers"
        assert "TwoLayers(" in repr(loop.model)

    def test_submodules_keep_their_very_class(self, loop: TrainingLoop) -> None:
        """Models ask ``type(layer) is nn.Linear`` in forward, and ``model.apply`` asks it of every layer."""
        assert type(loop.model.first) is nn.Linear
        assert type(loop.model.second) is nn.Linear

    def test_state_dicts(self, loop: TrainingLoop) -> None:
        assert list(loop.model.state_dict()) == list(TwoLayers().state_dict())
        assert loop.scaler.state_dict().keys() == make_scaler().state_dict().keys()
        twin = TwoLayers()
        twin.load_state_dict(loop.model.state_dict())
        loop.model.load_state_dict(twin.state_dict())

    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_pickles_are_of_the_plain_class(self, loop: TrainingLoop, protocol: int) -> None:
        for thing, plain in ((loop.model, TwoLayers), (loop.scaler, torch.amp.GradScaler)):
            twin = pickle.loads(pickle.dumps(thing, protocol))  # noqa: S301  # our own bytes
            assert type(twin) is plain
        assert b"ampscope" not in pickle.dumps(loop.scaler, protocol)

    def test_a_saved_model_loads_where_there_is_no_ampscope(self, loop: TrainingLoop) -> None:
        file = io.BytesIO()
        torch.save({"model": loop.model, "scaler": loop.scaler, "optimizer": loop.optimizer.state_dict()}, file)
        assert b"ampscope" not in file.getvalue()
        file.seek(0)
        state = torch.load(file, weights_only=False)
        assert [type(module) for module in state["model"].modules()] == [TwoLayers, nn.Linear, nn.Linear]
        assert state["scaler"].state_dict() == loop.scaler.state_dict()

    def test_weights_alone_load_too(self, loop: TrainingLoop) -> None:
        file = io.BytesIO()
        torch.save(loop.model.state_dict(), file)
        file.seek(0)
        assert torch.load(file).keys() == loop.model.state_dict().keys()

    def test_copies_are_inert(self, loop: TrainingLoop, watch: Any) -> None:
        for make in (copy.copy, copy.deepcopy):
            assert type(make(loop.model)) is TwoLayers
            assert type(make(loop.scaler)) is torch.amp.GradScaler
        other = TrainingLoop(copy.deepcopy(loop.model))
        other.step(2)
        scope = watch(other.model, other.scaler)  # a copy can be watched by itself
        other.step(2)
        scope.close()
        assert len(ampscope.open_run(scope.folder).rows(Table.STEPS)) == 2

    def test_saving_in_the_middle_of_a_step(self, loop: TrainingLoop) -> None:
        loss = loop.loss()
        copy.deepcopy(loop.model)
        torch.save(loop.model, io.BytesIO())
        loop.scaler.scale(loss).backward()
        copy.deepcopy(loop.model)
        torch.save(loop.model, io.BytesIO())
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()

    def test_a_new_module_of_the_same_class_is_not_watched(self, loop: TrainingLoop) -> None:
        assert type(type(loop.model)()) is TwoLayers
        assert type(loop.model.__class__()) is TwoLayers

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")
    def test_it_can_be_traced_and_exported(self, loop: TrainingLoop) -> None:
        x = torch.randn(BATCH, WIDTH)
        expected = loop.model(x)
        assert torch.equal(torch.jit.trace(loop.model, x)(x), expected)
        assert torch.equal(torch.fx.symbolic_trace(loop.model)(x), expected)
        assert torch.equal(torch.export.export(loop.model, (x,)).module()(x), expected)


class TestClassesOfTheUsers:
    def test_init_subclass_is_not_run_for_the_watch(self, watch: Any) -> None:
        """Registries of models and bases with required arguments."""
        registry: dict[str, type] = {}

        class Base(nn.Module):
            def __init_subclass__(cls, *, key: str) -> None:
                registry[key] = cls

        class Registered(Base, key="one"):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)

        loop = TrainingLoop(Registered())
        watch(loop.model, loop.scaler)
        loop.step()
        assert registry == {"one": Registered}

    def test_a_deepcopy_of_its_own(self, watch: Any) -> None:
        class Copying(TwoLayers):
            def __deepcopy__(self, memo: dict[int, Any]) -> Any:
                twin = type(self).__new__(type(self))
                twin.__dict__ = copy.deepcopy(self.__dict__, memo)
                return twin

        model = Copying()
        watch(model)
        assert type(copy.deepcopy(model)) is Copying

    def test_a_graph_module(self, watch: Any) -> None:
        model = torch.fx.symbolic_trace(TwoLayers())
        kind = type(model)
        scope = watch(model)
        loop = TrainingLoop(model)
        loop.step()
        twin = copy.deepcopy(model)
        scope.close()
        assert type(model) is kind
        assert torch.equal(twin(torch.ones(1, WIDTH)), model(torch.ones(1, WIDTH)))

    def test_a_class_that_cannot_be_extended_is_refused_without_a_trace(self, run_folder: Path) -> None:
        class Meta(type):
            def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
                if any(isinstance(base, Meta) for base in bases):
                    raise TypeError(f"{bases[-1].__name__} is sealed")
                return super().__new__(mcs, name, bases, namespace, **options)

        class Sealed(nn.Module, metaclass=Meta):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(WIDTH, WIDTH)

        model, before, threads = Sealed(), installed(), threading.active_count()
        with pytest.raises(WatchError, match="Sealed"):
            ampscope.watch(model, dir=run_folder, quiet=True)
        assert installed() == before
        assert type(model) is Sealed
        assert threading.active_count() == threads

    def test_parametrized_after_the_watch_began(self, watch: Any) -> None:
        loop = TrainingLoop(mlp())
        scope = watch(loop.model, loop.scaler)
        nn.utils.parametrizations.weight_norm(linear(loop.model, "0"))
        loop = TrainingLoop(loop.model)
        loop.step(3)
        scope.close()
        assert "ampscope" not in "".join(kind.__module__ for m in loop.model.modules() for kind in type(m).__mro__)


def test_weights_set_by_type_after_the_watch_began(run_folder: Path) -> None:
    """``model.apply(init)`` with the idiom of PyTorch's own documentation."""

    def init(module: nn.Module) -> None:
        if type(module) == nn.Linear:  # noqa: E721
            nn.init.constant_(module.weight, 0.1)

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()

        def watch_and_init(model: nn.Module, scaler: Any) -> None:
            watch(model, scaler)
            model.apply(init)

        return train(watch_and_init, model)

    train_both(loop, run_folder)


def test_a_forward_that_asks_for_the_type_of_its_layers(run_folder: Path) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) * (2.0 if type(layer) is nn.Linear else 1.0)
            return x

    watched: Watched = train_both(lambda watch: train(watch, Asking()), run_folder)
    assert watched.warnings == []


def test_a_parametrization_gives_the_watched_model_itself_another_class(run_folder: Path) -> None:
    def loop(watch: Callable[..., Any]) -> Any:
        model = nn.Linear(WIDTH, WIDTH)
        watch(model)
        nn.utils.parametrizations.weight_norm(model)
        assert type(model).__name__ == "ParametrizedLinear"
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(BATCH, WIDTH) * (float("inf") if step == 3 else 1)).square().mean().backward()
            optimizer.step()
        return [model, optimizer]

    watched = train_both(loop, run_folder)
    assert len(watched.steps) == 4
    assert watched.replay_of(3)[0] == ReplayStatus.EXACT
