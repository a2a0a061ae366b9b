"""A replay whose size nobody knows ends before it takes more memory than there is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.isolation import memory
from ampscope.capture.isolation.memory import Bounded, NoRoomError
from tests.support.training.small_loop import BATCH, POISONED, STEPS, WIDTH, make_scaler, mlp, poison, train
from tests.support.training.small_models import TwoLayers
from tests.support.training.twin_runs import EXACT, Watched, train_both

KIB = 256  # float32 elements


def test_what_forward_gives_is_counted() -> None:
    x = torch.ones(KIB)
    with Bounded(2 * 1024):
        (x + 1) * 2
        with pytest.raises(NoRoomError, match="not enough free memory"):
            x - 1


def test_views_take_no_memory() -> None:
    x = torch.ones(KIB)
    with Bounded(0):
        assert x.view(16, 16).t()[0].shape == (16,)


def test_what_backward_gives_takes_the_place_of_what_forward_gave() -> None:
    model = nn.Linear(16, 16)
    x = torch.ones(16, 16)
    with Bounded(2 * 1024 + 8):
        model(x).sum().backward()
    assert model.weight.grad is not None


def test_where_nobody_can_tell_there_is_no_bound() -> None:
    assert memory.room(torch.device("meta")) is None


class Counting(TwoLayers):
    """Takes down at each call how many results of calls before it are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.given: SimpleQueue[weakref.ref[Tensor]] = SimpleQueue()  # which a replay does not put back
        self.alive: SimpleQueue[int] = SimpleQueue()

    def forward(self, x: Tensor) -> Tensor:
        known = [self.given.get_nowait() for _ in range(self.given.qsize())]
        self.alive.put(sum(each() is not None for each in known))
        out: Tensor = super().forward(x)
        for each in (*known, weakref.ref(out)):
            self.given.put(each)
        return out


def test_results_are_freed_after_their_last_reader(run_folder: Path) -> None:
    """The losses of all micro-batches are kept; what the model returned is needed by its own micro-batch alone."""
    micro_batches, models = 6, []

    def loop(watch: Callable[..., object]) -> Any:
        model = Counting()
        models.append(model)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        for step in range(POISONED + 1):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(torch.randn(BATCH, WIDTH)).square().mean()
                poison(step, scaler.scale(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [dict(model.named_parameters()), optimizer, scaler]

    assert train_both(loop, run_folder).replay_of(POISONED) == EXACT
    alive = [models[-1].alive.get_nowait() for _ in range(models[-1].alive.qsize())]
    assert len(alive) >= (POISONED + 2) * micro_batches  # that of the replay, too
    assert max(alive) <= 1


def test_another_set_of_gradients_is_part_of_the_estimate(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fits(needed: int, _: torch.device) -> bool:
        asked.append(needed)
        return True

    monkeypatch.setattr(memory, "fits", fits)

    def needed(*, frozen: bool) -> int:
        def loop(watch: Callable[..., object]) -> Any:
            model = mlp()
            model[0].requires_grad_(requires_grad=not frozen)
            return train(watch, model, parameters=[each for each in model.parameters() if each.requires_grad])["losses"]

        assert train_both(loop, run_folder.with_name(f"frozen={frozen}")).replay_of(POISONED) == EXACT
        first, asked[:] = asked[0], []
        return first

    assert needed(frozen=False) == needed(frozen=True) + 4 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("loops_own", [True, False], ids=["collecting", "not-collecting"])
def test_a_replay_provokes_no_collection_and_leaves_the_collector_as_it_was(
    loops_own: bool, run_folder: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(gc.enable if gc.isenabled() else gc.disable)
    seen: SimpleQueue[bool] = SimpleQueue()

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.put(gc.isenabled())
            return x

    def loop(watch: Callable[..., object]) -> Any:
        (gc.enable if loops_own else gc.disable)()
        state = train(watch, nn.Sequential(mlp(), Asking()))["losses"]
        assert gc.isenabled() is loops_own
        return state

    assert train_both(loop, run_folder).replay_of(POISONED) == EXACT
    collecting = [seen.get_nowait() for _ in range(seen.qsize())]
    assert collecting.count(True) == (2 * STEPS if loops_own else 0)  # of the unwatched loop and of the watched one
    assert collecting.count(False) >= (1 if loops_own else 2 * STEPS + 1)


def test_garbage_of_the_users_own_does_not_outlive_its_call_in_a_replay(run_folder: Path) -> None:
    alive: SimpleQueue[int] = SimpleQueue()

    class Cyclic(nn.Module):
        """Leaves its activations in a cycle, which the collector alone takes away."""

        def __init__(self) -> None:
            super().__init__()
            self.left = weakref.WeakSet[Any]()

        def forward(self, x: Tensor) -> Tensor:
            if gc.isenabled():  # the loop's own call
                gc.collect()
            holder = type("Holder", (), {"__slots__": ("__weakref__", "itself", "kept")})()
            holder.itself, holder.kept = holder, x.clone()
            self.left.add(holder)
            alive.put(len(self.left))
            return x

    def loop(watch: Callable[..., object]) -> Any:
        return train(watch, nn.Sequential(mlp(), Cyclic()))["losses"]

    assert train_both(loop, run_folder, overhead=1.0, replay_budget=3).replay_of(POISONED) == EXACT
    seen = [alive.get_nowait() for _ in range(alive.qsize())]
    assert len(seen) > 2 * STEPS  # the replays are there
    assert max(seen) <= 3  # of the call, of the one before, and of the loop itself, however many replays there are


def test_an_interrupted_replay_leaves_the_collector_on(run_folder: Path) -> None:
    class Interrupting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not gc.isenabled():
                raise KeyboardInterrupt
            return x

    with pytest.raises(KeyboardInterrupt):
        Watched.train(lambda watch: train(watch, nn.Sequential(mlp(), Interrupting())), run_folder)
    assert gc.isenabled()
    assert not memory.collector.rests


@pytest.mark.parametrize(
    "names", [("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")]
)
def test_a_limit_of_the_control_group_counts(names: tuple[str, str], tmp_path: Path) -> None:
    limit, used = names
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / used).write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 850\ninactive_file 50\n")
    assert memory._left_in(tmp_path) == 150
    (tmp_path / limit).write_text("max\n")
    assert memory._left_in(tmp_path) is None


def test_a_replay_that_does_not_fit_is_not_begun(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_on_host", lambda: 0)
    status, reason = train_both(lambda watch: train(watch, mlp()), run_folder).replay_of(POISONED)
    assert (status, reason) == ("unavailable", "there is not enough free memory to run the step once more")
