"""Whichever function of capture raises, and at whichever call: the loop comes to its end, with the same bits.

Each function is made to fail in the first of `LOOPS` that calls it. ``make soak`` does it to all of them, in an hour.
"""

from __future__ import annotations

import shutil
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ampscope
from tests.support.training.guarded_training import leave_nothing
from tests.support.training.injuries.injected_faults import Fault, Function, counted, functions
from tests.support.training.injuries.loops import LOOPS
from tests.support.training.injuries.soak import Record, soaked
from tests.support.training.torch_state import AT_REST, installed, settings
from tests.support.training.twin_runs import differences, exact_state, seed_everything, train_unwatched

#: Of all injections, one in so many is tried each time; all of them in so many tests.
SAMPLE, SHARDS = 150, 8
#: How many calls of a door are tried until one lets a fault through.
CALLS = 32
#: An object's own attribute, in whose place nothing can be put.
NOT_REPLACED = frozenset({"hooks.instrumented.Instrumented.__class__"})
#: What the loop itself calls, and the doors behind it: the little that runs before anything can be caught.
DOORS = frozenset(
    {
        "hooks.module_calls.WatchedModule.__call__",  # asks whether anything is compiled, and goes through a door
        "hooks.process_hooks._backward",  # the same
        "hooks.process_hooks.original_backward",  # one look into a table: what the loop asked for
        "hooks.transform_calls._told",  # asks whether it is inside a transform, and goes through a door
        "hooks.transform_calls._behind_door",
        "hooks.transform_calls._Reading.__torch_function__",
        "tape.tape_mode.TapeMode.__torch_function__",
        "tape.tape_mode.TapeMode._left",  # with an exception of the loop's in hand
        "loop_state.loop_mode.LoopMode.__torch_function__",
        "torch_support.torch_private.is_tracing",  # one question of torch's, before the door of a module
        "torch_support.guard.through",
        "torch_support.guard.tell",
        "torch_support.guard.left",
        "torch_support.guard._UsersCall.__init__",
        "torch_support.guard.surely",  # catches what taking things away meets, and tries again
        "torch_support.guard.Suppressed.__init__",  # the same
        "torch_support.guard.Suppressed.__enter__",
        "scope.Scope.close",  # called by the user
        "events.end_in_flight",  # the same: what is being handled as `close` is called
        *NOT_REPLACED,
    }
)


class Injection(NamedTuple):
    """A fault to come."""

    loop: str
    function: Function
    at: int  #: which call of it
    error: type[BaseException]

    def __str__(self) -> str:
        return f"{self.function} at its call {self.at} in {self.loop}, {self.error.__name__}"


def run(loop: str, folder: Path, watching: Callable[[], object]) -> dict[str, bytes]:
    """The end of a training under watch; ``watching`` is called once the watch has begun."""
    scopes: list[ampscope.Scope] = []

    def watch(*watched: Any, **options: Any) -> None:
        ours: dict[str, Any] = {
            "dir": folder / str(len(scopes)),
            "quiet": True,
            "every": 2,
            "audit_every": 2,
            "save_tensors": True,
        }
        scopes.append(ampscope.watch(*watched, **(ours | options)))
        watching()

    seed_everything()
    try:
        return exact_state(LOOPS[loop](watch))
    finally:
        for scope in scopes:
            scope.close()


@pytest.fixture(scope="module")
def injections(tmp_path_factory: pytest.TempPathFactory) -> list[Injection]:
    """All: of each function in the first loop that calls it, at the first call and in the middle."""
    known: set[str] = set()
    return [each for loop in LOOPS for each in _injections(loop, known, tmp_path_factory.mktemp("run"))]


def is_at_door(injection: Injection) -> bool:
    return str(injection.function) in DOORS


def _injections(loop: str, known: set[str], folder: Path) -> Iterator[Injection]:
    calls: Counter[int] = Counter()
    run(loop, folder / "warm", lambda: None)
    with counted(calls):
        run(loop, folder / "run", lambda: None)
    for function in functions():
        count = calls[id(function.code)]
        if count and str(function) not in known:
            known.add(str(function))
            for at in sorted({1, 1 + count // 2}):
                yield Injection(loop, function, at, RuntimeError)
                yield Injection(loop, function, at, MemoryError)


@pytest.fixture(scope="module")
def unwatched() -> dict[str, dict[str, bytes]]:
    """How each loop ends by itself."""
    torch.set_num_threads(1)
    return {name: train_unwatched(loop) for name, loop in LOOPS.items()}


def suffered(injection: Injection, unwatched: dict[str, dict[str, bytes]], folder: Path) -> str:
    """What the loop has suffered by a fault; nothing, if all is well."""
    fault, before = Fault(injection.function, injection.at, injection.error), (AT_REST, settings())

    def arm() -> None:
        fault.armed = True

    with warnings.catch_warnings(), fault.injected():
        warnings.simplefilter("ignore")
        try:
            changed = differences(run(injection.loop, folder, arm), unwatched[injection.loop])
            return f"{injection}: {changed}" if changed else _left(injection, before)
        except injection.error:
            return f"{injection}: it was raised"
        finally:
            fault.armed = False
            leave_nothing()
            shutil.rmtree(folder, ignore_errors=True)


def _left(injection: Injection, before: tuple[Any, Any]) -> str:
    (now, under), (at_rest, at_first) = (installed(), settings()), before
    left = [name for name, value in now.items() if value != at_rest[name]]
    changed = "" if under == at_first else f"settings {under}, were {at_first}"
    return f"{injection}: it leaves {left} {changed}" if left or changed else ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_sample_of_all_faults(
    injections: list[Injection], unwatched: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    sample = [each for each in injections if not (is_at_door(each) or zlib.crc32(str(each).encode()) % SAMPLE)]
    assert len(sample) > 25
    assert [text for each in sample if (text := suffered(each, unwatched, tmp_path / "run"))] == []


@pytest.mark.soak
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_all_faults(
    shard: int,
    injections: list[Injection],
    unwatched: dict[str, dict[str, bytes]],
    tmp_path: Path,
    record_property: Record,
) -> None:
    faults = [each for each in injections[shard::SHARDS] if not is_at_door(each)]
    reached = [text for each in faults if (text := suffered(each, unwatched, tmp_path / "run"))]
    soaked(record_property, "faults in capture: reached the loop", len(faults), len(reached))
    assert reached == []


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_each_door_is_on_the_list_for_what_it_lets_through(
    injections: list[Injection], unwatched: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    at_doors = [each for each in injections if is_at_door(each) and each.error is RuntimeError]
    open_ones: set[str] = set()
    for door in at_doors:
        for at in dict.fromkeys([door.at, *range(1, CALLS)]):  # of what is called behind other doors, too, not each
            if {str(door.function)} <= open_ones | NOT_REPLACED:
                break
            if suffered(door._replace(at=at), unwatched, tmp_path / "run"):
                open_ones.add(str(door.function))
    assert open_ones == DOORS - NOT_REPLACED
