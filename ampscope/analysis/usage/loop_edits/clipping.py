"""Gradients clipped before the optimizer steps, written into the loop that calls a model."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ampscope.analysis.cures.rewriting.edit import changed
from ampscope.analysis.cures.rewriting.forms.constants import typed
from ampscope.analysis.cures.rewriting.names import scope_at
from ampscope.analysis.cures.rewriting.source_file import HasPlace
from ampscope.analysis.cures.rewriting.statement import dotted
from ampscope.analysis.usage.loop_edits.loop import Loop, Spot, loop_at


def clipped(calls_at: HasPlace, models: Sequence[str], norm: float) -> str | None:
    """The gradients of a model clipped by their norm before its one optimizer steps, after unscaling.

    Args:
        calls_at: The line of the loop that calls the model, as it was recorded.
        models: What the program calls its models: one of them is called there.
        norm: The largest that their norm may be.

    Returns:
        A diff of the file; None where it is not at hand, where the loop clips already, and where it is not clear which
        statement steps.
    """
    loop = loop_at(calls_at)
    called = _called(loop.spot) if loop is not None else set()
    names = [name for name in models if name in called]
    if loop is None or len(names) != 1 or any("clip_" in name for spot in loop.spots for name in _called(spot)):
        return None
    step = loop.step if loop.scaler else _plain_step(loop)
    clip = scope_at(loop.tree, step.first).reached("torch.nn.utils.clip_grad_norm_") if step is not None else None
    if step is None or clip is None or (loop.scaler and not loop.optimizer) or not loop.stands_alone(step):
        return None
    unscale = [f"{loop.scaler}.unscale_({loop.optimizer})"] if loop.scaler and not loop.of_scaler("unscale_", 1) else []
    code = f"{clip.text}({names[0]}.parameters(), {typed(norm)})"
    return changed(loop.source, calls_at.file, [loop.inserted_before(step, *unscale, code)], clip.imports)


def _called(spot: Spot) -> set[str]:
    """What a statement calls; of a block that holds others nothing."""
    if getattr(spot.node, "body", None):
        return set()
    return {dotted(node.func) for node in ast.walk(spot.node) if isinstance(node, ast.Call)}


def _plain_step(loop: Loop) -> Spot | None:
    """The one statement after the model's call that steps anything, in a loop without a scaler."""
    steps = [spot for spot in loop.spots if spot.calls("step", 0) and spot.first > loop.spot.first]
    return steps[0] if len(steps) == 1 else None
