"""Settings may change while a run trains, by call and by a file; what cannot be honoured changes nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampscope
from ampscope.capture.record import configuration
from ampscope.capture.record.configuration import FILE
from ampscope.capture.torch_support import guard
from ampscope.errors import WatchError
from ampscope.trace.schema import EventKind, Node, Table
from tests.support.training.small_loop import POISONED, mlp, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=-1))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of AMPscope's own ends the test."""
    monkeypatch.setattr(guard, "RAISE", True)


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets a second pass."""
    now = [1.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def passes() -> None:
        now[0] += 1.0

    return passes


class Loop:
    """Trains the net, a step at a time."""

    def __init__(self, watch: Callable[..., ampscope.Scope], **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.scope = watch(self.net, **options)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(torch.randn(3, 4)), torch.tensor([0, 1, 1])).backward()
            self.optimizer.step()

    def run(self) -> ampscope.Run:
        self.scope.close()
        return ampscope.open_run(self.scope.folder)

    def write(self, text: str) -> None:
        """Puts the file there, as an editor does, with a time of its own."""
        file = self.scope.folder / FILE
        beside = file.with_suffix(".new")
        beside.write_text(text)
        state = file.stat().st_mtime_ns if file.exists() else 0
        os.utime(beside, ns=(0, state + 1))
        beside.replace(file)


def traced_steps(run: ampscope.Run) -> list[int]:
    return [row.step for row in run.rows(Table.STEPS) if row.traced]


def notes(run: ampscope.Run, kind: EventKind = EventKind.NOTE) -> list[tuple[int, str]]:
    return [(row.step, row.text) for row in run.rows(Table.EVENTS, kind=kind)]


def points(run: ampscope.Run, step: int) -> set[tuple[str, str]]:
    sites = {site.site: site for site in run.rows(Table.SITES)}
    return {(sites[row.site].module, sites[row.site].op) for row in run.rows(Table.OPS, step=step)}


def test_a_call_counts_from_the_next_step_on(watch: Callable[..., ampscope.Scope]) -> None:
    loop = Loop(watch, every=0)
    loop.step(3)
    loop.scope.configure(every=2)
    loop.step(4)
    loop.scope.configure(every=2)  # as it is
    loop.scope.configure(every=0)
    loop.step(3)
    run = loop.run()
    assert traced_steps(run) == [4, 6]
    assert notes(run) == [
        (3, "what is traced has changed: every=2"),
        (7, "what is traced has changed: every=0"),
    ]


def test_healthy_steps_hold_what_is_asked_for(watch: Callable[..., ampscope.Scope]) -> None:
    loop = Loop(watch, every=1, modules="inner.*")
    loop.step()
    loop.scope.configure(modules=None, ops=["softmax", "aten._softmax"], parameters="head.*")
    loop.step()
    loop.scope.configure(ops=None, parameters=None)
    loop.step()
    run = loop.run()
    inner, changed, whole = (points(run, step) for step in range(3))
    assert {module for module, _ in inner} >= {"inner.0", "inner.1"}
    assert not [module for module, op in inner if module == "head"]
    assert {op for _, op in changed if op.startswith("aten")} == {"aten._softmax.default"}
    assert ("head", Node.PARAMETER) in changed
    assert {module for module, _ in whole} >= {"inner.0", "inner.1", "head"}
    for step in range(3):
        seqs = {row.seq for row in run.rows(Table.OPS, step=step)}
        assert all({edge.seq, edge.from_seq} <= seqs for edge in run.rows(Table.EDGES, step=step))


def test_an_incident_is_written_whole(run_folder: Path) -> None:
    def look(folder: Path, **options: Any) -> list[tuple[int, int]]:
        scopes: list[ampscope.Scope] = []
        torch.manual_seed(0)
        train(lambda *args: scopes.append(ampscope.watch(*args, dir=folder, quiet=True, **options)), mlp())
        scopes[0].close()
        rows = ampscope.open_run(folder).rows(Table.OPS, step=POISONED)
        return [(row.seq, row.numel) for row in rows if row.source == "replay"]

    assert look(run_folder / "a", modules="0", every=1) == look(run_folder / "b", every=1) != []


def test_filters_and_settings_are_in_the_manifest(watch: Callable[..., ampscope.Scope]) -> None:
    run = Loop(watch, modules=["inner"], every=5).run()
    settings = run.manifest.configuration
    assert (settings["every"], list(settings["modules"]), settings["ops"]) == (5, ["inner"], None)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"modules": "blocks.*"}, "modules='blocks.*' is the name of none; there are inner, inner.0"),
        ({"parameters": ["head.*", "tail.*"]}, "parameters='tail.*' is the name of none; there are inner.0.weight"),
        ({"ops": "aten.sofmax"}, "ops='aten.sofmax' is the name of none; there are aten.mm.default"),
        ({"modules": 3}, "modules=3: give a pattern such as 'blocks.*.attn'"),
        ({"modules": []}, "modules=[]: give a pattern"),
        ({"every": -1}, "every=-1: give a whole number of steps"),
        ({"overhead": None}, "overhead=None: give the share of time"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    watch: Callable[..., ampscope.Scope], asked: dict[str, Any], told: str
) -> None:
    with pytest.raises(WatchError) as refused:
        Loop(watch, **asked)
    assert str(refused.value).startswith(told)
    loop = Loop(watch, every=1)
    with pytest.raises(WatchError) as refused:
        loop.scope.configure(**{"every": 7, **asked})
    assert str(refused.value).startswith(told)
    loop.step(2)
    run = loop.run()
    assert traced_steps(run) == [0, 1]
    assert notes(run) == []


def test_a_file_is_read_once_a_second(watch: Callable[..., ampscope.Scope], second: Callable[[], None]) -> None:
    loop = Loop(watch, every=0)
    loop.step()
    loop.write(json.dumps({"every": 1, "modules": "head"}))
    loop.step()
    second()
    loop.step(2)
    loop.write(json.dumps({"every": 0}))
    second()
    loop.step()
    run = loop.run()
    assert traced_steps(run) == [2, 3]
    assert {module for module, op in points(run, 3) if op.startswith("aten")} == {"head"}
    assert notes(run) == [
        (2, "what is traced has changed: every=1, modules=['head']"),
        (4, "what is traced has changed: every=0"),
    ]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param('{"every": 1, ', id="half written"),
        pytest.param("[1, 2]", id="no object"),
        pytest.param("[" * 100_000, id="too large"),
        pytest.param("[" * 60_000, id="nested too deeply"),
        pytest.param('{"evry": 1}', id="a name that is none"),
        pytest.param('{"every": 1, "modules": "nowhere"}', id="no such module"),
        pytest.param('{"every": true}', id="no number"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_once_and_changes_nothing(
    watch: Callable[..., ampscope.Scope], second: Callable[[], None], content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(watch, every=2, quiet=False)
    for _ in range(4):
        loop.write(content)
        loop.step()
        second()
    run = loop.run()
    assert traced_steps(run) == [0, 2]
    assert [text for _, text in notes(run)] == []
    warnings = [text for _, text in notes(run, EventKind.WARNING)]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{FILE} is left aside: ")
    assert capsys.readouterr().err.count(FILE) == 1


def test_only_a_regular_file_is_read(watch: Callable[..., ampscope.Scope], second: Callable[[], None]) -> None:
    loop = Loop(watch, every=1)
    os.mkfifo(loop.scope.folder / FILE)
    loop.step()
    second()
    loop.step()
    run = loop.run()
    assert traced_steps(run) == [0, 1]
    assert [text for _, text in notes(run, EventKind.WARNING)] == [f"{FILE} is left aside: it is no regular file"]


def test_a_slow_disk_is_asked_less_often(watch: Callable[..., ampscope.Scope], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter_clock()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    looks: list[int] = []
    loop = Loop(watch, every=0)
    monkeypatch.setattr(configuration.Configuration, "_look", lambda _: looks.append(1))
    loop.step(40)
    loop.scope.close()
    assert len(looks) == 1, "each look takes a second of this clock: the next comes after a thousand"


def iter_clock() -> Iterator[float]:
    now = 0.0
    while True:
        now += 1.0
        yield now


@pytest.mark.parametrize("patterns", [["*"] * 65, ["x" * 201], "x" * 60_000], ids=["many", "long", "longer"])
def test_patterns_are_few_and_short_and_what_is_quoted_is(run_folder: Path, patterns: str | list[str]) -> None:
    with pytest.raises(WatchError, match="at most 64 patterns of 200 characters") as refused:
        ampscope.watch(Net(), dir=run_folder, ops=patterns, quiet=True)
    assert len(str(refused.value)) < 300


def test_what_was_given_instead_of_patterns_is_quoted_in_part(run_folder: Path) -> None:
    with pytest.raises(WatchError, match="give a pattern such as") as refused:
        ampscope.watch(Net(), dir=run_folder, modules={"x" * 60_000: 1}, quiet=True)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 300
