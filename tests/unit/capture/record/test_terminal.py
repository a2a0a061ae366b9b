"""What a training prints while it is watched: few lines, on standard error, each with where to look."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from ampscope.capture.record.terminal import MAX_INCIDENTS, Terminal
from ampscope.trace.schema import ReplayStatus, Table
from ampscope.trace.vocabulary import MISTAKES_IN_WORDS, Cause
from tests.support.training.training_loop import TrainingLoop
from tests.support.training.usage_bench import Bench, loss_of


class Said:
    """A bench whose watch prints, and what it has printed."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str], **options: Any) -> None:
        self.folder = folder
        self._capture = capture
        self.scopes: list[ampscope.Scope] = []
        self.bench = Bench(self._watch, **options)

    def _watch(self, model: nn.Module, scaler: Any) -> None:
        self.scopes.append(ampscope.watch(model, scaler, dir=self.folder))

    def lines(self) -> list[str]:
        """The lines since the start, without the one that names the folder."""
        out, err = self._capture.readouterr()
        assert out == ""
        return [line for line in err.splitlines() if "recording to" not in line]

    @property
    def look(self) -> str:
        return f"Look: ampscope diagnose {self.folder}"


@pytest.fixture
def said(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Said]:
    said = Said(run_folder, capsys)
    yield said
    for scope in said.scopes:
        scope.close()


def clip(bench: Bench) -> None:
    nn.utils.clip_grad_norm_(bench.parameters, 1.0)


class TestMistakes:
    def test_the_first_of_a_kind_is_one_line(self, said: Said) -> None:
        for _ in said.bench.steps():
            clip(said.bench)
        (line,) = said.lines()
        place = r"tests/unit/capture/record/test_terminal\.py:\d+"
        told = re.escape("ampscope: step 0: gradients clipped before they were unscaled")
        assert re.fullmatch(f"{told} at {place}\\. {re.escape(said.look)}", line)

    def test_another_line_of_the_same_kind_is_recorded_and_not_told(self, said: Said) -> None:
        for number in said.bench.steps():
            if number % 2:
                nn.utils.clip_grad_value_(said.bench.parameters, 0.1)
            else:
                clip(said.bench)
        said.scopes[0].close()
        assert len(said.lines()) == 1
        assert len(ampscope.open_run(said.folder).rows(Table.FINDINGS)) == 2

    def test_another_kind_is_told(self, said: Said) -> None:
        for _ in said.bench.steps():
            clip(said.bench)
            with torch.autocast("cpu", dtype=torch.float16):
                said.bench.scaler.scale(loss_of(said.bench.model)).backward()
        assert len(said.lines()) == 2

    def test_a_right_loop_hears_nothing(self, said: Said) -> None:
        for _ in said.bench.steps():
            said.bench.scaler.unscale_(said.bench.optimizer)
            clip(said.bench)
        assert said.lines() == []

    def test_a_past_that_may_be_another_trainings_is_not_told(
        self, run_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Whether a scaler that starts afresh does harm shows only when steps are skipped."""
        earlier = Bench(lambda *_: None, optimizer=torch.optim.Adam)
        for _ in earlier.steps():
            pass
        said = Said(run_folder, capsys, optimizer=torch.optim.Adam)
        said.bench.optimizer.load_state_dict(earlier.optimizer.state_dict())
        for _ in said.bench.steps():
            pass
        said.scopes[0].close()
        assert said.lines() == []
        (row,) = ampscope.open_run(run_folder).rows(Table.FINDINGS)
        assert row.cause == Cause.MISUSE_SCALER_STATE_NOT_RESTORED

    def test_every_mistake_has_its_words(self) -> None:
        assert {cause for cause in Cause if cause.is_usage} <= MISTAKES_IN_WORDS.keys()


class TestIncidents:
    def test_the_last_that_is_told_says_so(self, said: Said) -> None:
        for _ in range(MAX_INCIDENTS + 2):
            for good in (False, True):
                said.bench.scaled(1.0 if good else float("nan"))
                said.bench.step()
        lines = said.lines()
        assert len(lines) == MAX_INCIDENTS
        assert not [line for line in lines[:-1] if "further" in line.lower()]
        assert lines[-1].endswith(f". Further incidents are recorded but not printed. {said.look}")

    def test_a_replay_that_could_not_be_has_its_reason(
        self, run_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = Drifting()
        with ampscope.watch(model, dir=run_folder):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            (model(torch.ones(1, 2)).sum() * float("nan")).backward()
            optimizer.step()
        line = capsys.readouterr().err.splitlines()[1]
        assert "(not replayed: a parameter is changed inside the forward pass). Look: " in line

    def test_a_long_reason_is_cut_and_on_one_line(self, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        terminal = Terminal(run_folder, quiet=False)
        terminal.incident("non-finite loss", 3, ReplayStatus.UNAVAILABLE, "word\n" * 100)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ampscope: step 3: non-finite loss (not replayed: word word")
        assert line.endswith(f" ...). Look: ampscope diagnose {run_folder}")
        assert line.count("word") < 25


class Ranks:
    """The terminals of a job's ranks, which share a folder.

    Args:
        folder: The run's folder.
        watched: Ranks that have a folder in it, of two.
    """

    def __init__(self, folder: Path, watched: tuple[int, ...] = (0, 1)) -> None:
        self.terminals = [Terminal(folder, quiet=False, rank=rank, world_size=2) for rank in range(2)]
        for rank in watched:
            (folder / f"rank={rank}").mkdir(parents=True)

    def fail(self, rank: int, *, step: int = 3, elsewhere: bool = False) -> None:
        status = ReplayStatus.RECEIVED if elsewhere else ReplayStatus.EXACT
        self.terminals[rank].incident("non-finite loss", step, status, "", elsewhere=elsewhere)

    def pass_step(self) -> None:
        for terminal in self.terminals:
            terminal.passed()


class TestRanks:
    @pytest.mark.parametrize("watched", [(0, 1), (1,)], ids=["both", "all but rank 0"])
    def test_one_watched_rank_says_where_the_run_goes_each_time_it_begins(
        self, watched: tuple[int, ...], run_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        terminals = Ranks(run_folder, watched).terminals
        for segment in range(2):
            for rank in watched:
                terminals[rank].begins(segment)
            assert capsys.readouterr().err == f"ampscope: recording to {run_folder}\n"

    def test_the_rank_that_failed_tells_and_the_one_that_received_does_not(
        self, run_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ranks = Ranks(run_folder)
        ranks.fail(0, elsewhere=True)
        ranks.fail(1)
        for _ in range(3):
            ranks.pass_step()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ampscope: rank 1, step 3: non-finite loss (replay: exact). Look: ")

    def test_of_ranks_that_failed_together_one_tells(
        self, run_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ranks = Ranks(run_folder)
        for rank in (1, 0):
            ranks.fail(rank)
        assert capsys.readouterr().err.count("step 3") == 1
        ranks.fail(0, step=4)
        assert capsys.readouterr().err.count("rank 0, step 4") == 1

    def test_what_no_rank_has_told_is_told_once_by_one_that_received_it(
        self, run_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ranks = Ranks(run_folder)
        for rank in range(2):
            ranks.fail(rank, elsewhere=True)
        ranks.pass_step()
        assert capsys.readouterr().err == "", "the step itself is over; the rank that failed may still be judging"
        ranks.pass_step()
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ampscope: step 3: non-finite loss (from another rank: finite on rank 0 when")

    @pytest.mark.parametrize("watched", [(0,), (0, 1)])
    def test_at_the_end_it_is_told_where_not_all_ranks_are_watched(
        self, watched: tuple[int, ...], run_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ranks = Ranks(run_folder, watched)
        ranks.fail(0, elsewhere=True)
        ranks.terminals[0].close()
        assert capsys.readouterr().err.count("step 3") == (len(watched) == 1)

    def test_a_folder_that_is_gone_keeps_no_line_back(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        Terminal(tmp_path / "gone", quiet=False, rank=1, world_size=2).once("key", "a line")
        assert capsys.readouterr().err == "ampscope: a line\n"


class Drifting(nn.Linear):
    """A model that changes its own weights."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def test_a_closed_terminal_is_no_fault(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = Said(run_folder, capsys)
    monkeypatch.setattr(sys, "stderr", None)
    for _ in said.bench.steps():
        clip(said.bench)
    said.scopes[0].close()
    assert len(ampscope.open_run(run_folder).rows(Table.FINDINGS)) == 1


@pytest.mark.parametrize("quiet", [False, True])
def test_it_is_quiet(run_folder: Path, capfd: pytest.CaptureFixture[str], quiet: bool) -> None:
    """One line at the start, on stderr; nothing on stdout; nothing at all when asked."""
    loop = TrainingLoop()
    with ampscope.watch(loop.model, loop.scaler, dir=run_folder, quiet=quiet):
        loop.step(3)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == (0 if quiet else 1)
    assert (str(run_folder) in err) is not quiet
