"""A signal that comes while AMPscope runs: what its handler raises reaches the loop, and the training can go on.

``make soak`` sends it at a thousand lines of each kind.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ampscope
from ampscope.capture.hooks.scaler_calls import is_watched
from ampscope.capture.step.step_watch import ScalerWatch
from ampscope.capture.torch_support import torch_private
from ampscope.trace.schema import EventKind, Table
from tests.support.training.guarded_training import leave_nothing
from tests.support.training.injuries.interrupting import Interrupting
from tests.support.training.injuries.soak import Record, soaked
from tests.support.training.small_loop import BATCH, WIDTH, make_scaler, mse, poison
from tests.support.training.torch_state import AT_REST, installed, settings
from tests.support.training.twin_runs import seed_everything

STEPS = 5
#: The first line at which a run is interrupted, and how many lie between one and the next.
FIRST, APART = 211, 161_009
#: How many lines a soak interrupts, in so many tests.
_SOAK, _SHARDS = 1000, 4
#: What puts hooks and modes in place and takes them away, and how many of its lines are interrupted, the last first.
TAKING_AWAY = {
    "ModuleStack.remove": 4,
    "_Learning.remove": 6,
    "FastPaths.insert": 2,
    "TapeMode.remove": 2,
    "LoopMode.remove": 2,
    "_is_ours": 3,
    "OthersAside._put_back": 3,
    "PerThread._take_ours": 3,
    "PerThread._put_ours": 3,
}


class Preempted(Exception):
    """What the user's program tells itself by a signal."""


#: The states of the random streams that each step comes through: torch's, Python's and numpy's.
Streams = dict[int, set[str]]


class Functions(TorchFunctionMode):
    """A mode of the user's, in which all trains; notes the streams after each function, where it is asked to."""

    def __init__(self, streams: Streams | None = None) -> None:
        super().__init__()
        self.streams, self.step = streams, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note()
        return result

    def note(self) -> None:
        if self.streams is not None:
            with torch._C.DisableTorchFunction():
                self.streams.setdefault(self.step, set()).update(streams())


def streams() -> list[str]:
    """Where the random streams are, each in one word."""
    states = torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()
    return [f"{place} {zlib.crc32(repr(each).encode())}" for place, each in enumerate(states)]


class Drawing(nn.Module):
    """Draws from all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * (1.0 + 0.1 * random.random()), 0.1) + 0.1 * float(np.random.random())


class Ops(TorchDispatchMode):
    """Another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def preempted() -> Iterator[None]:
    def handler(*_: Any) -> None:
        raise Preempted

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)
    leave_nothing()  # the next test must not suffer for one that fails here


def training(
    watch: Callable[..., object], interrupting: Interrupting, noted: Streams, *, notes: bool = False
) -> tuple[int, int]:
    """Trains, leaving out a step that is interrupted; returns how many were, and how many were completed."""
    seed_everything()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Drawing(), nn.Linear(WIDTH, WIDTH))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
    watch(model, scaler)
    interrupted = completed = 0
    with interrupting, Functions(noted if notes else None) as functions, Ops() as ops:
        for step in range(STEPS):
            functions.step = step
            functions.note()
            try:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
                poison(step, scaler.scale(loss)).backward()
                scaler.step(optimizer)
                scaler.update()
                completed += 1
            except (Preempted, KeyboardInterrupt):
                interrupted += 1
                assert functions in torch_private.function_modes(), interrupting.where
                assert ops in torch_private.dispatch_modes(), interrupting.where
                assert set(streams()) <= noted[step], interrupting.where
                assert torch.is_grad_enabled(), interrupting.where
                scaler = make_scaler()
    return interrupted, completed


@pytest.fixture(scope="module")
def noted() -> Streams:
    """The streams of an unwatched training."""
    found: Streams = {}
    training(lambda *_: None, Interrupting(0, lambda: None), found, notes=True)
    return found


def interrupted_at(
    line: int, folder: Path, interrupt: Callable[[], object], noted: Streams, within: str = ""
) -> Interrupting:
    """A run that is interrupted there; asserts that nothing but the step is lost by it."""
    interrupting, before = Interrupting(line, interrupt, within), (AT_REST, settings())
    scopes: list[ampscope.Scope] = []

    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=folder, quiet=True))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            interrupted, completed = training(watch, interrupting, noted)
        finally:
            scopes[0].close()
    assert interrupted == (interrupting.where is not None), interrupting.where
    assert completed == STEPS - interrupted
    assert (installed(), settings()) == before, interrupting.where
    return interrupting


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory, noted: Streams) -> int:
    return interrupted_at(0, tmp_path_factory.mktemp("run") / "run", lambda: None, noted).lines


def ctrl_c() -> None:
    raise KeyboardInterrupt


def signalled() -> None:
    signal.raise_signal(signal.SIGUSR1)


KINDS = {"handler": signalled, "ctrl+c": ctrl_c}


@pytest.mark.parametrize("kind", KINDS)
def test_it_reaches_the_loop(kind: str, lines: int, noted: Streams, tmp_path: Path) -> None:
    met = 0
    for line in range(FIRST, lines, APART):
        run = interrupted_at(line, tmp_path / str(line), KINDS[kind], noted)
        met += run.where is not None
    assert met


@pytest.mark.parametrize("function", TAKING_AWAY)
def test_it_reaches_the_loop_while_something_is_put_in_place_or_taken_away(
    function: str, noted: Streams, tmp_path: Path
) -> None:
    lines = interrupted_at(0, tmp_path / "run", signalled, noted, function).lines
    for line in range(lines - 1, 0, -(lines // TAKING_AWAY[function])):
        assert interrupted_at(line, tmp_path / str(line), signalled, noted, function).where is not None


#: Steps of a loop that goes on after each interruption, and the lines between where one comes and the next.
MANY = 40
LINES_ON = {"": 61, "OwnWork.__enter__": 2, "OwnWork.__exit__": 3}


def long_training(
    left_out: set[int], watched: Callable[..., object] | None = None, within: str = ""
) -> list[torch.Tensor]:
    """Trains; where it is watched, each step is interrupted, taken back and left out from then on."""
    seed_everything()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer, batches = torch.optim.SGD(model.parameters(), 0.01), torch.randn(MANY, BATCH, WIDTH)
    if watched is not None:
        watched(model)
    for step, x in enumerate(batches):
        if watched is None and step in left_out:
            continue
        scaler = make_scaler()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        interrupting = Interrupting(1 + step * LINES_ON[within] if watched is not None else 0, signalled, within)
        try:
            with interrupting:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = mse(model, x, x)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        except Preempted:
            left_out.add(step)
            model.load_state_dict(before)
        assert (interrupting.where is not None) == (watched is not None and step in left_out), interrupting.where
        optimizer.zero_grad()
    return [value.clone() for value in model.state_dict().values()]


def watched(model: nn.Module, folder: Path) -> ampscope.Scope:
    return ampscope.watch(model, dir=folder, quiet=True)


@pytest.mark.parametrize("within", LINES_ON)
def test_a_loop_that_goes_on_stays_watched(within: str, tmp_path: Path) -> None:
    """Each exception reaches it once, and the steps that it completes have the bits of an unwatched twin's."""
    scopes: list[ampscope.Scope] = []
    left_out: set[int] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            weights = long_training(left_out, lambda model: scopes.append(watched(model, tmp_path / "run")), within)
        finally:
            scopes[0].close()
    assert len(left_out) > MANY // 4
    assert all(map(torch.equal, weights, long_training(left_out)))
    run = ampscope.open_run(tmp_path / "run")
    assert not run.rows(Table.EVENTS, kind=EventKind.WARNING)


def test_a_scaler_whose_joining_is_interrupted_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, other, x = make_scaler(), make_scaler(), torch.ones(BATCH, WIDTH)
    model = nn.Linear(WIDTH, WIDTH)
    with watched(model, tmp_path / "run"):
        with monkeypatch.context() as patch, pytest.raises(Preempted):
            patch.setattr(ScalerWatch, "_place", lambda _: signalled())
            scaler.scale(model(x).sum())
        other.scale(model(x).sum())
        assert is_watched(other)
    assert not is_watched(scaler)
    assert installed() == AT_REST


def finalisers_in(folder: Path) -> list[str]:
    """The calls of finalisers in Python while a training is watched, whose process has been watched before."""
    found: list[str] = []

    def called(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        is_callback = code.co_filename.endswith(("weakref.py", "_weakrefset.py")) and "remove" in code.co_name
        if event == "call" and (code.co_name in ("__del__", "_cb") or is_callback):
            found.append(f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")

    scopes: list[ampscope.Scope] = []
    ampscope.watch(nn.Linear(2, 2), dir=folder / "earlier", quiet=True).close()

    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=folder / "run", quiet=True))
        sys.setprofile(called)

    try:
        training(watch, Interrupting(0, lambda: None), {})
    finally:
        sys.setprofile(None)
        scopes[0].close()
    return found


def test_no_finaliser_in_python_runs_in_a_step(tmp_path: Path) -> None:
    """Python drops what a signal handler raises in one.

    It is asked in a process of its own: the garbage of other tests has finalisers, too, and is collected at any time.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        assert process.submit(finalisers_in, tmp_path).result() == []


@pytest.mark.soak
@pytest.mark.parametrize("shard", range(_SHARDS))
@pytest.mark.parametrize("kind", KINDS)
def test_it_reaches_the_loop_from_wherever_it_comes(
    kind: str, shard: int, lines: int, noted: Streams, *, tmp_path: Path, record_property: Record
) -> None:
    failed, chosen = [], range(FIRST, lines, max(lines // _SOAK, 1))[shard::_SHARDS]
    for line in chosen:
        try:
            interrupted_at(line, tmp_path / "run", KINDS[kind], noted)
        except (AssertionError, RuntimeError) as error:
            failed.append(f"line {line}: {error}")
        finally:
            leave_nothing()
            shutil.rmtree(tmp_path / "run")
    soaked(record_property, "interrupts: not as the loop had it", len(chosen), len(failed))
    assert failed == []
