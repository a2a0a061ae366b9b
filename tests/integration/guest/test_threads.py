"""Several threads train at a time: each watch hears of its own thread, and whoever is not watched sees none of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampscope
from ampscope.trace.schema import EventKind, ReplayStatus, Table
from tests.support.training.torch_state import installed

STEPS, BAD, BATCH, WIDTH = 8, 5, 4, 6
#: Seconds after which a thread waits no more for the others: something has gone wrong.
LONG = 60.0
Meet = Callable[[], object]


class Network(nn.Module):
    """Meets the other threads when it is first replayed without autocast: all of a replay's patches are there then."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(WIDTH, width), nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            meet_once()
        return self.leave(self.norm(self.enter(x)).relu())


class _Meeting(threading.local):
    """Whom the thread still has to meet; a replay leaves it as it is."""

    meet: Meet | None = None


_meeting = _Meeting()


def meet_once() -> None:
    meet, _meeting.meet = _meeting.meet, None
    if meet is not None:
        meet()


class Training:
    """One thread's training: its weights and batches come from no generator that it shares with others.

    Args:
        number: Of the thread: no two have the same weights, batches and layers.
    """

    def __init__(self, number: int, *, bad: int | None = BAD) -> None:
        draws = torch.Generator().manual_seed(number)
        self.number, self.bad = number, bad
        self.model = Network(8 + number)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.3, generator=draws)
        self.batches = [torch.randn(2, BATCH, WIDTH, generator=draws) for _ in range(STEPS)]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        self.losses: list[float] = []

    def step(self, x: Tensor, target: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            made = checkpoint(self.model, x, use_reentrant=False)
            loss = nn.functional.mse_loss(made, target[:, :1])
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    def run(self, meet: Meet | None = None) -> list[str]:
        """Trains; what it returns has every bit of losses and weights."""
        _meeting.meet = meet
        for number, (x, target) in enumerate(self.batches):
            self.step(x.where(torch.tensor(number != self.bad), torch.inf), target)
        weights = [value for parameter in self.model.parameters() for value in parameter.detach().flatten().tolist()]
        return [value.hex() for value in (*self.losses, *weights)]


def unwatched(number: int) -> list[str]:
    return Training(number).run()


def test_three_threads_two_of_them_watched_and_replayed_at_the_same_time(tmp_path: Path) -> None:
    """The third trains a step while both others are in the midst of a replay that computes in float32."""
    numbers = (2, 3, 4)
    alone, before = [unwatched(number) for number in numbers], installed()
    together = threading.Barrier(3, timeout=LONG)
    trainings = [Training(number) for number in numbers]

    def watched(training: Training) -> list[str]:
        with ampscope.watch(training.model, training.scaler, dir=tmp_path / str(training.number), quiet=True):
            return training.run(lambda: [together.wait() for _ in range(2)])

    def third(training: Training) -> list[str]:
        together.wait()
        try:
            return training.run()
        finally:
            together.wait()

    with ThreadPoolExecutor(3) as pool:
        calls = zip((watched, watched, third), trainings, strict=True)
        results = [pool.submit(call, training) for call, training in calls]
        assert [result.result(timeout=LONG) for result in results] == alone
    assert installed() == before
    for training in trainings[:2]:
        check_trace(tmp_path / str(training.number), training)


def check_trace(folder: Path, training: Training) -> None:
    """The run holds the steps of its own thread, each once, and what was wrong with one of them."""
    run = ampscope.open_run(folder)
    steps = run.rows(Table.STEPS)
    assert [row.step for row in steps] == list(range(STEPS))
    assert [row.loss for row in steps] == pytest.approx(training.losses, nan_ok=True)
    assert [row.skipped for row in steps] == [number == BAD for number in range(STEPS)]
    (incident,) = run.rows(Table.INCIDENTS)
    assert (incident.step, incident.replay) == (BAD, ReplayStatus.EXACT)
    assert not run.rows(Table.EVENTS, kind=EventKind.WARNING)
    assert ampscope.diagnose(run).incidents[0].cause == "bad_input"


@pytest.mark.parametrize("every", [None, 0, 1])
def test_watched_here_trained_there_closed_here(every: int | None, tmp_path: Path) -> None:
    training, before = Training(0), installed()
    scope = ampscope.watch(training.model, training.scaler, dir=tmp_path / "run", quiet=True, every=every)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(training.run).result(timeout=LONG) == unwatched(0)
        scope.close()
    assert installed() == before
    check_trace(tmp_path / "run", training)


PLACES = ["forward", "loss", "backward", "after backward", "optimizer", "between steps"]


class Stopping(Training):
    """Waits for the test at one place of one step.

    Args:
        place: Where.
        at: The step.
    """

    def __init__(self, place: str, at: int = 3) -> None:
        super().__init__(0, bad=None)
        self.place, self.at = place, at
        self.is_there, self.goes_on = threading.Event(), threading.Event()
        self.model.norm.register_forward_hook(lambda *_: self.stop("forward"))
        self.optimizer.register_step_pre_hook(lambda *_: self.stop("optimizer"))

    def stop(self, place: str) -> None:
        if place == self.place and len(self.losses) == self.at and not self.is_there.is_set():
            self.is_there.set()
            assert self.goes_on.wait(LONG)

    def step(self, x: Tensor, target: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            made = self.model(x)
            self.stop("loss")
            loss = nn.functional.mse_loss(made, target[:, :1])
        loss.register_hook(lambda _: self.stop("backward"))
        self.scaler.scale(loss).backward()
        self.stop("after backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.stop("between steps")
        self.losses.append(float(loss.detach()))

    def run(self, meet: Meet | None = None) -> list[str]:
        result = super().run(meet)
        modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
        return [*result, str(modes)]


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_is_closed_while_its_loop_is_in_a_step(
    place: str, every: int, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    unwatched_training = Stopping("nowhere")
    alone, before = unwatched_training.run(), installed()
    training = Stopping(place)
    scope = ampscope.watch(training.model, training.scaler, dir=tmp_path / "run", quiet=True, every=every)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(training.run)
        assert training.is_there.wait(LONG)
        scope.close()
        steps = [row.step for row in ampscope.open_run(scope.folder).rows(Table.STEPS)]
        training.goes_on.set()
        assert result.result(timeout=LONG) == alone
    assert steps == list(range(training.at + (place == "between steps")))
    assert not recwarn.list
    assert installed() == before
    assert ampscope.diagnose(scope.folder).verdict == "healthy"


def test_threads_that_open_and_close_runs_at_a_time(tmp_path: Path) -> None:
    before = installed()
    at_once = threading.Barrier(4, timeout=LONG)

    def watched(number: int) -> None:
        for turn in range(3):
            training = Training(number)
            at_once.wait()
            with ampscope.watch(training.model, dir=tmp_path / f"{number}-{turn}", quiet=True):
                at_once.wait()

    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(watched, number) for number in range(4)]:
            result.result(timeout=LONG)
    assert installed() == before


def test_the_scaler_and_the_backward_of_another_thread_are_none_of_the_runs(tmp_path: Path) -> None:
    """What comes from there while a step is open here."""
    training, other = Training(0), Training(1)

    def in_between(*_: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other.step, *other.batches[0]).result(timeout=LONG)

    with ampscope.watch(training.model, dir=tmp_path / "run", quiet=True) as scope:
        training.model.register_forward_hook(in_between)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = training.model(training.batches[0][0]).square().mean()
        loss.backward()
        training.optimizer.step()
    run = ampscope.open_run(scope.folder)
    (row,) = run.rows(Table.STEPS)
    assert (row.micro_batches, row.scale) == (1, None)
    assert not run.rows(Table.SCALER_EVENTS)


class Watching(nn.Module):
    """Has another thread look, and write, in the midst of each forward: in those of a replay, too."""

    def __init__(self, other: Callable[[], object]) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.calls, self.served, self.other = 0, 0, other
        self.twice = lambda x: 2 * x * self.calls / self.calls  # code that reaches the module without being given it

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.other()
        made = self.leave(self.twice(self.norm(self.enter(x))))
        self.other()
        return made


def test_other_threads_read_and_write_the_live_model_while_it_is_replayed(tmp_path: Path) -> None:
    """What they read only grows and is whole; what they write stays, and the replay's own writes do not."""
    seen: list[tuple[Any, ...]] = []

    def look() -> None:
        model.served += 1
        model.enter.note = model.served  # type: ignore[assignment]  # of the user's own, as torch does not type them
        model.norm.register_buffer(f"of_{model.served}", torch.zeros(1))
        state, weights = model.state_dict(), [id(parameter) for parameter in model.parameters()]
        seen.append((model.calls, int(state["norm.num_batches_tracked"]), len(state) - model.served, weights))

    with ThreadPoolExecutor(1) as pool:
        model = Watching(lambda: pool.submit(look).result(timeout=LONG))
        weights = [id(parameter) for parameter in model.parameters()]
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**30)
        with ampscope.watch(model, scaler, dir=tmp_path / "run", quiet=True):
            for _ in range(STEPS):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(torch.randn(BATCH, WIDTH)).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert ampscope.open_run(tmp_path / "run").rows(Table.INCIDENTS)[0].replay == ReplayStatus.EXACT
    assert len(seen) > 2 * STEPS  # replays, too
    assert (model.calls, int(model.state_dict()["norm.num_batches_tracked"])) == (STEPS, STEPS)
    assert model.served == model.enter.note == len(seen)
    assert {name for name, _ in model.norm.named_buffers() if name.startswith("of_")} == {
        f"of_{number + 1}" for number in range(len(seen))
    }
    assert [each[:2] for each in seen] == sorted(each[:2] for each in seen)
    assert all((each[2], each[3]) == (9, weights) for each in seen)
