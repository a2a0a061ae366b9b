"""The remedies of more than one cause: a dtype that is wider, for the whole or for the part that needs it."""

from __future__ import annotations

from ampscope.analysis.causes import untried
from ampscope.analysis.causes.cause_entry import Occurrence
from ampscope.analysis.results import Remedy
from ampscope.trace.schema import Change

USE_BFLOAT16 = Remedy(
    text="Use bfloat16, whose range is that of float32 (and which needs no GradScaler).",
    code="with torch.autocast(device_type, dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)",
    kind=Change.BF16,
    untried=untried.TURN,
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
        untried=untried.TURN,
    )


def more_range(occurrence: Occurrence) -> tuple[Remedy, ...]:
    """Float32 for the part that needs it, or bfloat16: as long as neither was tried, and where autocast decides."""
    if occurrence.explicit_half:
        return ()
    region = () if occurrence.has_tried(Change.MODULES_FP32) else (float32_region(occurrence.module),)
    return region if occurrence.has_tried(Change.BF16) else (*region, USE_BFLOAT16)
