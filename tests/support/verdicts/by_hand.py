"""Diagnoses of one run, healthy, broken, misused and empty, and the parts that they are made of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ampscope.analysis.results import (
    Diagnosis,
    Finding,
    Incident,
    LastGood,
    Move,
    MoveKind,
    PathNode,
    Remedy,
    RunInfo,
    SourceLine,
)
from ampscope.trace.schema import ReplayStatus, Trigger
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.support.verdicts.operands import changed, operand

RUN = RunInfo(
    path="/runs/gpt",
    name="gpt",
    created=1_700_000_000.0,
    status="closed",
    steps=41_900,
    skipped=7,
    segments=2,
    device="cpu",
    model="GPT",
    parameters=114_270,
    versions={"torch": "2.13.0", "ampscope": "0.1.0"},
)
LINE = SourceLine(
    file="/home/me/gpt.py", line=47, function="Attention.forward", code="logits = q @ k.transpose(-2, -1)"
)
QUERY = operand(
    role="input 0",
    dtype="float16",
    shape="32x32x32",
    min=-86.125,
    max=75.4375,
    numel=32768,
    nan=0,
    posinf=0,
    neginf=0,
    zeros=3,
    subnormals=0,
    max_finite=86.125,
    min_positive=0.0016,
    exp_low=-10,
    exp_counts=(1, 2, 3),
)
PRODUCT = changed(QUERY, role="output 0", min=-59648.0, max=math.inf, posinf=4, max_finite=60640.0)


def node(
    seq: int, op: str, low: float | None = math.nan, high: float | None = math.nan, name: str = "", **columns: Any
) -> PathNode:
    """An op on the way of a bad value."""
    here = {"module": "blocks.0.attention", "phase": "forward", "dtype": "float16", "shape": "32x32x32", "source": LINE}
    return PathNode(seq=seq, op=op, name=name, min=low, max=high, **{**here, **columns})


def verdict(run: RunInfo, summary: str, *items: Incident | Finding) -> Diagnosis:
    """A diagnosis whose primary item is the first that is not harmless."""
    primary = next((item for item in items if item.severity != Severity.INFO), None)
    return Diagnosis(
        run=run,
        verdict=Verdict.PROBLEM if primary else Verdict.HEALTHY,
        summary=summary,
        primary=primary,
        incidents=tuple(item for item in items if isinstance(item, Incident)),
        findings=tuple(item for item in items if isinstance(item, Finding)),
    )


MOVES = (
    Move(
        kind=MoveKind.LEARNING_RATE,
        text="the learning rate went from 0.001 to 0.1 at step 291, the same in 290 good steps before",
        before=0.001,
        after=0.1,
        score=1000.0,
        seen=290,
        step=291,
    ),
    Move(
        kind=MoveKind.BATCH,
        text="90% of input x are zeros (10% at step 256), 8 times its usual move",
        before=0.1,
        after=0.9,
        unit="share",
        score=8.0,
        seen=6,
        step=294,
        op="input",
        name="x",
    ),
    Move(
        kind=MoveKind.RANGE,
        text="mm in blocks.0 reached 90 (3 at step 256), with 2 earlier steps to compare with",
        before=3.0,
        after=90.0,
        score=None,
        seen=2,
        step=294,
        op="aten.mm.default",
        module="blocks.0",
    ),
)
LAST_GOOD = LastGood(
    step=293,
    calm_step=291,
    sampled_step=256,
    summary=f"Last good step: 293. Since then: {MOVES[0].text}; {MOVES[1].text}.",
    moves=MOVES,
)
OVERFLOW = Incident(
    step=294,
    last_step=299,
    count=6,
    severity=Severity.ERROR,
    cause=Cause.FP16_OVERFLOW,
    phase="forward",
    op="aten.bmm.default",
    module="blocks.0.attention",
    module_type="Attention",
    source=LINE,
    inputs=(QUERY, replace(QUERY, role="input 1")),
    outputs=(PRODUCT,),
    path=(
        node(10, "aten.bmm.default", -59648.0, math.inf),
        *(node(11 + i, f"aten.op{i}.default") for i in range(12)),
        node(40, "loss", name="loss"),
    ),
    replay=ReplayStatus.EXACT,
    traced="replay",
    fp32_ok=True,
    trigger=Trigger.NONFINITE_LOSS,
    tripped=("head.weight",),
    explanation="The product is too large for float16, which ends at 65,504.",
    remedies=(
        Remedy(text="Scale the queries first.", code="q = q * q.shape[-1] ** -0.5\nlogits = q @ k", verified=True),
        Remedy(text="Lower the loss scale.", verified=False),
        Remedy(text="Use bfloat16.", untried="its turn did not come"),
    ),
    last_good=LAST_GOOD,
)
CALIBRATION = Incident(
    step=3,
    last_step=3,
    count=1,
    severity=Severity.INFO,
    cause=Cause.BENIGN_INITIAL_CALIBRATION,
    phase="backward",
    op="",
    module="",
    module_type="",
    source=None,
    explanation="This is how GradScaler works.",
)
CLIPPED = Finding(
    step=0,
    last_step=299,
    count=300,
    severity=Severity.WARNING,
    cause=Cause.MISUSE_CLIP_BEFORE_UNSCALE,
    source=replace(LINE, file="/home/me/train.py", line=12, code="clip_grad_norm_(model.parameters(), 1.0)"),
    explanation="Gradients were clipped while they were still multiplied by the loss scale.",
    remedies=(Remedy(text="Unscale before clipping.", code="scaler.unscale_(optimizer)", untried="it is of the loop"),),
)

BROKEN = verdict(
    RUN,
    "Step 294 had a non-finite loss: bmm in blocks.0.attention overflowed float16.",
    CALIBRATION,
    OVERFLOW,
    CLIPPED,
)
HEALTHY = verdict(
    replace(RUN, name="digits", skipped=1, segments=1),
    "No numerical fault in 41,900 steps; checked: gradients in all.",
    CALIBRATION,
)
MISUSED = verdict(RUN, "Gradients are clipped while scaled.", CLIPPED)
EMPTY = verdict(
    replace(RUN, steps=0, skipped=0, model="", parameters=0, device="", segments=1), "The run has no steps yet."
)

#: What a hostile or careless trace may hold where a name is expected.
HOSTILE = (
    "[bold red]x[/bold red] :smile: \x1b[31mred\x1b[0m \x07 \u202egnp.exe\u2066 [link=http://example.com]y[/link] \n"
)


def hostile() -> Diagnosis:
    """`BROKEN` with `HOSTILE` wherever a trace's own text is shown."""
    line = replace(LINE, file=f"/x/{HOSTILE}.py", function=HOSTILE, code=HOSTILE)
    incident = replace(
        OVERFLOW,
        op=HOSTILE,
        module=HOSTILE,
        module_type=HOSTILE,
        source=line,
        inputs=(replace(QUERY, role=HOSTILE, dtype=HOSTILE, shape=HOSTILE),),
        path=(replace(node(1, HOSTILE), name=HOSTILE, module=HOSTILE, source=line), node(2, "loss")),
        explanation=HOSTILE,
        replay_reason=HOSTILE,
        remedies=(Remedy(text=HOSTILE, code=HOSTILE, untried=HOSTILE),),
    )
    other = replace(CLIPPED, source=line, explanation=HOSTILE)
    run = replace(RUN, name=HOSTILE, model=HOSTILE, device=HOSTILE)
    return verdict(run, HOSTILE, incident, other)
