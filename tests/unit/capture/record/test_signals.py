"""A training whose figures and alerts go to others: it is not changed, and waits for none of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import ampscope
from ampscope.capture.record import signals as signals_module
from ampscope.capture.record.alerts import Alert, AlertKind, Diagnosing
from ampscope.capture.record.terminal import Terminal
from ampscope.errors import WatchError
from ampscope.trace.schema import EventKind, ReplayStatus, Table
from tests.support.training.small_loop import POISONED, STEPS, mlp, train
from tests.support.training.twin_runs import Watched, train_both

SOON = 30.0
#: What the diagnosis of the small loop says, without the second that it takes.
_PRIMARY = {
    "step": 0,
    "last_step": 3,
    "severity": "error",
    "cause": "fp16_overflow",
    "headroom_bits": None,
    "explanation": "",
    "remedies": [],
}
_DIAGNOSIS = {
    "verdict": "problem",
    "summary": "Gradients overflowed.",
    "primary": _PRIMARY,
    "incidents": [_PRIMARY],
    "findings": [],
}


class Kept:
    """A tracker that keeps what it is told."""

    def __init__(self, every: int = 2) -> None:
        self.every = every
        self.run: Path | None = None
        self.told: list[tuple[int, dict[str, float]]] = []
        self.alerts: list[Alert] = []
        self.threads: set[int] = set()
        self.closed = 0

    def begin(self, run: Path) -> None:
        self.run = run
        self.threads.add(threading.get_ident())

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self.threads.add(threading.get_ident())
        self.told.append((step, dict(figures)))

    def alert(self, alert: Alert) -> None:
        self.threads.add(threading.get_ident())
        self.alerts.append(alert)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed += 1


class Blocked(Kept):
    """One that never returns, until the test is over."""

    def __init__(self) -> None:
        super().__init__(every=1)
        self.go = threading.Event()

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        assert self.go.wait(SOON)
        super().figures(step, figures)


class Failing(Kept):
    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        raise ConnectionError("the server is gone")


@pytest.fixture(autouse=True)
def diagnosed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Diagnosing, "__call__", lambda _: _DIAGNOSIS)
    for name in ("CLOSE_S", "CLOSE_WITH_ALERTS_S", "DIAGNOSIS_AT_END_S"):  # a busy machine has slow threads
        monkeypatch.setattr(signals_module, name, SOON)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocked]:
    monkeypatch.setattr(signals_module, "CLOSE_S", 0.2)
    monkeypatch.setattr(signals_module, "CLOSE_WITH_ALERTS_S", 0.4)
    monkeypatch.setattr(signals_module, "DIAGNOSIS_AT_END_S", 0.1)
    tracker = Blocked()
    yield tracker
    tracker.go.set()


def loop(steps: int = STEPS) -> Callable[[Callable[..., Any]], Any]:
    return lambda watch: train(watch, mlp(), steps=steps)


def test_a_tracker_gets_figures_and_alerts_on_a_thread_of_its_own(tmp_path: Path) -> None:
    tracker = Kept()
    run = train_both(loop(), tmp_path / "run", log_to=tracker, every=1)
    rows = {row.step: row for row in run.steps}
    assert (tracker.run, tracker.closed) == (tmp_path / "run", 1)
    assert [step for step, _ in tracker.told] == [0, 2, 4]
    for step, figures in tracker.told:
        assert figures["ampscope/loss_scale"] == rows[step].scale
        assert figures["ampscope/grad_norm"] == rows[step].grad_norm
        assert figures["ampscope/skipped_share"] == pytest.approx((step > POISONED) / (step + 1))
        until = [row for row in run.steps if row.step <= step]
        observed, lasted = sum(row.observing_s for row in until), sum(row.duration_s for row in until)
        assert figures["ampscope/observing_share"] == pytest.approx(observed / lasted)
    assert len(tracker.threads - {threading.get_ident()}) == len(tracker.threads) == 1


def bad(watch: Callable[..., Any]) -> Any:
    """A loop whose losses are NaN from the first step on."""
    return train(watch, mlp(), lambda model, x, y: model(x).mul(float("nan")).sum(), steps=4)


def test_an_alert_is_told_with_its_diagnosis(tmp_path: Path) -> None:
    tracker, heard = Kept(), list[Alert]()
    run = train_both(bad, tmp_path / "run", log_to=[tracker], on_incident=heard.append)
    (alert,) = heard
    assert tracker.alerts == heard
    assert (alert.kind, alert.step, alert.what) == (AlertKind.INCIDENT, 0, "non-finite loss")
    assert (alert.run, alert.rank, alert.world_size) == (str(tmp_path / "run"), 0, 1)
    assert alert.replay == run.incidents[0].replay == ReplayStatus.EXACT
    assert alert.look == f"ampscope diagnose {tmp_path / 'run'}"
    assert (alert.verdict, alert.summary, alert.cause) == ("problem", "Gradients overflowed.", "fp16_overflow")
    assert run.warnings == []


def test_the_real_diagnosis_says_which_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(signals_module, "CLOSE_WITH_ALERTS_S", 120.0)
    monkeypatch.setattr(signals_module, "DIAGNOSIS_AT_END_S", 100.0)
    heard: list[Alert] = []
    Watched.train(bad, tmp_path / "run", on_incident=heard.append)
    (alert,) = heard
    assert (alert.verdict, alert.severity, alert.op) == ("problem", "error", "aten.mul.Tensor")
    assert alert.file.endswith("test_signals.py")
    assert alert.summary
    assert alert.summary == ampscope.diagnose(tmp_path / "run").summary


def test_no_step_and_no_end_waits_for_one_that_hangs(tmp_path: Path, blocked: Blocked) -> None:
    other = Kept()
    begun = time.monotonic()
    run = train_both(loop(20), tmp_path / "run", log_to=[blocked, other])
    assert [row.step for row in run.steps] == list(range(20))
    assert len(other.told) == 10, "who waits behind it is told all the same"
    assert blocked.told == []
    assert time.monotonic() - begun < SOON / 2


def test_a_fault_of_a_tracker_is_one_warning_and_its_own_end(tmp_path: Path) -> None:
    failing, other = Failing(), Kept()
    with pytest.warns(RuntimeWarning, match="the tracker Failing switched itself off after ConnectionError") as said:
        run = train_both(loop(), tmp_path / "run", log_to=[failing, other])
    assert len(said) == 1
    assert len(other.told) == 3
    (warning,) = run.warnings
    assert warning.startswith("the tracker Failing switched itself off after ConnectionError: the server is gone")
    assert ampscope.diagnose(tmp_path / "run").verdict == "healthy"


def test_a_callback_that_raises_is_not_called_again(tmp_path: Path) -> None:
    def page(alert: Alert) -> None:
        raise ValueError("no pager")

    with pytest.warns(RuntimeWarning, match="on_incident switched itself off after ValueError: no pager"):
        train_both(bad, tmp_path / "run", on_incident=page)


def test_a_callback_may_end_the_run(tmp_path: Path) -> None:
    scopes: list[ampscope.Scope] = []
    closed = threading.Event()

    def end(alert: Alert) -> None:
        scopes[0].close()
        closed.set()

    def watch(*args: Any, **options: Any) -> None:
        scopes.append(ampscope.watch(*args, dir=tmp_path / "run", quiet=True, on_incident=end, **options))

    bad(watch)
    assert closed.wait(SOON)


def test_alerts_that_come_too_fast_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Alert] = []

    def restless(watch: Callable[..., Any]) -> Any:
        turn = iter(range(100))
        return train(watch, mlp(), lambda m, x, y: m(x).sum() * (float("nan") if next(turn) % 2 else 1.0), steps=20)

    Watched.train(restless, tmp_path / "run", on_incident=heard.append)
    assert len(heard) == 5
    assert [alert.suppressed for alert in heard] == [0] * 5


class TestRanks:
    """The terminals of a job's ranks, which share a folder; what each tells others is kept."""

    @pytest.fixture
    def told(self, tmp_path: Path) -> list[tuple[int, str, bool]]:
        told: list[tuple[int, str, bool]] = []

        class Noted:
            def __init__(self, rank: int) -> None:
                self.rank = rank

            def admits(self) -> int:
                return 0

            def alert(self, alert: Alert, *, to_all: bool) -> None:
                told.append((self.rank, alert.headline, to_all))

        for rank in range(2):
            (tmp_path / f"rank={rank}").mkdir()
        signals: list[Any] = [Noted(rank) for rank in range(2)]
        self.terminals = [Terminal(tmp_path, rank, 2, signals[rank], quiet=True) for rank in range(2)]
        return told

    def test_the_rank_that_failed_tells_all_and_rank_0_its_trackers(self, told: list[tuple[int, str, bool]]) -> None:
        self.terminals[0].incident("non-finite gradient", 3, ReplayStatus.RECEIVED, "", elsewhere=True)
        self.terminals[1].incident("non-finite gradient", 3, ReplayStatus.EXACT, "")
        for _ in range(2):
            for terminal in self.terminals:
                terminal.passed()
        assert told == [
            (1, "rank 1, step 3: non-finite gradient (replay: exact)", True),
            (0, "rank 0, step 3: non-finite gradient (replay: received)", False),
        ]

    def test_more_is_told_than_printed(self, told: list[tuple[int, str, bool]]) -> None:
        for step in range(8):
            self.terminals[0].incident("non-finite loss", step, ReplayStatus.EXACT, "")
        assert len(told) == 8


def test_trackers_are_rank_0s(tmp_path: Path) -> None:
    tracker, heard = Kept(), list[Alert]()

    class Writer:
        rank, folder = 1, tmp_path

        def flush(self, _: float) -> None: ...

    told = signals_module.receivers(tracker, heard.append, None)
    writer: Any = Writer()
    signals = signals_module.Signals(told, writer, _guard, lambda _: None)
    signals.step(0, dict)
    signals.alert(Alert(kind=AlertKind.AHEAD, step=0, what="w", run="r", look="l", time=0.0), to_all=True)
    signals.close()
    assert (tracker.run, tracker.told, len(heard)) == (None, [], 1)


def _guard(part: str) -> Any:
    from ampscope.capture.torch_support.guard import Guard

    return Guard(part, lambda _: None)


def test_the_address_of_a_webhook_is_nowhere_in_the_trace(tmp_path: Path) -> None:
    address = "http://127.0.0.1:9/services/SECRET"
    model = mlp()
    scope = ampscope.watch(model, dir=tmp_path / "run", quiet=True, webhook="http://127.0.0.1:9/services/SECRET")
    scope.close()
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if address.encode() in path.read_bytes() or b"SECRET" in path.read_bytes()]
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert 'webhook="http://127.0.0.1:9/...redacted"' in manifest["configuration"]["watched_at"]["code"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"log_to": Kept}, r"log_to= takes trackers, as .*, not Kept"),
        ({"log_to": "logs"}, "not str"),
        ({"log_to": [Kept(), object()]}, "not object"),
        ({"log_to": Kept(every=0)}, "every=0"),
        ({"log_to": Kept(every=True)}, "every=True"),
        ({"on_incident": "print"}, "on_incident= takes a function of one ampscope.Alert, not str"),
        ({"webhook": "slack"}, "webhook= takes the whole address"),
    ],
)
def test_what_cannot_be_told_is_refused_at_once(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(WatchError, match=said):
        ampscope.watch(mlp(), dir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_who_asks_for_nothing_has_no_threads_for_it(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with ampscope.watch(mlp(), dir=tmp_path / "run", quiet=True):
        begun = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in begun if "diagnosis" in name or "tracker" in name]


def test_notes_of_what_was_left_behind(tmp_path: Path, blocked: Blocked, capsys: pytest.CaptureFixture[str]) -> None:
    def watch(*args: Any) -> ampscope.Scope:
        return ampscope.watch(*args, dir=tmp_path / "run", log_to=blocked)

    scopes: list[ampscope.Scope] = []
    train(lambda *args: scopes.append(watch(*args)), mlp())
    scopes[0].close()
    told = "the tracker Blocked did not end in time, and was left behind"
    assert capsys.readouterr().err.splitlines()[-1] == f"ampscope: {told}"
    assert not ampscope.open_run(tmp_path / "run").rows(Table.EVENTS, kind=EventKind.WARNING)
