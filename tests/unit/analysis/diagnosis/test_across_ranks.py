"""The rank that a bad value began on, from what every rank recorded by itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ampscope import diagnose
from ampscope.analysis.causes.catalogue import what_in_words
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.schema import Node, Phase, ReplayStatus, Trigger
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.support.trace_builder import TraceBuilder
from tests.support.traced_steps import FULL, NOTANUMBER, OVERFLOWN, Step

BAD = 30
OWN: Mapping[str, Any] = {"trigger": Trigger.NONFINITE_LOSS, "loss": math.nan, "replay": ReplayStatus.EXACT}
AGAIN: Mapping[str, Any] = {"replay": ReplayStatus.NOT_REPRODUCED}
SENT: Mapping[str, Any] = {"replay": ReplayStatus.RECEIVED}
UNSEEN: Mapping[str, Any] = {"replay": ReplayStatus.UNAVAILABLE, "replay_reason": "a hook of the loop's"}


def job(folder: Path, incidents: Mapping[int, Mapping[str, Any] | None], *, world: int, line: int = 7) -> Diagnosis:
    """Ranks with these incidents at one step; None: a rank that knows of none."""
    for rank, facts in incidents.items():
        trace = TraceBuilder(folder, rank=rank, world_size=world)
        for step in range(60):
            bad = step == BAD and facts is not None
            loss = facts.get("loss", 2.0) if bad and facts else 2.0
            trace.step(loss=loss, skipped=bad, grad_norm=math.nan if bad else 1.0 + step)
        if facts is not None:
            if facts.get("replay") == ReplayStatus.EXACT:
                _overflow(trace, line)
            trace.incident(step=BAD, bad_params=("attn.proj.weight",), **facts)
        trace.close()
    return diagnose(folder)


def _overflow(trace: TraceBuilder, line: int) -> None:
    traced = Step(trace, step=BAD)
    x = traced.entry(out=(-300.0, 300.0))
    weight = traced.entry(Node.PARAMETER, "attn.proj.weight", out=(-300.0, 300.0))
    product = traced.op("bmm", x, weight, out=OVERFLOWN, module="attn", module_type="Attention", line=line)
    traced.loss(traced.op("mean", product, out=NOTANUMBER, module="", phase=Phase.LOSS, dtype=FULL))


def only(diagnosis: Diagnosis) -> Incident:
    (incident,) = [one for one in diagnosis.incidents if one.severity is not Severity.INFO]
    assert diagnosis.primary == incident
    return incident


@pytest.mark.parametrize("received", [AGAIN, SENT, UNSEEN], ids=["finite again", "received", "not replayed"])
def test_the_origin_is_told_and_not_the_one_that_received_it(run_folder: Path, received: Mapping[str, Any]) -> None:
    diagnosis = job(run_folder, {0: received, 1: OWN}, world=2)
    incident = only(diagnosis)
    assert (incident.cause, incident.op, incident.module) == (Cause.FP16_OVERFLOW, "aten.bmm.default", "attn")
    assert (incident.rank, incident.received_by, incident.also_on) == (1, (0,), ())
    assert "on rank 1 of 2: bmm in module attn" in diagnosis.summary
    assert diagnosis.summary.endswith("Rank 0 received it.")


def test_two_ranks_with_a_bad_batch_at_once(run_folder: Path) -> None:
    incident = only(job(run_folder, {0: OWN, 1: SENT, 2: OWN}, world=3))
    assert (incident.rank, incident.also_on, incident.received_by, incident.count) == (0, (2,), (1,), 1)


def test_what_came_from_a_rank_that_is_not_in_the_trace(run_folder: Path) -> None:
    diagnosis = job(run_folder, {0: AGAIN}, world=2)
    incident = only(diagnosis)
    assert incident.cause is Cause.UNKNOWN
    assert "not in this trace at that step: rank 1" in diagnosis.summary
    assert "on rank 0 of 2" in diagnosis.summary


def test_where_all_are_cleared_nobody_is_accused(run_folder: Path) -> None:
    incident = only(job(run_folder, {0: SENT, 1: AGAIN}, world=2))
    assert incident.cause is Cause.UNKNOWN
    assert "where the ranks' gradients were joined" in incident.explanation


def test_the_one_whose_step_could_not_be_run_again_is_left(run_folder: Path) -> None:
    (incident,) = job(run_folder, {0: SENT, 1: UNSEEN}, world=2).incidents
    assert (incident.rank, incident.received_by, incident.replay) == (1, (0,), ReplayStatus.UNAVAILABLE)


def test_what_a_scale_that_finds_its_place_costs_is_no_failure_wherever_it_began(run_folder: Path) -> None:
    for rank in (0, 1):
        trace = TraceBuilder(run_folder, rank=rank, world_size=2)
        for step in range(30):
            trace.step(scale=65536.0 / 2 ** min(step, 2), skipped=step < 2, grad_norm=math.inf if step < 2 else step)
        for step in (0, 1):
            trace.incident(step=step, **SENT)
        trace.close()
    assert diagnose(run_folder).verdict is Verdict.HEALTHY


def test_a_loss_of_its_own_that_does_not_repeat_began_there(run_folder: Path) -> None:
    own = {**AGAIN, "trigger": Trigger.NONFINITE_LOSS, "loss": math.nan}
    incident = only(job(run_folder, {0: SENT, 1: own}, world=2))
    assert (incident.cause, incident.rank, incident.received_by) == (Cause.UNKNOWN, 1, (0,))


def test_one_that_the_others_know_nothing_of_is_its_own(run_folder: Path) -> None:
    diagnosis = job(run_folder, {0: AGAIN, 1: None}, world=2)
    assert [one.rank for one in diagnosis.incidents if one.cause is Cause.UNKNOWN] == [0]


def test_very_many_ranks_with_the_same_failure_are_one_incident(run_folder: Path) -> None:
    incident = only(job(run_folder, dict.fromkeys(range(9), OWN), world=9))
    assert (incident.rank, incident.also_on, incident.count) == (0, tuple(range(1, 9)), 1)


def test_the_same_mistake_on_every_rank_is_one_finding(run_folder: Path) -> None:
    for rank in range(3):
        trace = TraceBuilder(run_folder, rank=rank, world_size=3)
        trace.step(grad_norm=1.0)
        trace.finding(step=0)
        trace.close()
    diagnosis = diagnose(run_folder)
    (finding,) = diagnosis.findings
    assert (finding.rank, finding.also_on, finding.world) == (0, (1, 2), 3)
    assert diagnosis.verdict is Verdict.PROBLEM


def test_what_the_reduction_itself_lost_is_told_as_that(run_folder: Path) -> None:
    reason = "this rank's own gradients came out finite, up to 7e+04; a hook sends them as float16, which ends at 65504"
    lost = {**SENT, "replay_reason": reason, "evidence": '{"reduction": {"dtype": "float16", "overflows": true}}'}
    (incident,) = job(run_folder, {0: SENT, 1: lost}, world=2).incidents
    assert (incident.rank, incident.received_by, incident.cause) == (1, (0,), Cause.UNKNOWN)
    assert incident.explanation == f"It was lost on the way to the other ranks: {reason}."


def test_what_a_step_wrote_into_the_weights_is_told_with_that_step(run_folder: Path) -> None:
    for rank in range(2):
        trace = TraceBuilder(run_folder, rank=rank, world_size=2)
        for step in range(BAD + 4):
            bad = step >= BAD
            trace.step(grad_norm=math.nan if bad else 1.0 + step, skipped=False, scale=None)
        facts = OWN if rank == 1 else SENT
        if rank == 1:
            _overflow(trace, 7)
        trace.incident(step=BAD, bad_params=("attn.proj.weight",), **facts)
        traced = Step(trace, step=BAD + 1)
        weight = traced.entry(Node.PARAMETER, "attn.proj.weight", out=NOTANUMBER)
        traced.loss(traced.op("mean", weight, out=NOTANUMBER, module="", phase=Phase.LOSS, dtype=FULL))
        trace.incident(step=BAD + 1, bad_params=("attn.proj.weight",), **OWN)
        for step in (BAD + 2, BAD + 3):
            trace.incident(step=step, bad_params=("attn.proj.weight",), **{**OWN, **UNSEEN})
        trace.close()
    diagnosis = diagnose(run_folder)
    primary, after = diagnosis.incidents
    assert diagnosis.primary == primary
    assert (primary.step, primary.rank, primary.cause) == (BAD, 1, Cause.FP16_OVERFLOW)
    assert (after.cause, after.step, after.last_step, after.count) == (Cause.BAD_WEIGHT, BAD + 1, BAD + 3, 3)
    assert (after.also_on, after.received_by) == ((1,), ())
    assert after.written_by is not None
    assert (after.written_by.step, after.written_by.op) == (BAD, "aten.bmm.default")
    assert f"since step {BAD}" in after.explanation
    assert what_in_words(after) == f"a weight that was already bad, since step {BAD}"


@pytest.mark.parametrize(("hook", "code"), [("fp16_compress_hook", "bf16_compress_hook"), ("", "")])
def test_what_was_lost_in_the_reduction_has_a_wider_one_as_its_cure(run_folder: Path, hook: str, code: str) -> None:
    lost = {**SENT, "evidence": json.dumps({"reduction": {"hook": hook, "dtype": "float16", "overflows": True}})}
    incident = only(job(run_folder, {0: SENT, 1: lost}, world=2))
    assert (incident.rank, incident.received_by) == (1, (0,))
    (remedy,) = incident.remedies
    assert "a dtype that holds them" in remedy.text
    assert code in remedy.code
    assert bool(remedy.code) == bool(hook)
