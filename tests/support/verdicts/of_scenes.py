"""Verdicts on the scenes, so that pages can be tried without the diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ampscope.analysis.results import Diagnosis, Operand, PathNode, Remedy, RunInfo, SourceLine
from ampscope.trace.schema import ReplayStatus, Trigger
from tests.support.scenes import HOSTILE, LONG, VERSIONS
from tests.support.trace_builder import START
from tests.support.verdicts import by_hand
from tests.support.verdicts.by_hand import verdict
from tests.support.verdicts.operands import operand


def diagnosis_of(path: Path) -> Diagnosis:
    """What the tests' own ``diagnose`` says of a scene."""
    kind = path.name
    return DIAGNOSES[kind](path) if kind in DIAGNOSES else verdict(_run(path), "Healthy.")


def _run(path: Path, **facts: Any) -> RunInfo:
    return replace(
        by_hand.RUN,
        **{
            "path": str(path),
            "name": path.name,
            "created": START,
            "steps": 272,
            "skipped": 5,
            "segments": 1,
            "device": "NVIDIA H200",
            "parameters": 124_439_808,
            "versions": VERSIONS,
            **facts,
        },
    )


CALIBRATION = replace(
    by_hand.CALIBRATION,
    step=0,
    last_step=2,
    count=3,
    trigger=Trigger.NONFINITE_GRADIENT,
    explanation="The scale starts at 65,536 and halves until the gradients fit. That is how GradScaler works.",
)

_SCORES = SourceLine(file="/home/me/gpt/model.py", line=34, function="forward", code="scores = q @ k.transpose(-2, -1)")
_SOFTMAX = replace(_SCORES, line=35, code="att = scores.softmax(-1)")
_VALUES = replace(_SCORES, line=36, code="y = att @ v")
_PROJECTION = replace(_SCORES, line=37, code="return self.proj(y)")
_LOSS = SourceLine(file="/home/me/gpt/train.py", line=52, function="train", code="loss = F.cross_entropy(logits, y)")


def _node(
    op: str, source: SourceLine | None, low: float = math.nan, high: float = math.nan, **columns: Any
) -> PathNode:
    here = {"module": "blocks.3.attn", "shape": "8x12x512x512", "source": source}
    return by_hand.node(columns.pop("seq", 0), op, low, high, **{**here, **columns})


def _operand(role: str, low: float, high: float, counts: str, **columns: Any) -> Operand:
    """A tensor of the scores' product; ``counts`` of its exponents."""
    none = {"nan": 0, "posinf": 0, "neginf": 0, "zeros": 0, "subnormals": 0, "max_finite": None, "min_positive": None}
    exponents = tuple(int(count) for count in counts.split())
    return operand(role=role, dtype="float16", min=low, max=high, exp_counts=exponents, **{**none, **columns})


_QUERY = _operand(
    "input 0",
    -412.0,
    398.5,
    "3 9 30 90 200 900 2000 5000 9000 20000 60000 120000 240000 400000 520000 500000 460000 380000 200000 100000 60000 "
    "40000 20000 9000 3000 1200 500 200 90 20 6",
    shape="96x512x64",
    numel=3_145_728,
    zeros=12,
    subnormals=3401,
    exp_low=-22,
)
_KEY = _operand(
    "input 1",
    -380.0,
    401.0,
    "30 200 900 5000 20000 60000 240000 520000 460000 200000 60000 20000 3000 900 90 40 30 20 10 4 2",
    shape="96x64x512",
    numel=3_145_728,
    exp_low=-12,
)
_PRODUCT = _operand(
    "output 0",
    -64000.0,
    math.inf,
    "100 400 1600 6000 20000 80000 200000 500000 900000 1500000 2000000 1500000 900000 500000 200000 80000 20000 6000 "
    "2000 900 300 40",
    shape="96x512x512",
    numel=25_165_824,
    posinf=14,
    exp_low=-6,
)
_FULL: dict[str, Any] = {"phase": "loss", "dtype": "float32", "shape": ""}

OVERFLOW = replace(
    by_hand.OVERFLOW,
    step=260,
    last_step=264,
    count=2,
    module="blocks.3.attn",
    source=_SCORES,
    inputs=(_QUERY, _KEY),
    outputs=(_PRODUCT,),
    path=(
        _node("aten.bmm.default", _SCORES, -64000.0, math.inf, seq=20),
        _node("aten._softmax.default", _SOFTMAX, dtype="float32"),
        _node("aten.bmm.default", _VALUES),
        _node("aten.addmm.default", _PROJECTION, module="blocks.3.attn.proj"),
        _node("aten.nll_loss_forward.default", _LOSS, module="", **_FULL),
        _node("loss", None, module="", name="loss", **_FULL),
    ),
    tripped=tuple(f"blocks.{block}.attn.qkv.weight" for block in range(16)),
    explanation=(
        "The scores q @ k^T reach 71,000 in float32; float16 ends at 65,504, so 14 of them became infinite and the "
        "softmax over their rows NaN. Dividing by sqrt(d) comes one line too late."
    ),
    remedies=(
        Remedy(
            text="Scale q before the product.", code="scores = (q / math.sqrt(d)) @ k.transpose(-2, -1)", verified=True
        ),
        Remedy(text="Let PyTorch do it.", code="y = F.scaled_dot_product_attention(q, k, v)", untried="no turn"),
        Remedy(text="Lower the loss scale.", verified=False),
    ),
)

CLIPPED = replace(
    by_hand.CLIPPED,
    step=4,
    last_step=4,
    count=1,
    source=SourceLine(file="train.py", line=57, function="train", code="clip_grad_norm_(model.parameters(), 1.0)"),
    explanation="The gradients are still multiplied by the loss scale when they are clipped.",
    remedies=(
        Remedy(
            text="Unscale first.",
            code="scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)",
            untried="it is of the loop",
        ),
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
    path=tuple(_node(HOSTILE, _BAD_LINE, -1.0, math.inf, module=LONG, name=LONG, dtype=HOSTILE) for _ in range(30)),
)

DIAGNOSES: dict[str, Callable[[Path], Diagnosis]] = {
    "healthy": lambda path: verdict(_run(path), "Healthy: nothing needs to change.", CALIBRATION),
    "overflow": lambda path: verdict(
        _run(path),
        "float16 overflow in blocks.3.attn: the attention scores exceed 65,504 at step 260.",
        OVERFLOW,
        CALIBRATION,
    ),
    "finding": lambda path: verdict(_run(path), "Gradients are clipped before they are unscaled.", CLIPPED),
    "hostile": lambda path: verdict(
        _run(path, name=LONG, device=HOSTILE, model=LONG, versions={"torch": HOSTILE}), LONG, NASTY
    ),
}
