"""A loss scaled, and its optimizer stepped through a scaler, in a loop that does neither."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ampscope.analysis.cures.rewriting.names import scope_at
from ampscope.analysis.cures.rewriting.program.own_names import imported_name
from ampscope.analysis.cures.rewriting.statement import dotted
from ampscope.analysis.usage.loop_edits.loop import LinesChanged, Loop, Spot

#: Calls that belong between unscaling and the step.
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_")
#: Autocast regions by what follows ``torch.``, with the device of those that are not told it.
_REGIONS = {"autocast": "", "amp.autocast": "", "cuda.amp.autocast": '"cuda"', "cpu.amp.autocast": '"cpu"'}
_NAME = "scaler"


def is_backward(node: ast.AST) -> bool:
    """Whether a part calls ``backward`` of something."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"


def clips(loop: Loop, spot: Spot) -> bool:
    """Whether a statement clips gradients."""
    call = spot.call
    names = [dotted(call.func), imported_name(loop.tree, call.func)] if call is not None else []
    return any(name.rpartition(".")[2] in _CLIPS for name in names)


def plain_backwards(loop: Loop) -> list[Spot]:
    """The statements of the function that call ``backward`` of a name."""
    return [spot for spot in loop.spots if spot.call is not None and is_backward(spot.call) and _owner(spot.call)]


def _owner(call: ast.Call) -> str:
    """What a method is called of, where that is a name."""
    return dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def scaled(loop: Loop, spot: Spot, scaler: str) -> Sequence[LinesChanged]:
    """``loss.backward()`` becomes ``scaler.scale(loss).backward()``."""
    loss = _owner(spot.call) if spot.call is not None else ""
    line = loop.source.lines[spot.first - 1].rstrip("\r\n")
    if spot.first != spot.last or line.count(f"{loss}.backward(") != 1:
        return ()
    return [(spot.first, spot.last, [line.replace(f"{loss}.backward(", f"{scaler}.scale({loss}).backward(")])]


def with_scaler(loop: Loop) -> Sequence[LinesChanged]:
    """A scaler made before the call of ``watch``, given to it, and used for the one loss and the one optimizer."""
    step, optimizer, watch = loop.spot, loop.spot.calls("step", 0), _watch(loop)
    backward = plain_backwards(loop)
    steps = [spot for spot in loop.spots if spot.calls("step", 0)]
    turns = [sum(is_backward(node) for spot in loop.spots for node in _own(spot))]
    if not optimizer or watch is None or len(backward) != 1 or len(steps) != 1 or turns != [1]:
        return ()
    made, given = _made(loop, watch), _given(loop, watch)
    unscaled = _unscaled(loop, backward[0], step, optimizer)
    loss = scaled(loop, backward[0], _NAME)
    if not made or not given or unscaled is None or not loss or not watch.first < backward[0].first < step.first:
        return ()
    if not loop.stands_alone(step, backward[0]) or _NAME in loop.names() or step.first != step.last:
        return ()
    through = [loop.indent(step) + line for line in (f"{_NAME}.step({optimizer})", f"{_NAME}.update()")]
    return [
        loop.inserted_before(watch, f"{_NAME} = {made}"),
        *given,
        *loss,
        *unscaled,
        (step.first, step.last, through),
    ]


def _own(spot: Spot) -> list[ast.AST]:
    """The parts of a statement that holds no others."""
    return [] if getattr(spot.node, "body", None) else list(ast.walk(spot.node))


def _watch(loop: Loop) -> Spot | None:
    """The one statement of the function that watches a model without a scaler, outside of its loops."""
    found = [spot for spot in loop.spots if _watching(loop, spot) is not None]
    loops = [each for spot in found for each in spot.owners if isinstance(each, (ast.For, ast.While))]
    return found[0] if len(found) == 1 and not loops else None


def _watching(loop: Loop, spot: Spot) -> ast.Call | None:
    heads = [item.context_expr for item in spot.node.items] if isinstance(spot.node, ast.With) else []
    calls = [each for each in (spot.call, *heads) if isinstance(each, ast.Call)]
    return next((each for each in calls if imported_name(loop.tree, each.func) == "ampscope.watch"), None)


def _given(loop: Loop, spot: Spot) -> Sequence[LinesChanged]:
    """The call of ``watch`` with a scaler beside the model."""
    call = _watching(loop, spot)
    named = {each.arg for each in call.keywords} if call is not None else {None}
    if call is None or len(call.args) != 1 or named & {None, "scaler"} or isinstance(call.args[0], ast.Starred):
        return ()
    line, end = call.args[0].end_lineno or 0, call.args[0].end_col_offset or 0
    code = loop.source.lines[line - 1].rstrip("\r\n").encode()
    return [(line, line, [(code[:end] + f", {_NAME}".encode() + code[end:]).decode()])]


def _made(loop: Loop, watch: Spot) -> str:
    """What makes a scaler for the device of the function's autocast regions; empty where that is not seen."""
    calls = [node for spot in loop.spots for node in ast.walk(spot.node) if isinstance(node, ast.Call)]
    paths = {call: imported_name(loop.tree, call.func).removeprefix("torch.") for call in calls}
    devices = {_device(call, _REGIONS[path]) for call, path in paths.items() if path in _REGIONS}
    kind = scope_at(loop.tree, watch.first).reached("torch.amp.GradScaler")
    if len(devices) != 1 or "" in devices or kind is None or kind.imports:
        return ""
    return f"{kind.text}({devices.pop()})"


def _device(region: ast.Call, known: str) -> str:
    """The device of a region as text, where it is spelled there."""
    given = [*region.args[:1], *(each.value for each in region.keywords if each.arg == "device_type")]
    if known or len(given) != 1:
        return known
    text = given[0].value if isinstance(given[0], ast.Constant) else None
    return f'"{text}"' if isinstance(text, str) and text.isalpha() else ""


def _unscaled(loop: Loop, backward: Spot, step: Spot, optimizer: str) -> Sequence[LinesChanged] | None:
    """Unscales before what reads gradients ahead of the step; None where that is in another block than the step."""
    between = [spot for spot in loop.spots if backward.last < spot.first < step.first]
    reads = [spot for spot in between if clips(loop, spot) or any(_is_gradient(node) for node in ast.walk(spot.node))]
    reads = [spot for spot in reads if spot.node not in step.owners]
    if not reads:
        return []
    is_beside = reads[0].block is step.block and loop.stands_alone(reads[0])
    return [loop.inserted_before(reads[0], f"{_NAME}.unscale_({optimizer})")] if is_beside else None


def _is_gradient(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "grad"
