"""Runs that the pages are tried on, made by the real writer; `verdicts.of_scenes` has what to say of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampscope.trace.schema import Cast, EventKind, Phase, ReplayStatus, ScalerAction, Source, Trigger
from tests.support.trace_builder import TraceBuilder

HOSTILE = (
    "<script>alert(1)</script><b>bold</b> **markdown** $\\frac{1}{2}$ :red[x] :smile: [link](http://example.com) "
    "`code` \N{RIGHT-TO-LEFT OVERRIDE}%{x} {{braces}} &amp; "
)
LONG = HOSTILE + "very_long_name." * 700
VERSIONS = {"python": "3.11.9", "torch": "2.13.0", "platform": "Linux"}
HALF, FULL = ("float16",), ("float32",)


def healthy(folder: Path, steps: int = 400) -> TraceBuilder:
    """Calibrates for three steps, grows once, saves twice, resumes; one step traced."""
    trace = TraceBuilder(folder, device="NVIDIA H200", model="GPT", parameters=124_439_808, versions=VERSIONS)
    trace.scaler_event(ScalerAction.INIT, line=31, code="scaler = torch.amp.GradScaler()", detail=_SETTINGS)
    scale = 65536.0
    for step in range(steps):
        skipped = step < 3
        trace.step(
            scale=scale,
            skipped=skipped,
            found_inf=skipped,
            loss=None if skipped else 4.0 * math.exp(-step / 150) + 0.3 * math.sin(step / 3) ** 2 + 0.5,
            grad_norm=math.inf if skipped else 1.5 + math.sin(step / 7),
            growth_tracker=max(0, step - 3) % 200,
            traced="live" if step == 100 else "",
        )
        trace.scaler_event(ScalerAction.UNSCALE, step=step, optimizer=0, line=58, code="scaler.unscale_(optimizer)")
        if skipped:
            _change(trace, ScalerAction.BACKOFF, step, scale, scale / 2)
            scale /= 2
        elif step == 203:
            _change(trace, ScalerAction.GROWTH, step, scale, scale * 2)
            scale *= 2
    for step in (150, 230):
        trace.scaler_event(
            ScalerAction.STATE_SAVED,
            step=step,
            line=70,
            code="torch.save(scaler.state_dict(), path)",
            scale_before=None,
            scale_after=None,
        )
    trace.event(EventKind.RESUME, "resumed from step 230", step=231)
    traced_step(trace, step=100)
    return trace


def overflow(folder: Path) -> TraceBuilder:
    """Attention scores overflow at step 260; the loss is NaN twice."""
    trace = healthy(folder, steps=260)
    for step in range(260, 272):
        bad = step in (260, 264)
        trace.step(
            scale=16384.0 / (1 + (step > 260)),
            skipped=bad,
            loss=math.nan if bad else 2.0 + (40 if step == 263 else 0),
            grad_norm=math.nan if bad else 3.0,
            traced="replay" if bad else "",
            growth_tracker=0,
        )
    _change(trace, ScalerAction.BACKOFF, 260, 16384.0, 8192.0)
    trace.incident(step=260, loss=math.nan, scale=16384.0, bad_params=("blocks.3.attn.proj.weight",))
    traced_step(trace, step=260, source=Source.REPLAY)
    return trace


def hostile(folder: Path) -> TraceBuilder:
    """Every name that a trace can hold tries to be markup, and is very long."""
    trace = TraceBuilder(folder, device=HOSTILE, model=LONG, name=LONG, versions={"torch": HOSTILE})
    names = {"file": LONG, "function": HOSTILE, "code": HOSTILE}
    for step in range(6):
        trace.step(skipped=step == 2, loss=math.nan if step == 2 else 1.0)
        trace.scaler_event(HOSTILE, step=step, detail='{"<b>x</b>": "<script>"}', **names)
        trace.scaler_event(ScalerAction.UNSCALE, step=step, **names)
        trace.event(EventKind.NOTE, LONG, step=step)
    for op in (HOSTILE, LONG):
        site = trace.site(op, module=LONG, module_type=HOSTILE, in_dtypes=FULL, out_dtypes=FULL, **names)
        trace.op(site, step=4)
    cast = trace.site(HOSTILE, module=HOSTILE, cast=Cast.AUTOCAST, out_dtypes=(HOSTILE,), **names)
    trace.op(cast, step=4)
    return trace


def finding(folder: Path) -> TraceBuilder:
    """bf16 without a scaler, and gradients clipped at the wrong place."""
    trace = TraceBuilder(folder, device="cpu", model="Net", versions=VERSIONS)
    for step in range(50):
        trace.step(
            scale=None, growth_tracker=None, found_inf=None, loss=1 / (1 + step), grad_norm=0.0 if step == 7 else 1.0
        )
    trace.finding(step=4)
    return trace


def empty(folder: Path) -> TraceBuilder:
    """Opened, and nothing happened."""
    return TraceBuilder(folder)


def traced_step(trace: TraceBuilder, *, step: int, source: str = Source.LIVE) -> None:
    """A small transformer's ops, four blocks and the loss."""
    for block in range(4):
        _block_ops(trace, f"blocks.{block}", step=step, source=source)
    loss = trace.site(
        "aten.nll_loss_forward.default",
        module="",
        module_type="",
        phase=Phase.LOSS,
        in_dtypes=FULL,
        out_dtypes=FULL,
        file="/home/me/gpt/train.py",
        line=52,
        code="loss = F.cross_entropy(logits, y)",
    )
    trace.op(loss, step=step, source=source, numel=1)


def _block_ops(trace: TraceBuilder, block: str, **where: Any) -> None:
    """A block's ops: normalized, projected, scored, and one of its backward."""
    model = {"file": "/home/me/gpt/model.py"}
    attention = {"module": f"{block}.attn", **model}
    softmax = {**attention, "line": 35, "code": "att = scores.softmax(-1)", "out_dtypes": FULL}
    qkv = trace.site("aten.addmm.default", module=f"{block}.attn.qkv", line=31, code="q, k, v = self.qkv(x)", **model)
    code = "scores = q @ k.transpose(-2, -1)"
    scores = trace.site("aten.bmm.default", module_type="Attention", line=34, code=code, **attention)
    widen = trace.site("aten._to_copy.default", cast=Cast.AUTOCAST, in_dtypes=HALF, **softmax)
    soft = trace.site("aten._softmax.default", in_dtypes=FULL, **softmax)
    norm = trace.site(
        "aten.native_layer_norm.default",
        module=f"{block}.norm",
        in_dtypes=FULL,
        out_dtypes=FULL,
        line=44,
        code="x = x + self.attn(self.norm(x))",
        **model,
    )
    seqs = [trace.op(site, numel=524_288, **where) for site in (norm, qkv, scores, widen, soft)]
    trace.edge(seqs[3], seqs[4], **where)
    back = trace.site(
        "aten.mm.default",
        module=f"{block}.attn.qkv",
        phase=Phase.BACKWARD,
        autocast="",
        grad_fn="AddmmBackward0",
        file="",
    )
    trace.op(back, numel=524_288, **where)


def ranks(folder: Path) -> TraceBuilder:
    """Four ranks of one job, the last missing: rank 1 overflows at step 40, rank 2 computes something else from 50 on.

    What it gives is rank 0; the others are written and closed.
    """
    others = {rank: _rank(folder, rank) for rank in (1, 2)}
    for trace in others.values():
        trace.close()
    return _rank(folder, 0)


def _rank(folder: Path, rank: int) -> TraceBuilder:
    trace = TraceBuilder(folder, rank=rank, device="NVIDIA H200", model="GPT", world_size=4, versions=VERSIONS)
    trace.event(EventKind.START)
    trace.scaler_event(ScalerAction.INIT, line=31, code="scaler = torch.amp.GradScaler()", detail=_SETTINGS)
    for step in range(80):
        bad = step == BAD_STEP
        norm = 1.5 + math.sin(step / 7)
        trace.step(
            scale=16384.0 / (1 + (step > BAD_STEP)),
            skipped=bad,
            found_inf=bad,
            loss=math.nan if bad and rank == 1 else 2.0 + math.cos(step + rank) / 9,
            grad_norm=math.nan if bad else norm * (1.1 if rank == 2 and step >= 50 else 1.0),
            traced="replay" if bad else "",
        )
    own = rank == 1
    trace.incident(
        step=BAD_STEP,
        trigger=Trigger.NONFINITE_LOSS if own else Trigger.NONFINITE_GRADIENT,
        loss=math.nan if own else 2.0,
        scale=16384.0,
        replay=ReplayStatus.EXACT if own else ReplayStatus.RECEIVED,
        bad_params=("fc.weight",),
    )
    overflowing_step(trace, step=BAD_STEP, overflows=own)
    trace.event(EventKind.CLOSE, step=80)
    return trace


#: Of the ranks' scene, the step at which rank 1 overflows.
BAD_STEP = 40


def overflowing_step(trace: TraceBuilder, *, step: int, overflows: bool) -> None:
    """A replay of three ops in which a product is too large for float16, or is not."""
    where = {"step": step, "source": Source.REPLAY}
    batch = trace.site("input", name="x", in_dtypes=(), in_shapes=(), out_dtypes=HALF, phase=Phase.FORWARD)
    product = trace.site("aten.mul.Tensor", module="blocks.0", module_type="Square", line=12, code="return x * x")
    loss = trace.site("loss", name="loss", module="", phase=Phase.LOSS, in_dtypes=HALF, out_dtypes=HALF, line=20)
    high = math.inf if overflows else 4.0
    after = math.nan if overflows else 4.0
    first = trace.op(batch, **where, min=-300.0, max=300.0, max_finite=300.0)
    second = trace.op(product, **where, min=0.0, max=high, posinf=3 if overflows else 0, max_finite=6e4)
    third = trace.op(loss, **where, numel=1, min=after, max=after, nan=int(overflows))
    trace.edge(first, second, step=step)
    trace.edge(first, second, step=step, arg=1)
    trace.edge(second, third, step=step)


SCENES: dict[str, Callable[[Path], TraceBuilder]] = {
    "ranks": ranks,
    "healthy": healthy,
    "overflow": overflow,
    "finding": finding,
    "hostile": hostile,
    "empty": empty,
}

_SETTINGS = '{"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 200}'


def _change(trace: TraceBuilder, action: ScalerAction, step: int, before: float, after: float) -> None:
    trace.scaler_event(
        action, step=step, scale_before=before, scale_after=after, line=61, code="scaler.update()", file="train.py"
    )


def write_scenes(folder: Path) -> Path:
    """Every scene below ``folder``, and two runs that cannot be read."""
    for name, make in SCENES.items():
        make(folder / name).close()
    (overflow(folder / "no_manifest").close() / "run.json").write_text("{broken")
    (part,) = healthy(folder / "torn", steps=100).close().glob("rank=0/steps/*.parquet")
    part.write_bytes(part.read_bytes()[:200])
    return folder
