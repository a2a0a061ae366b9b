"""Which of the files that a run saved its state to is the last that is whole, on traces written row by row."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ampscope.analysis.causes import cause_entry
from ampscope.analysis.cures.going_back import in_words, with_files
from ampscope.analysis.diagnosis.diagnosis import diagnose
from ampscope.analysis.results import Finding, Incident, Remedy, SavedFile, SavedFiles
from ampscope.trace.evidence import BadTensor, Evidence
from ampscope.trace.schema import EventKind, Looked, StateKind, Trigger
from ampscope.trace.vocabulary import Cause, Severity
from tests.support.trace_builder import TraceBuilder

BOTH = ("weights", "optimizer")
BAD = 40


def save(trace: TraceBuilder, name: str, step: int, *holds: str, **told: Any) -> None:
    told = {"path": f"/runs/{name}", "holds": holds or BOTH, "whole": holds or BOTH, "after": {"0": step}, **told}
    trace.event(step=step + 1, kind=EventKind.SAVED, text=json.dumps(told))


def bad_state(
    trace: TraceBuilder, kind: StateKind, bad_at: int, finite_at: int | None, *, when: Looked = Looked.AFTER
) -> None:
    triggers = {StateKind.WEIGHT: Trigger.NONFINITE_WEIGHT, StateKind.BUFFER: Trigger.NONFINITE_BUFFER}
    seen = BadTensor(
        kind=kind, name="w", owner="", dtype="float32", nan=1, numel=8, finite_at=finite_at, bad_at=bad_at, when=when
    )
    trigger = triggers.get(kind, Trigger.NONFINITE_STATE)
    trace.incident(step=bad_at, trigger=trigger, evidence=Evidence(state=(seen,)).as_json())


def steps(trace: TraceBuilder, count: int = 100) -> None:
    for _ in range(count):
        trace.step(loss=1.0, grad_norm=1.0)


def ruined(trace: TraceBuilder, *, good_after: bool = False, **late: Any) -> None:
    """Gradients of step `BAD` are not finite, and the optimizer takes them."""
    steps(trace, BAD)
    trace.step(loss=math.nan, grad_norm=math.nan, skipped=False, **late)
    trace.incident(step=BAD, trigger=Trigger.NONFINITE_LOSS)
    for _ in range(20):
        good = {"loss": 1.0, "grad_norm": 1.0} if good_after else {"loss": math.nan, "grad_norm": math.nan}
        trace.step(skipped=False, **good)


def saved(trace: TraceBuilder) -> SavedFiles | None:
    return diagnose(trace.close()).saved


@pytest.fixture
def trace(tmp_path: Path) -> TraceBuilder:
    return TraceBuilder(tmp_path / "run")


class TestGradientsThatTheOptimizerTook:
    def test_what_was_saved_up_to_that_step_is_whole(self, trace: TraceBuilder) -> None:
        ruined(trace)
        for step in (30, 39, 40, 50):
            save(trace, f"{step}.pt", step)
        assert saved(trace) == SavedFiles(
            last_whole=SavedFile(path="/runs/39.pt", step=39, holds=BOTH), spoilt=2, unknown=0
        )

    def test_a_save_within_a_step_may_hold_what_that_step_did(self, trace: TraceBuilder) -> None:
        ruined(trace)
        save(trace, "a.pt", 38, open=True)
        save(trace, "b.pt", 39, open=True)
        assert saved(trace) == SavedFiles(
            last_whole=SavedFile(path="/runs/a.pt", step=38, holds=BOTH),
            unknown=1,
            unknown_from=39,
            unknown_to=39,
        )

    def test_a_file_that_is_written_again_holds_what_came_last(self, trace: TraceBuilder) -> None:
        ruined(trace)
        save(trace, "best.pt", 20)
        for step in (30, 45):
            save(trace, "last.pt", step)
        told = saved(trace)
        assert told is not None
        assert (told.last_whole, told.spoilt) == (SavedFile(path="/runs/best.pt", step=20, holds=BOTH), 1)
        assert told.written_again is None

    def test_where_all_were_written_again_that_is_said(self, trace: TraceBuilder) -> None:
        ruined(trace)
        for step in (30, 45):
            save(trace, "last.pt", step)
        told = saved(trace)
        assert told is not None
        assert (told.last_whole, told.written_again) == (SavedFile(path="/runs/last.pt", step=30, holds=BOTH), 45)

    def test_a_training_that_went_on_well_has_no_such_files(self, trace: TraceBuilder) -> None:
        ruined(trace, good_after=True)
        save(trace, "a.pt", 45)
        assert saved(trace) is None

    def test_a_file_of_weights_is_gone_back_to_where_there_is_one(self, trace: TraceBuilder) -> None:
        ruined(trace)
        save(trace, "w.pt", 20, "weights")
        save(trace, "o.pt", 30, "optimizer")
        told = saved(trace)
        assert told is not None
        assert told.last_whole == SavedFile(path="/runs/w.pt", step=20, holds=("weights",))

    def test_without_files_nothing_is_said(self, trace: TraceBuilder) -> None:
        ruined(trace)
        found = diagnose(trace.close())
        assert found.saved is None
        assert not any("saved" in remedy.text for each in found.incidents for remedy in each.remedies)

    def test_what_was_resumed_may_be_whole_again(self, trace: TraceBuilder, tmp_path: Path) -> None:
        ruined(trace)
        save(trace, "a.pt", 30)
        trace.close()
        later = TraceBuilder(tmp_path / "run")
        save(later, "b.pt", 60)
        save(later, "c.pt", 10)  # steps may be counted anew
        told = saved(later)
        assert told is not None
        assert (told.spoilt, told.unknown) == (0, 2)


class TestStateThatWasLookedAt:
    def test_between_two_looks_it_is_not_known(self, trace: TraceBuilder) -> None:
        steps(trace, 90)
        bad_state(trace, StateKind.WEIGHT, 90, 64)
        for step in (60, 64, 65, 80, 89, 90, 95):
            save(trace, f"{step}.pt", step)
        assert saved(trace) == SavedFiles(
            last_whole=SavedFile(path="/runs/64.pt", step=64, holds=BOTH),
            spoilt=2,
            unknown=3,
            unknown_from=65,
            unknown_to=89,
        )

    def test_weights_alone_may_be_whole_where_the_optimizers_state_is_not(self, trace: TraceBuilder) -> None:
        steps(trace)
        bad_state(trace, StateKind.OPTIMIZER, 90, 64)
        save(trace, "w.pt", 95, "weights")
        save(trace, "both.pt", 95)
        told = saved(trace)
        assert told is not None
        assert (told.last_whole, told.spoilt, told.unknown) == (None, 1, 1)

    def test_what_would_have_turned_bad_and_did_not_spoils_nothing(self, trace: TraceBuilder) -> None:
        steps(trace)
        bad_state(trace, StateKind.OPTIMIZER, 90, 64, when=Looked.FORESEEN)
        save(trace, "a.pt", 95)
        assert saved(trace) is None

    def test_a_learning_rate_may_be_nan_before_its_step(self, trace: TraceBuilder) -> None:
        steps(trace, 50)
        bad_state(trace, StateKind.SETTING, 50, 49, when=Looked.BEFORE)
        for step in (48, 49, 50):
            save(trace, f"{step}.pt", step)
        told = saved(trace)
        assert told is not None
        assert told.last_whole is not None
        assert (told.last_whole.step, told.unknown, told.spoilt) == (48, 1, 1)

    def test_weights_with_which_the_training_went_on_well_may_have_been_loaded_anew(self, trace: TraceBuilder) -> None:
        steps(trace)
        bad_state(trace, StateKind.WEIGHT, 20, 16)
        save(trace, "a.pt", 95)
        told = saved(trace)
        assert told is not None
        assert (told.spoilt, told.unknown) == (0, 1)

    def test_a_buffer_may_not_be_in_the_file(self, trace: TraceBuilder) -> None:
        steps(trace, 20)
        bad_state(trace, StateKind.BUFFER, 20, 16)
        save(trace, "a.pt", 19)
        save(trace, "b.pt", 20)
        told = saved(trace)
        assert told is not None
        assert (told.last_whole, told.spoilt, told.unknown) == (None, 0, 2)

    def test_a_file_of_a_part_may_be_without_what_is_bad(self, trace: TraceBuilder) -> None:
        steps(trace, 90)
        bad_state(trace, StateKind.WEIGHT, 90, 64)
        save(trace, "all.pt", 60)
        save(trace, "part.pt", 62, whole=["optimizer"])
        save(trace, "part.pt", 95, whole=["optimizer"])
        told = saved(trace)
        assert told is not None
        assert told.last_whole == SavedFile(path="/runs/all.pt", step=60, holds=BOTH)
        assert (told.spoilt, told.unknown) == (0, 1)

    def test_each_optimizer_counts_its_own_steps(self, trace: TraceBuilder) -> None:
        steps(trace, 20)
        bad_state(trace, StateKind.WEIGHT, 20, 16)
        save(trace, "a.pt", 90, after={"0": 16, "1": 80})
        save(trace, "b.pt", 91, after={"0": 20, "1": 81})
        told = saved(trace)
        assert told is not None
        assert told.last_whole is not None
        assert (told.last_whole.path, told.spoilt) == ("/runs/a.pt", 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"path": 3, "holds": 4, "after": 5}',
        '{"path": "/a", "holds": ["weights"], "after": {"x": 1, "0": "y", "99999999": 1}}',
        '{"path": "/a", "holds": [[]], "after": []}',
    ],
)
def test_a_damaged_event_is_passed_over(trace: TraceBuilder, text: str) -> None:
    ruined(trace)
    trace.event(step=3, kind=EventKind.SAVED, text=text)
    diagnose(trace.close())


class TestWords:
    LAST = SavedFile(path="/runs/a.pt", step=1999, holds=BOTH)

    def test_all_of_it(self) -> None:
        told = SavedFiles(last_whole=self.LAST, spoilt=2, unknown=3, unknown_from=2000, unknown_to=2500)
        assert in_words(told) == (
            "The last file saved while everything was whole is /runs/a.pt, after step 1,999 (weights and optimizer "
            "state). 2 files saved later hold values that are not finite. Whether 3 files saved after steps 2,000 to "
            "2,500 are whole is not known."
        )

    def test_one_of_each(self) -> None:
        first = SavedFile(path="/a", step=-1, holds=("weights",))
        told = in_words(SavedFiles(last_whole=first, spoilt=1, unknown=1, unknown_from=4, unknown_to=4))
        assert told == (
            "The last file saved while everything was whole is /a, before the first step (weights). 1 file saved later "
            "holds values that are not finite. Whether 1 file saved after step 4 is whole is not known."
        )

    def test_a_part_is_said_to_be_one(self) -> None:
        part = SavedFile(path="/a", step=3, holds=BOTH, parts=("weights",))
        assert "(part of the weights and optimizer state)" in in_words(SavedFiles(last_whole=part))

    def test_no_other_file_and_none_that_is_whole(self) -> None:
        assert in_words(SavedFiles(last_whole=self.LAST)).endswith(" None was saved later.")
        assert in_words(SavedFiles(spoilt=1)).startswith("No file is known to have been saved while everything was")

    def test_the_advice_to_go_back_names_the_file(self, trace: TraceBuilder) -> None:
        steps(trace)
        bad_state(trace, StateKind.WEIGHT, 90, 64)
        save(trace, "a.pt", 60)
        primary = diagnose(trace.close()).primary
        assert primary is not None
        (back,) = [each.text for each in primary.remedies if "/runs/a.pt" in each.text]
        assert back.startswith(f"Go back to {cause_entry.CHECKPOINT}; ")

    def test_what_ruined_the_state_gets_that_advice(self, trace: TraceBuilder) -> None:
        ruined(trace)
        save(trace, "a.pt", 30)
        primary = diagnose(trace.close()).primary
        assert primary is not None
        assert primary.remedies[-1].text.startswith(f"Go back to {cause_entry.CHECKPOINT}: ")

    @pytest.mark.parametrize("kind", [Incident, Finding])
    def test_it_comes_before_what_did_not_help(self, kind: Any) -> None:
        helped, failed = Remedy(text="a", verified=True), Remedy(text="b", verified=False)
        told = {"count": 1, "source": None} if kind is Finding else {"phase": "forward"}
        item = kind(
            step=1, last_step=1, severity=Severity.ERROR, cause=Cause.UNKNOWN, remedies=(helped, failed), **told
        )
        texts = [each.text for each in with_files(item, SavedFiles(last_whole=self.LAST), is_primary=True).remedies]
        assert (texts[0], texts[-1], len(texts)) == ("a", "b", 3)
        assert with_files(item, SavedFiles(last_whole=self.LAST), is_primary=False) == item
