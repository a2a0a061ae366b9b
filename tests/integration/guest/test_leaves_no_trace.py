"""A guest in someone else's process: what is installed, what is left, what still works meanwhile."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.errors import AmpscopeError, WatchError
from ampscope.trace.schema import EventKind, Table
from tests.support.training.model_parts import linear
from tests.support.training.small_loop import BATCH, WIDTH, make_scaler, mlp, mse, train
from tests.support.training.torch_state import dress, installed
from tests.support.training.twin_runs import Watched, train_both


class Named(nn.Module):
    """At module level, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


class Loop:
    """A model with everything it takes to train it."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model or Named()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.scaler = make_scaler()

    def loss(self) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return mse(self.model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.scaler.scale(self.loss()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def parts(self) -> tuple[Any, ...]:
        return self.model, self.scaler, self.optimizer


@pytest.fixture
def loop() -> Loop:
    return Loop()


class Failure(Exception):
    """What the user's own code raises here."""


class Boom(torch.autograd.Function):
    """Fails in backward, with whatever it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


def fail_in_forward(loop: Loop, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        raise error

    hook = loop.model.get_submodule("second").register_forward_hook(fail)
    try:
        loop.loss()
    finally:
        hook.remove()


def fail_in_loss(loop: Loop, error: BaseException) -> None:
    loop.loss()
    raise error


def fail_in_backward(loop: Loop, error: BaseException) -> None:
    Boom.apply(loop.loss(), error).backward()


def fail_in_optimizer(loop: Loop, error: BaseException) -> None:
    def fail(*_: Any) -> None:
        raise error

    loop.scaler.scale(loop.loss()).backward()
    hook = loop.optimizer.register_step_pre_hook(fail)
    try:
        loop.scaler.step(loop.optimizer)
    finally:
        hook.remove()


FAILURES = [fail_in_forward, fail_in_loss, fail_in_backward, fail_in_optimizer]


class TestClosing:
    @pytest.mark.parametrize("every", [None, 0, 1], ids=["default", "every=0", "every=1"])
    @pytest.mark.parametrize("steps", [0, 1, 5])
    def test_everything_is_as_it_was(self, loop: Loop, watch: Any, every: int | None, steps: int) -> None:
        before, plain = installed(), dress(*loop.parts())
        scope = watch(loop.model, loop.scaler, every=every)
        loop.step(steps)
        loop.loss()  # and a step that is never finished
        scope.close()
        assert installed() == before
        assert [row[0] for row in dress(*loop.parts())] == [row[0] for row in plain]
        assert dress(loop.model) == plain[: len(list(loop.model.modules()))]

    @pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt, SystemExit], ids=lambda kind: kind.__name__)
    @pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
    @pytest.mark.parametrize("steps", [0, 3])
    def test_also_when_the_scope_is_left_by_an_exception(
        self, loop: Loop, run_folder: Path, fail: Callable[..., None], kind: type[BaseException], steps: int
    ) -> None:
        before, plain = installed(), [row[0] for row in dress(*loop.parts())]
        error = kind("on purpose")
        with (  # the scope is left by the exception
            pytest.raises(kind),
            ampscope.watch(loop.model, loop.scaler, dir=run_folder, quiet=True, every=1),
        ):
            loop.step(steps)
            fail(loop, error)
        assert installed() == before
        assert [row[0] for row in dress(*loop.parts())] == plain
        run = ampscope.open_run(run_folder)
        assert run.status == "closed"
        (note,) = run.rows(Table.EVENTS, kind=EventKind.NOTE)
        assert kind.__name__ in note.text
        assert not run.rows(Table.EVENTS, kind=EventKind.WARNING)

    @pytest.mark.parametrize("fail", [f for f in FAILURES if f is not fail_in_backward], ids=lambda fail: fail.__name__)
    def test_no_mode_stays_active_after_an_exception_that_the_loop_survives(
        self, loop: Loop, watch: Any, fail: Callable[..., None]
    ) -> None:
        """Evaluation, logging and saving come next, not always another step."""
        scope = watch(loop.model, loop.scaler, every=1)
        loop.step()
        with pytest.raises(Failure):
            fail(loop, Failure())
        stacks = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        if fail is not fail_in_loss:  # nothing tells AMPscope of that one until the next step
            assert stacks == (0, 0)
        loop.optimizer.zero_grad()
        loop.scaler._per_optimizer_states.clear()
        loop.step(2)
        scope.close()
        rows = ampscope.open_run(scope.folder).rows(Table.STEPS)
        assert len(rows) >= 3
        assert rows[-1].loss is not None

    def test_twice_is_once(self, loop: Loop, watch: Any) -> None:
        before = installed()
        scope = watch(loop.model, loop.scaler)
        loop.step()
        scope.close()
        scope.close()
        assert installed() == before

    def test_a_closed_scope_records_nothing_more(self, loop: Loop, watch: Any) -> None:
        scope = watch(loop.model, loop.scaler)
        loop.step(2)
        scope.close()
        loop.step(2)
        assert len(ampscope.open_run(scope.folder).rows(Table.STEPS)) == 2

    def test_copies_made_while_watched_are_bare_after_it(self, watch: Any) -> None:
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
        plain = [type(module) for module in model.modules()]
        scope = watch(model)
        twin, sister = copy.deepcopy(model), type(model[1])(WIDTH, WIDTH)
        scope.close()
        assert [type(module).__mro__[1:] for module in twin.modules()] == [kind.__mro__[1:] for kind in plain]
        assert type(sister) is nn.Linear


class TestWhileWatched:
    """What people do with a model and a scaler while they train."""

    @pytest.fixture(autouse=True)
    def watched(self, loop: Loop, watch: Any) -> None:
        watch(loop.model, loop.scaler)
        loop.step(3)

    def test_they_are_what_they_were(self, loop: Loop) -> None:
        assert isinstance(loop.model, Named)
        assert isinstance(loop.scaler, torch.amp.GradScaler)
        assert type(loop.model).__name__ == "Named"
        assert type(loop.model) == Named  # noqa: E721  # as people write it
        assert type(loop.scaler) == torch.amp.GradScaler  # noqa: E721
        assert {Named: 1}[type(loop.model)] == 1
        assert type(loop.model) in (nn.Linear, Named)
        assert loop.model.__class__ is Named
        assert type(loop.model).__module__ == __name__
        assert type(loop.model).__qualname__ == "Named"
        assert "Named(" in repr(loop.model)

    def test_submodules_keep_their_very_class(self, loop: Loop) -> None:
        """Models ask ``type(layer) is nn.Linear`` in forward, and ``model.apply`` asks it of every layer."""
        assert type(loop.model.first) is nn.Linear
        assert type(loop.model.second) is nn.Linear

    def test_state_dicts(self, loop: Loop) -> None:
        assert list(loop.model.state_dict()) == list(Named().state_dict())
        assert loop.scaler.state_dict().keys() == make_scaler().state_dict().keys()
        twin = Named()
        twin.load_state_dict(loop.model.state_dict())
        loop.model.load_state_dict(twin.state_dict())

    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_pickles_are_of_the_plain_class(self, loop: Loop, protocol: int) -> None:
        for thing, plain in ((loop.model, Named), (loop.scaler, torch.amp.GradScaler)):
            twin = pickle.loads(pickle.dumps(thing, protocol))  # noqa: S301  # our own bytes
            assert type(twin) is plain
        assert b"ampscope" not in pickle.dumps(loop.scaler, protocol)

    def test_a_saved_model_loads_where_there_is_no_ampscope(self, loop: Loop) -> None:
        file = io.BytesIO()
        torch.save({"model": loop.model, "scaler": loop.scaler, "optimizer": loop.optimizer.state_dict()}, file)
        assert b"ampscope" not in file.getvalue()
        file.seek(0)
        state = torch.load(file, weights_only=False)
        assert [type(module) for module in state["model"].modules()] == [Named, nn.Linear, nn.Linear]
        assert state["scaler"].state_dict() == loop.scaler.state_dict()

    def test_weights_alone_load_too(self, loop: Loop) -> None:
        file = io.BytesIO()
        torch.save(loop.model.state_dict(), file)
        file.seek(0)
        assert torch.load(file).keys() == loop.model.state_dict().keys()

    def test_copies_are_inert(self, loop: Loop, watch: Any) -> None:
        for make in (copy.copy, copy.deepcopy):
            assert type(make(loop.model)) is Named
            assert type(make(loop.scaler)) is torch.amp.GradScaler
        other = Loop(copy.deepcopy(loop.model))
        other.step(2)
        scope = watch(other.model, other.scaler)  # a copy can be watched by itself
        other.step(2)
        scope.close()
        assert len(ampscope.open_run(scope.folder).rows(Table.STEPS)) == 2

    def test_saving_in_the_middle_of_a_step(self, loop: Loop) -> None:
        loss = loop.loss()
        copy.deepcopy(loop.model)
        torch.save(loop.model, io.BytesIO())
        loop.scaler.scale(loss).backward()
        copy.deepcopy(loop.model)
        torch.save(loop.model, io.BytesIO())
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()

    def test_a_new_module_of_the_same_class_is_not_watched(self, loop: Loop) -> None:
        assert type(type(loop.model)()) is Named
        assert type(loop.model.__class__()) is Named

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")
    def test_it_can_be_traced_and_exported(self, loop: Loop) -> None:
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

        loop = Loop(Registered())
        watch(loop.model, loop.scaler)
        loop.step()
        assert registry == {"one": Registered}

    def test_a_deepcopy_of_its_own(self, watch: Any) -> None:
        class Copying(Named):
            def __deepcopy__(self, memo: dict[int, Any]) -> Any:
                twin = type(self).__new__(type(self))
                twin.__dict__ = copy.deepcopy(self.__dict__, memo)
                return twin

        model = Copying()
        watch(model)
        assert type(copy.deepcopy(model)) is Copying

    def test_a_graph_module(self, watch: Any) -> None:
        model = torch.fx.symbolic_trace(Named())
        kind = type(model)
        scope = watch(model)
        loop = Loop(model)
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
        loop = Loop(mlp())
        scope = watch(loop.model, loop.scaler)
        nn.utils.parametrizations.weight_norm(linear(loop.model, "0"))
        loop = Loop(loop.model)
        loop.step(3)
        scope.close()
        assert "ampscope" not in "".join(kind.__module__ for m in loop.model.modules() for kind in type(m).__mro__)


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

    @pytest.mark.parametrize("part", ["the model", "a submodule", "a wrapper"])
    def test_a_second_watch_of_the_same_model(self, part: str, watch: Any, tmp_path: Path) -> None:
        model = mlp()
        scope = watch(model)
        again = {"the model": model, "a submodule": model[0], "a wrapper": nn.Sequential(model)}[part]
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


def test_a_folder_left_open_in_this_process_is_resumed(watch: Any) -> None:
    """A notebook's cell that is run again: the scope before is closed, the run goes on."""
    before, first, second = installed(), Loop(), Loop()
    scope = watch(first.model, first.scaler)
    first.step(2)
    again = watch(second.model, second.scaler, dir=scope.folder)
    assert type(first.model) is Named
    second.step(2)
    again.close()
    assert installed() == before
    rows = ampscope.open_run(scope.folder).rows(Table.STEPS)
    assert [(row.step, row.segment) for row in rows] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_two_scopes_at_once_record_their_own_models(watch: Any) -> None:
    before = installed()
    one, other = Loop(), Loop(mlp())
    scopes = [watch(loop.model, loop.scaler) for loop in (one, other)]
    one.step(2)
    other.step(3)
    scopes[0].close()
    one.step()
    other.step()
    scopes[1].close()
    assert installed() == before
    rows = [ampscope.open_run(scope.folder).rows(Table.STEPS) for scope in scopes]
    assert [len(steps) for steps in rows] == [2, 4]
    assert all(row.loss is not None and row.scale is not None for steps in rows for row in steps)


def test_one_scaler_for_two_scopes(watch: Any) -> None:
    """The scaler's history goes to one of them, the steps each to its own."""
    one, other = Loop(), Loop(mlp())
    other.scaler = one.scaler
    scopes = [watch(loop.model, loop.scaler) for loop in (one, other)]
    one.step(2)
    other.step(3)
    for scope in scopes:
        scope.close()
    assert [len(ampscope.open_run(scope.folder).rows(Table.STEPS)) for scope in scopes] == [2, 3]
    assert type(one.scaler) is torch.amp.GradScaler


def test_a_training_in_another_thread_is_recorded_or_missed_aloud(loop: Loop, watch: Any) -> None:
    scope = watch(loop.model, loop.scaler)
    thread = threading.Thread(target=loop.step, args=(3,))
    thread.start()
    thread.join()
    scope.close()
    run = ampscope.open_run(scope.folder)
    recorded = [row.loss is not None for row in run.rows(Table.STEPS)]
    assert recorded == [True] * 3 or run.rows(Table.EVENTS, kind=EventKind.WARNING)


def test_a_large_object_among_the_arguments_costs_little(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary, a reference to the data set, references that go round: the walk over arguments is bounded."""
    looked_at = 0

    class Words(dict[str, int]):
        def values(self) -> Any:
            nonlocal looked_at
            for value in super().values():
                looked_at += 1
                yield value

    class Batch:
        def __init__(self) -> None:
            self.x = torch.randn(BATCH, WIDTH)
            self.words = Words((str(n), n) for n in range(20_000))
            self.friends = [self] * 8

    class Taking(Named):
        def forward(self, batch: Batch) -> Tensor:
            return super().forward(batch.x)

    model = Taking()
    watch(model, every=0)
    model(Batch()).sum().backward()
    assert looked_at < 100_000


@pytest.mark.parametrize("quiet", [False, True])
def test_it_is_quiet(loop: Loop, run_folder: Path, capfd: pytest.CaptureFixture[str], quiet: bool) -> None:
    """One line at the start, on stderr; nothing on stdout; nothing at all when asked."""
    with ampscope.watch(loop.model, loop.scaler, dir=run_folder, quiet=quiet):
        loop.step(3)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == (0 if quiet else 1)
    assert (str(run_folder) in err) is not quiet


def test_notes_stand_on_the_time_line(loop: Loop, watch: Any) -> None:
    scope = watch(loop.model, loop.scaler)
    loop.step(2)
    scope.note("second data set")
    loop.step()
    scope.close()
    (row,) = ampscope.open_run(scope.folder).rows(Table.EVENTS, kind=EventKind.NOTE)
    assert (row.step, row.text) == (2, "second data set")


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
