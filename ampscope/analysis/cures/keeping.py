"""The code that keeps modules in float32."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ampscope.analysis.cures import own_words
from ampscope.trace.schema import LOSS_CODE


def keeping(modules: Sequence[str], half: Sequence[str]) -> str:
    """Code that keeps modules, and the loss code where it is among them, in float32; half parameters in them too."""
    by_model: dict[str, list[str]] = {}
    for name in modules:
        if name != LOSS_CODE:
            number, inner = own_words.of_which_model(name)
            by_model.setdefault("model" if number is None else f"models[{number}]", []).append(inner)
    lines = [f"{model}.float()" for model in by_model] if half else []
    once = "  # once, before the training loop"
    lines += [f"ampscope.keep_fp32({model}, {json.dumps(names)}){once}" for model, names in by_model.items()]
    if LOSS_CODE in modules:
        lines += [
            "with torch.autocast(device_type, enabled=False):  # around the loss, in the loop",
            "    loss = loss_fn(output.float(), target)",
        ]
    return "\n".join(lines)
