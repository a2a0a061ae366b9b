"""Verdicts on the scenes, written by hand, so that pages can be tried without the diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ampscope.analysis.results import Diagnosis, Finding, Incident, Operand, PathNode, Remedy, RunInfo, SourceLine
from ampscope.trace.schema import ReplayStatus, Trigger
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.support.scenes import HOSTILE, LONG, VERSIONS
from tests.support.trace_builder import START


def diagnosis_of(path: Path) -> Diagnosis:
    """What the tests' own ``diagnose`` says of a scene."""
    kind = path.name
    return DIAGNOSES[kind](path) if kind in DIAGNOSES else _verdict(path, "Healthy.")


def _info(path: Path, **facts: object) -> RunInfo:
    told = {
        "path": str(path),
        "name": path.name,
        "created": START,
        "status": "closed",
        "steps": 272,
        "skipped": 5,
        "segments": 1,
        "device": "NVIDIA H200",
        "model": "GPT",
        "parameters": 124_439_808,
        "versions": VERSIONS,
    }
    return RunInfo(**{**told, **facts})  # type: ignore[arg-type]  # a dict of every field's own type


def _verdict(path: Path, summary: str, *items: Incident | Finding, **facts: object) -> Diagnosis:
    primary = next((item for item in items if item.severity != Severity.INFO), None)
    return Diagnosis(
        run=_info(path, **facts),
        verdict=Verdict.PROBLEM if primary else Verdict.HEALTHY,
        summary=summary,
        primary=primary,
        incidents=tuple(item for item in items if isinstance(item, Incident)),
        findings=tuple(item for item in items if isinstance(item, Finding)),
    )


CALIBRATION = Incident(
    step=0,
    last_step=2,
    count=3,
    severity=Severity.INFO,
    cause=Cause.BENIGN_INITIAL_CALIBRATION,
    phase="backward",
    op="",
    module="",
    module_type="",
    source=None,
    trigger=Trigger.NONFINITE_GRADIENT,
    explanation="The scale starts at 65,536 and halves until the gradients fit. That is how GradScaler works.",
)

_SCORES = SourceLine(file="/home/me/gpt/model.py", line=34, function="forward", code="scores = q @ k.transpose(-2, -1)")
_SOFTMAX = replace(_SCORES, line=35, code="att = scores.softmax(-1)")
_LOSS = SourceLine(file="/home/me/gpt/train.py", line=52, function="train", code="loss = F.cross_entropy(logits, y)")


def _node(
    op: str,
    module: str,
    low: float | None,
    high: float | None,
    source: SourceLine | None,
    *,
    seq: int = 0,
    **other: str,
) -> PathNode:
    told = {"name": "", "phase": "forward", "dtype": "float16", "shape": "8x12x512x512", **other}
    return PathNode(seq=seq, op=op, module=module, min=low, max=high, source=source, **told)


OVERFLOW = Incident(
    step=260,
    last_step=264,
    count=2,
    severity=Severity.ERROR,
    cause=Cause.FP16_OVERFLOW,
    phase="forward",
    op="aten.bmm.default",
    module="blocks.3.attn",
    module_type="Attention",
    source=_SCORES,
    inputs=(
        Operand(
            role="input 0",
            dtype="float16",
            shape="96x512x64",
            min=-412.0,
            max=398.5,
            numel=3_145_728,
            nan=0,
            posinf=0,
            neginf=0,
            zeros=12,
            subnormals=3401,
            exp_low=-22,
            exp_counts=(
                3,
                9,
                30,
                90,
                200,
                900,
                2000,
                5000,
                9000,
                20000,
                60000,
                120000,
                240000,
                400000,
                520000,
                500000,
                460000,
                380000,
                200000,
                100000,
                60000,
                40000,
                20000,
                9000,
                3000,
                1200,
                500,
                200,
                90,
                20,
                6,
            ),
        ),
        Operand(
            role="input 1",
            dtype="float16",
            shape="96x64x512",
            min=-380.0,
            max=401.0,
            numel=3_145_728,
            nan=0,
            posinf=0,
            neginf=0,
            zeros=0,
            subnormals=0,
            exp_low=-12,
            exp_counts=(
                30,
                200,
                900,
                5000,
                20000,
                60000,
                240000,
                520000,
                460000,
                200000,
                60000,
                20000,
                3000,
                900,
                90,
                40,
                30,
                20,
                10,
                4,
                2,
            ),
        ),
    ),
    outputs=(
        Operand(
            role="output 0",
            dtype="float16",
            shape="96x512x512",
            min=-64000.0,
            max=math.inf,
            numel=25_165_824,
            nan=0,
            posinf=14,
            neginf=0,
            zeros=0,
            subnormals=0,
            exp_low=-6,
            exp_counts=(
                100,
                400,
                1600,
                6000,
                20000,
                80000,
                200000,
                500000,
                900000,
                1500000,
                2000000,
                1500000,
                900000,
                500000,
                200000,
                80000,
                20000,
                6000,
                2000,
                900,
                300,
                40,
            ),
        ),
    ),
    path=(
        _node("aten.bmm.default", "blocks.3.attn", -64000.0, math.inf, _SCORES, seq=20),
        _node("aten._softmax.default", "blocks.3.attn", math.nan, math.nan, _SOFTMAX, dtype="float32"),
        _node("aten.bmm.default", "blocks.3.attn", math.nan, math.nan, replace(_SCORES, line=36, code="y = att @ v")),
        _node(
            "aten.addmm.default",
            "blocks.3.attn.proj",
            math.nan,
            math.nan,
            replace(_SCORES, line=37, code="return self.proj(y)"),
        ),
        _node("aten.nll_loss_forward.default", "", math.nan, math.nan, _LOSS, phase="loss", dtype="float32", shape=""),
        _node("loss", "", math.nan, math.nan, None, phase="loss", dtype="float32", shape="", name="loss"),
    ),
    replay=ReplayStatus.EXACT,
    traced="replay",
    fp32_ok=True,
    trigger=Trigger.NONFINITE_LOSS,
    tripped=tuple(f"blocks.{block}.attn.qkv.weight" for block in range(16)),
    explanation=(
        "The scores q @ k^T reach 71,000 in float32; float16 ends at 65,504, so 14 of them became infinite and the "
        "softmax over their rows NaN. Dividing by sqrt(d) comes one line too late."
    ),
    remedies=(
        Remedy(
            text="Scale q before the product.", code="scores = (q / math.sqrt(d)) @ k.transpose(-2, -1)", verified=True
        ),
        Remedy(text="Let PyTorch do it.", code="y = F.scaled_dot_product_attention(q, k, v)", verified=None),
        Remedy(text="Lower the loss scale.", verified=False),
    ),
)

CLIPPED = Finding(
    step=4,
    last_step=4,
    count=1,
    severity=Severity.WARNING,
    cause=Cause.MISUSE_CLIP_BEFORE_UNSCALE,
    source=SourceLine(file="train.py", line=57, function="train", code="clip_grad_norm_(model.parameters(), 1.0)"),
    explanation="The gradients are still multiplied by the loss scale when they are clipped.",
    remedies=(
        Remedy(text="Unscale first.", code="scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)"),
    ),
)

_BAD_LINE = SourceLine(file=LONG, line=3, function=HOSTILE, code=HOSTILE)
NASTY = replace(
    OVERFLOW,
    step=2,
    last_step=2,
    count=1,
    op=HOSTILE,
    module=LONG,
    module_type=HOSTILE,
    source=_BAD_LINE,
    explanation=LONG,
    replay_reason=HOSTILE,
    replay=ReplayStatus.DIVERGED,
    tripped=(LONG, HOSTILE),
    remedies=(Remedy(text=HOSTILE, code=HOSTILE, verified=True),),
    inputs=(replace(OVERFLOW.inputs[0], role=LONG, dtype=HOSTILE, shape=HOSTILE), OVERFLOW.inputs[1]),
    path=tuple(_node(HOSTILE, LONG, -1.0, math.inf, _BAD_LINE, name=LONG, dtype=HOSTILE) for _ in range(30)),
)

DIAGNOSES: dict[str, Callable[[Path], Diagnosis]] = {
    "healthy": lambda path: _verdict(path, "Healthy: nothing needs to change.", CALIBRATION),
    "overflow": lambda path: _verdict(
        path,
        "float16 overflow in blocks.3.attn: the attention scores exceed 65,504 at step 260.",
        OVERFLOW,
        CALIBRATION,
    ),
    "finding": lambda path: _verdict(path, "Gradients are clipped before they are unscaled.", CLIPPED),
    "hostile": lambda path: _verdict(
        path, LONG, NASTY, name=LONG, device=HOSTILE, model=LONG, versions={"torch": HOSTILE}
    ),
}
