"""Advice that no replay has tried says why it could not be; several causes advise a wider dtype."""

from __future__ import annotations

from ampscope.analysis.causes.cause_entry import Occurrence
from ampscope.analysis.results import Remedy
from ampscope.trace.schema import Change

#: Advice that replays try: theirs are limited.
TURN = "the replays that such steps get were used up before its turn"
LOOP = "a replay runs the calls of one step, not the loop around them"
MEANING = "it computes something else, where a replay keeps what is computed"
BEFORE = "it comes before the step, and a replay begins with what was there"
BATCH = "it comes before the step, and a replay begins with the batch as it was"
AHEAD = "nothing has failed yet on which a replay could try it"
SCALER = "it works over many steps, and a replay runs one"
OUTSIDE = "no change of the code cures it, and replays try such changes"
RANKS = "a replay runs the step of one rank"
RAISED = "a call that ends with an error is not run again"
COMPILED = "replays run eager code"
CONVERTED = "where the code converts to half precision itself, a replay widens what a call is given, not the call"
ORDER = "a replay takes the loop's own lines as they are"


def advice(why: str, text: str, code: str = "", kind: str = "") -> Remedy:
    """A piece of advice that no replay has tried, for one of these reasons."""
    return Remedy(text=text, code=code, kind=kind, untried=why)


USE_BFLOAT16 = Remedy(
    text="Use bfloat16, whose range is that of float32 (and which needs no GradScaler).",
    code="with torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)",
    kind=Change.BF16,
    untried=TURN,
)


def float32_region(module: str) -> Remedy:
    """Float32 for a module, or for the loss code where it has no name."""
    where = f"module {module}" if module else "this part of the loss"
    return Remedy(
        text=f"Run {where} in float32.",
        code=(
            "with torch.autocast(x.device.type, enabled=False):\n"
            "    y = part(x.float())  # the part that overflows, on float32 operands"
        ),
        kind=Change.MODULES_FP32,
        untried=TURN,
    )


def more_range(occurrence: Occurrence) -> tuple[Remedy, ...]:
    """Float32 for the part that needs it, or bfloat16: as long as neither was tried, and where autocast decides."""
    if occurrence.explicit_half:
        return ()
    region = () if occurrence.has_tried(Change.MODULES_FP32) else (float32_region(occurrence.module),)
    return region if occurrence.has_tried(Change.BF16) else (*region, USE_BFLOAT16)
