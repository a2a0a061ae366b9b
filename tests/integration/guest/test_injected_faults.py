"""Whichever function of capture raises, and at whichever call: the loop comes to its end, with the same bits."""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from tests.support.training.guarded_training import training
from tests.support.training.injuries.injected_faults import Fault, Function, counted, functions
from tests.support.training.twin_runs import differences, exact_state, seed_everything

#: Of all injections, one in so many is tried each time.
SAMPLE = 40
#: What the loop itself calls, and the doors behind it: the little that runs before anything can be caught.
DOORS = frozenset(
    {
        "hooks.module_calls.WatchedModule.__call__",  # asks whether anything is compiled, and goes through a door
        "hooks.process_hooks._backward",  # the same
        "hooks.process_hooks.original_backward",  # one look into a table: what the loop asked for
        "hooks.process_hooks._clear_autocast_cache",  # counts, and calls the original
        *(f"hooks.scaler_calls.WatchedScaler.{name}" for name in ("scale", "step", "update", "unscale_")),
        *(f"hooks.scaler_calls.WatchedScaler.{name}" for name in ("get_scale", "state_dict")),
        "replay.tape_mode.TapeMode.__torch_function__",
        "replay.tape_mode.TapeMode._left",
        "step.carried.listening.loop_mode.LoopMode.__torch_function__",
        "tracing.tracer.Tracer.__torch_dispatch__",
        "tracing.program.function_watch.FunctionWatch.__torch_function__",
        "torch_support.torch_private.is_tracing",  # one question of torch's, before the door of a module
        "torch_support.guard.through",
        "torch_support.guard.tell",
        "torch_support.guard.left",
        "torch_support.guard._UsersCall.__init__",
        "torch_support.guard._UsersCall.__call__",
        "scope.Scope.close",  # called by the user
        "events.run_end.in_flight",  # the same: what is being handled as `close` is called
        "hooks.instrumented.Instrumented.__class__",  # the object's own attribute
        "scope.Scope.open",  # part of `watch`, which may refuse
    }
)


def run(folder: Path, watching: Callable[[], object]) -> dict[str, bytes]:
    """The end of a training under watch; ``watching`` is called once the watch has begun."""
    scopes: list[ampscope.Scope] = []

    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=folder, quiet=True, every=2, save_tensors=True))
        watching()

    seed_everything()
    try:
        return exact_state(training(watch))
    finally:
        for scope in scopes:
            scope.close()


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Function, int]]:
    """The functions that the training calls, with how often."""
    calls: Counter[int] = Counter()
    run(tmp_path_factory.mktemp("run") / "warm", lambda: None)
    with counted(calls):
        run(tmp_path_factory.mktemp("run") / "run", lambda: None)
    found = [(each, calls[id(each.code)]) for each in functions() if str(each) not in DOORS]
    return [(function, count) for function, count in found if count]


def reached_the_loop(
    faults: list[tuple[Function, int, type[BaseException]]], unwatched: dict[str, bytes], folder: Path
) -> list[str]:
    """Those of some faults that the loop has suffered by."""
    suffered = []
    for number, (function, at, error) in enumerate(faults):
        fault = Fault(function, at, error)

        def arm(fault: Fault = fault) -> None:
            fault.armed = True

        what = f"{function} at its call {at}"
        with warnings.catch_warnings(), fault.injected():
            warnings.simplefilter("ignore")
            try:
                if changed := differences(run(folder / str(number), arm), unwatched):
                    suffered.append(f"{what}: {changed}")
            except error:
                suffered.append(what)
            fault.armed = False
        torch.set_grad_enabled(True)
    return suffered


def chosen(called: list[tuple[Function, int]]) -> list[tuple[Function, int, type[BaseException]]]:
    errors: list[type[BaseException]] = [RuntimeError, MemoryError]
    return [
        (function, at, error) for function, count in called for at in sorted({1, 1 + count // 2}) for error in errors
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("modes_removed")
def test_a_sample_of_all_faults(
    called: list[tuple[Function, int]], unwatched_state: dict[str, bytes], tmp_path: Path
) -> None:
    faults = [fault for fault in chosen(called) if not zlib.crc32(repr(fault).encode()) % SAMPLE]
    assert len(faults) > 60
    assert reached_the_loop(faults, unwatched_state, tmp_path) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("modes_removed")
def test_all_faults(called: list[tuple[Function, int]], unwatched_state: dict[str, bytes], tmp_path: Path) -> None:
    assert reached_the_loop(chosen(called), unwatched_state, tmp_path) == []
