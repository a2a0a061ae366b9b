"""A fixed sample of mutants is told as it was: what is right stays so, and what is wrong is listed until it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.mutation.score import Case, Outcome, cases, scored, told

#: Of all mutants, every so many from this one on.
EVERY, FIRST = 12, 5
SAMPLE = list(cases())[FIRST::EVERY]
#: What is not right yet, by mutant; an entry goes when it is.
WRONG: dict[str, Outcome] = {
    'gpt bf16, fill: with float("inf")': Outcome.CAUSE,
    "conv fp16, duplicate: scaler.step(optimizer) twice": Outcome.STEP,
    'conv fp16, written: next(model.parameters()).data.view(-1)[0] = float("nan")': Outcome.PLACE,
    "conv bf16, delete: scaler.step(optimizer) deleted": Outcome.MISSED,
    "conv bf16, cast: kept in half": Outcome.PLACE,
    "teacher fp16, duplicate: scaler.step(optimizer) twice": Outcome.STEP,
    'teacher bf16, written: next(model.parameters()).data.view(-1)[0] = float("nan")': Outcome.PLACE,
    "accumulate fp16, delete: scaler.step(optimizer) deleted": Outcome.MISSED,
    "gan fp16, duplicate: scaler.step(makes) twice": Outcome.STEP,
    "gan fp16, swap: line 30 after 31": Outcome.FALSE_ALARM,
    "gan bf16, poisoned: x has nan": Outcome.PLACE,
}


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_mutant_is_told(case: Case, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        score = scored(case, tmp_path)
    finally:
        torch.set_num_threads(threads)
    if score.outcome is not Outcome.UNCLEAR:
        assert score.outcome is WRONG.get(str(case), Outcome.RIGHT), told(score)


def test_what_is_wrong_is_of_the_sample() -> None:
    assert WRONG.keys() <= {str(case) for case in SAMPLE}
