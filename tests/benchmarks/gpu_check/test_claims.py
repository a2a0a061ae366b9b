"""A claim holds where AMPscope works, and is wrong where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_check import page
from gpu_check.alone import asked
from gpu_check.claim import Answer, Outcome
from gpu_check.claims import ALL, exact_replays, step_rows, training_unchanged
from gpu_check.recorded import Row, first_bad, rows
from gpu_check.trainings import Loop, watch

from ampscope.capture.tracing.light_statistics import Slots


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a claim asks of the process is taken back; the runs' folders are pytest's."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(training_unchanged, "STEPS", 4)
    monkeypatch.setattr(training_unchanged, "BAD", (2,))
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def ask(name: str) -> Answer:
    return asked(next(claim for claim in ALL if claim.name == name), torch.device("cpu"))


@pytest.mark.parametrize("name", ["unchanged", "named-backward", "extremes", "rates"])
def test_a_claim_holds_here(name: str) -> None:
    answer = ask(name)

    assert answer.outcome is Outcome.HOLDS, answer.seen


@pytest.mark.parametrize("claim", ["waits", "waits-fused", "captured", "graphed", "memory", "extremes-vast"])
def test_what_needs_a_gpu_is_skipped_with_the_reason(claim: str) -> None:
    answer = ask(claim)

    assert (answer.outcome, answer.seen[:12]) == (Outcome.SKIPPED, "needs CUDA: ")


def test_a_watch_that_draws_a_random_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch_and_draw(loop: Loop) -> Any:
        torch.rand(1)
        return watch(loop)

    monkeypatch.setattr(training_unchanged, "watch", watch_and_draw)

    answer = ask("unchanged")

    assert answer.outcome is Outcome.WRONG
    assert "losses" in answer.seen


def test_incidents_that_are_missing_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_unchanged, "rows", lambda *_, **__: [])

    assert ask("unchanged").seen == "1 steps went wrong, 0 incidents were recorded"


def test_another_module_than_the_one_that_overflowed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(folder: Path, step: int) -> Row:
        return (first_bad(folder, step) or {}) | {"module": "blocks.1.gain"}

    monkeypatch.setattr(exact_replays, "first_bad", elsewhere)

    answer = ask("named-backward")

    assert (answer.outcome, answer.seen[:23]) == (Outcome.WRONG, "named ('blocks.1.gain',")


def test_extremes_without_their_nan_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Slots.read
    monkeypatch.setattr(Slots, "read", lambda slots: [one._replace(min=0.0) for one in read(slots)])

    assert ask("extremes").outcome is Outcome.WRONG


def test_the_learning_rate_of_the_next_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_rows, "rows", lambda *a: (found := rows(*a))[1:] + found[-1:])

    assert ask("rates").seen.startswith("learning rates of other steps at steps [0, 1,")


def test_whatever_a_claim_raises_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> None:
        raise ZeroDivisionError("there is nothing")

    monkeypatch.setattr(Slots, "measure", breaks)

    assert ask("extremes").seen == "ZeroDivisionError: there is nothing"


def test_the_page_says_what_was_claimed_and_what_was_seen() -> None:
    answers = [
        Answer("named", "an overflow is named", Outcome.WRONG, "nothing was named", 1.0),
        Answer("waits", "no step waits", Outcome.SKIPPED, "needs CUDA: its count", 0.0),
        Answer("rates", "rates are right", Outcome.HOLDS, "20 steps", 2.0),
    ]

    assert "claimed: an overflow is named. Seen: nothing was named" in page.claims(answers)
    assert page.verdict(answers) == ("NOT RIGHT HERE: 1 of 2 claims hold, 1 could not be asked here. Wrong: named.")
    assert page.verdict(answers[1:]) == "AMPscope is right here: 1 of 1 claims hold, 1 could not be asked here."
