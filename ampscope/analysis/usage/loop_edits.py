"""Usage mistakes mended in the user's own loop: lines inserted, moved or dedented where they stand."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from ampscope.analysis.usage.loop import LinesChanged, Loop, Spot, loop_at
from ampscope.cures.rewriting.edit import changed
from ampscope.cures.rewriting.literals import typed
from ampscope.cures.rewriting.names import scope_at
from ampscope.cures.rewriting.program.around_model_call import makes_region
from ampscope.cures.rewriting.program.own_names import imported_name
from ampscope.cures.rewriting.source_file import HasPlace
from ampscope.cures.rewriting.statement import dotted
from ampscope.trace.vocabulary import Cause, MistakeForm

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
    """Returns code that makes a scaler for the device of the function's autocast regions; empty where none is seen."""
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
    """Returns the names that a statement calls; nothing for a block that holds other statements."""
    if getattr(spot.node, "body", None):
        return set()
    return {dotted(node.func) for node in ast.walk(spot.node) if isinstance(node, ast.Call)}


def _plain_step(loop: Loop) -> Spot | None:
    """The one statement after the model's call that steps anything, in a loop without a scaler."""
    steps = [spot for spot in loop.spots if spot.calls("step", 0) and spot.first > loop.spot.first]
    return steps[0] if len(steps) == 1 else None


def diff_of(cause: Cause, form: MistakeForm | None, place: HasPlace | None) -> str | None:
    """A mistake mended, as a diff of the file it was made in; None where it cannot be mended in one place."""
    write = _OF_FORM.get(form) if form is not None else _OF_CAUSE.get(cause)
    loop = loop_at(place) if write is not None and place is not None else None
    if write is None or loop is None or place is None:
        return None
    changes = write(loop)
    return changed(loop.source, place.file, changes) if changes else None


def _unscaled_first(loop: Loop) -> Sequence[LinesChanged]:
    """Unscales before the statement, or the block that it is in; a call that comes too late is taken out."""
    step, optimizer = loop.step, loop.optimizer
    around = [spot for spot in loop.spots if step is not None and spot.block is step.block]
    beside = [spot for spot in around if spot.node in (loop.spot.node, *loop.spot.owners)]
    if step is None or not optimizer or len(beside) != 1 or step.first <= beside[0].first:
        return ()
    late = [spot for spot in loop.of_scaler("unscale_", 1) if spot.first > loop.spot.first]
    if not loop.stands_alone(beside[0], *late) or any(len(spot.block) == 1 for spot in late):
        return ()
    return [loop.inserted_before(beside[0], f"{loop.scaler}.unscale_({optimizer})"), *map(loop.removed, late)]


def _outside_autocast(loop: Loop) -> Sequence[LinesChanged]:
    """Ends the autocast block before the statement: it and what follows in the block move out."""
    region = loop.spot.owners[-1]
    if not isinstance(region, (ast.With, ast.AsyncWith)) or loop.spot.number == 0 or not loop.stands_alone(loop.spot):
        return ()
    if not any(_is_autocast(loop, item.context_expr) for item in region.items):
        return ()
    moved = region.body[loop.spot.number :]
    if any(_keeps_lines(node) for node in moved):
        return ()
    outer, inner = loop.source.indent(region.lineno), loop.indent(loop.spot)
    lines = [line.rstrip("\r\n") for line in loop.source.lines[loop.spot.first - 1 : region.end_lineno]]
    if not all(line.startswith(inner) or not line.strip() for line in lines):
        return ()
    return [(loop.spot.first, region.end_lineno or loop.spot.last, [outer + line[len(inner) :] for line in lines])]


def _is_autocast(loop: Loop, node: ast.expr) -> bool:
    """Whether an expression is an autocast region: torch's by any name, or what calls itself so."""
    function = node.func if isinstance(node, ast.Call) else node
    return dotted(function).endswith("autocast") or makes_region(loop.tree, node, node.lineno)


def _keeps_lines(statement: ast.stmt) -> bool:
    """Whether a text goes over several lines, which may not be moved."""
    texts = [node for node in ast.walk(statement) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return any(node.lineno != node.end_lineno for node in texts)


def _once_a_step(loop: Loop) -> Sequence[LinesChanged]:
    """Unscaling, clipping and update() moved to the step, where they are called for each micro-batch."""
    step = loop.step
    if step is None or len(step.owners) < 2 or not isinstance(step.owners[-1], ast.If):
        return ()
    around = next((spot for spot in loop.spots if spot.node is step.owners[-1]), None)
    if around is None:
        return ()
    beside = [spot for spot in loop.spots if spot.block is around.block]
    before = [spot for spot in beside if spot in loop.of_scaler("unscale_", 1) or clips(loop, spot)]
    before = [spot for spot in before if spot.first < around.first]
    updates = [spot for spot in beside if spot in loop.of_scaler("update", 0)]
    if not loop.stands_alone(step, *before, *updates) or not (before or updates):
        return ()
    if not any(spot in loop.of_scaler("unscale_", 1) for spot in before):
        before = []
    deeper = loop.indent(step)[len(loop.indent(around)) :]
    moved = [deeper + line for spot in before for line in loop.lines(spot)]
    first = step.block[0].lineno
    changes: list[LinesChanged] = [(first, first - 1, moved)] if moved else []
    if updates and not any(spot.block is step.block for spot in loop.of_scaler("update", 0)):
        changes.append(loop.inserted_after(step, f"{loop.scaler}.update()"))
    return [*changes, *map(loop.removed, (*before, *updates))]


def _only_after_a_step(loop: Loop) -> Sequence[LinesChanged]:
    """Steps the scheduler only if the scale has not fallen since before the optimizer stepped."""
    step, spot = loop.step, loop.spot
    updates = loop.of_scaler("update", 0)
    if step is None or len(updates) != 1 or "scale_before" in loop.names() or len(spot.block) == 1:
        return ()
    update = updates[0]
    in_order = step.first < update.first < spot.first and step.block is update.block is spot.block
    if not in_order or not loop.stands_alone(step, spot):
        return ()
    lines = loop.lines(spot)
    unit = _unit(loop)
    return [
        loop.inserted_before(step, f"scale_before = {loop.scaler}.get_scale()"),
        (
            spot.first,
            spot.last,
            [f"{loop.indent(spot)}if {loop.scaler}.get_scale() >= scale_before:", *(unit + line for line in lines)],
        ),
    ]


def _anew_each_step(loop: Loop) -> Sequence[LinesChanged]:
    """An autocast block around the loop becomes one around the forward in it: what comes before the first backward."""
    blocks = [node for node in ast.walk(loop.tree) if isinstance(node, ast.With) and len(node.items) == 1]
    regions = [each for each in blocks if _is_autocast(loop, each.items[0].context_expr) and len(each.body) == 1]
    regions = [each for each in regions if isinstance(each.body[0], (ast.For, ast.While))]
    region = regions[0] if len(regions) == 1 else None
    rounds = region.body[0] if region is not None else None
    if region is None or not isinstance(rounds, (ast.For, ast.While)) or rounds.orelse:
        return ()
    back = [node for node in rounds.body if any(is_backward(each) for each in ast.walk(node))]
    first = back[0] if back and isinstance(back[0], (ast.Expr, ast.If)) else None
    if first is None or first is rounds.body[0] or _keeps_lines(rounds) or region.body[0].lineno != region.lineno + 1:
        return ()
    outer, inner = loop.source.indent(region.lineno), loop.source.indent(rounds.lineno)
    lines = [line.rstrip("\r\n") for line in loop.source.lines[region.lineno - 1 : region.end_lineno]]
    head, body = rounds.lineno - region.lineno, rounds.body[0].lineno - region.lineno
    at = first.lineno - region.lineno
    if not all(line.startswith(inner) or not line.strip() for line in lines[head:]):
        return ()
    inside = [inner + lines[0][len(outer) :], *lines[body:at]]
    after = [
        *(outer + line[len(inner) :] for line in lines[head:body]),
        *inside,
        *(outer + line[len(inner) :] for line in lines[at:]),
    ]
    return [(region.lineno, region.end_lineno or region.lineno, after)]


def _cleared_after_step(loop: Loop) -> Sequence[LinesChanged]:
    """zero_grad() between backward and the step comes after update()."""
    step, updates = loop.step, loop.of_scaler("update", 0)
    back = [spot for spot in loop.spots if step is not None and any(map(is_backward, ast.walk(spot.node)))]
    back = [spot for spot in back if step is not None and spot.last < step.first]
    if step is None or not back or len(updates) != 1 or updates[0].block is not step.block:
        return ()
    early = [spot for spot in loop.spots if spot.calls("zero_grad", 0) and back[-1].last < spot.first < step.first]
    if not early or step.first > updates[0].first or any(spot.block is not step.block for spot in early):
        return ()
    if not loop.stands_alone(updates[0], *early):
        return ()
    after = [line for spot in early for line in loop.lines(spot)]
    return [(updates[0].last + 1, updates[0].last, after), *map(loop.removed, early)]


def _made_before_loop(loop: Loop) -> Sequence[LinesChanged]:
    """The one statement that makes the scaler in a loop comes before it, and before the loops around that."""
    targets = [(spot, spot.node.targets) for spot in loop.spots if isinstance(spot.node, ast.Assign)]
    made = [spot for spot, names in targets if loop.scaler and loop.scaler in map(dotted, names)]
    spot = made[0] if len(made) == 1 else None
    rounds = [each for each in spot.owners if isinstance(each, (ast.For, ast.While))] if spot is not None else []
    if spot is None or spot.call is None or len(spot.block) == 1 or not rounds or spot.owners[-1] is not rounds[-1]:
        return ()
    around = next((each for each in loop.spots if each.node is rounds[0]), None)
    inside = [node for node in ast.walk(rounds[0]) if isinstance(node, ast.Name)]
    given = {node.id for node in ast.walk(spot.call) if isinstance(node, ast.Name)}
    changing = given & {node.id for node in inside if not isinstance(node.ctx, ast.Load)}
    if around is None or changing or _keeps_lines(spot.node) or not loop.stands_alone(spot, around):
        return ()
    lines = [line[len(loop.indent(spot)) :] for line in loop.lines(spot)]
    return [loop.inserted_before(around, *lines), loop.removed(spot)]


def _unscaled_at_once(loop: Loop) -> Sequence[LinesChanged]:
    """Unscales right after the last backward: what is compared may be computed anywhere from there on."""
    step, optimizer = loop.step, loop.optimizer
    back = [spot for spot in loop.spots if spot.call is not None and any(map(is_backward, ast.walk(spot.node)))]
    back = [spot for spot in back if spot.first < loop.spot.first]
    if step is None or not optimizer or not back or not loop.stands_alone(back[-1]):
        return ()
    block = back[-1].block
    after = block[back[-1].number + 1 :]
    goes_on = any(isinstance(node, (ast.Continue, ast.Break, ast.Return)) for each in after for node in ast.walk(each))
    holds = [spot for spot in loop.of_scaler("update", 0) if spot.block is block and spot.first > step.first]
    late = loop.of_scaler("unscale_", 1)
    if goes_on or not holds or not any(step.node is part for each in after for part in ast.walk(each)):
        return ()  # what is unscaled has to be updated in each round
    if not loop.stands_alone(*late) or any(len(spot.block) == 1 for spot in late):
        return ()
    return [loop.inserted_after(back[-1], f"{loop.scaler}.unscale_({optimizer})"), *map(loop.removed, late)]


def _once_unscaled(loop: Loop) -> Sequence[LinesChanged]:
    """The second of two calls of unscale_ for the one optimizer is taken out, where they follow in one block."""
    calls = loop.of_scaler("unscale_", 1)
    given = {ast.unparse(spot.call.args[0]) for spot in calls if spot.call is not None}
    if len(calls) != 2 or len(given) != 1 or calls[0].block is not calls[1].block or not loop.stands_alone(*calls):
        return ()
    return [loop.removed(calls[1])]


def _unit(loop: Loop) -> str:
    """By what the file indents a block."""
    indents = [loop.source.indent(spot.first) for spot in loop.spots]
    inner = [indent for indent in indents if indent]
    return "\t" if any(indent.startswith("\t") for indent in inner) else "    "


def _through_scaler(loop: Loop) -> Sequence[LinesChanged]:
    """``optimizer.step()`` becomes ``scaler.step(optimizer)``; with update() after it where there is none."""
    optimizer, spot = loop.spot.calls("step", 0), loop.spot
    if not optimizer or not loop.scaler or not loop.stands_alone(spot) or spot.first != spot.last:
        return ()
    update = [] if loop.of_scaler("update", 0) else [f"{loop.scaler}.update()"]
    return [
        (spot.first, spot.last, [loop.indent(spot) + line for line in (f"{loop.scaler}.step({optimizer})", *update)])
    ]


def _scaled(loop: Loop) -> Sequence[LinesChanged]:
    """The one ``loss.backward()`` becomes ``scaler.scale(loss).backward()``: that of the line, or of its function."""
    plain = plain_backwards(loop)
    plain = [spot for spot in plain if spot is loop.spot] or plain
    return scaled(loop, plain[0], loop.scaler) if len(plain) == 1 and loop.scaler else ()


def _one_update(loop: Loop) -> Sequence[LinesChanged]:
    """update() after every optimizer has stepped: earlier ones are taken out."""
    steps, updates = loop.of_scaler("step", 1), loop.of_scaler("update", 0)
    if len(steps) < 2 or not updates or any(spot.block is not steps[-1].block for spot in (*steps, *updates)):
        return ()
    early = [spot for spot in updates if spot.first < steps[-1].first]
    if not early or not loop.stands_alone(steps[-1], *early):
        return ()
    last = [] if len(early) < len(updates) else [loop.inserted_after(steps[-1], f"{loop.scaler}.update()")]
    return [*last, *map(loop.removed, early)]


def _update_after_step(loop: Loop) -> Sequence[LinesChanged]:
    """update() after the step, where the function calls it nowhere."""
    step = loop.step
    if step is None or loop.of_scaler("update", 0) or not loop.stands_alone(step):
        return ()
    return [loop.inserted_after(step, f"{loop.scaler}.update()")]


_OF_CAUSE: dict[Cause, Callable[[Loop], Sequence[LinesChanged]]] = {
    Cause.MISUSE_CLIP_BEFORE_UNSCALE: _unscaled_first,
    Cause.MISUSE_NO_UNSCALE: _unscaled_first,
    Cause.MISUSE_BACKWARD_UNDER_AUTOCAST: _outside_autocast,
    Cause.MISUSE_AUTOCAST_SPANS_STEP: _anew_each_step,
    Cause.MISUSE_UPDATE_EACH_MICROBATCH: _once_a_step,
    Cause.MISUSE_GRADIENTS_CLEARED: _cleared_after_step,
    Cause.MISUSE_SCALER_EACH_STEP: _made_before_loop,
    Cause.MISUSE_SCHEDULER_ORDER: _only_after_a_step,
}
_OF_FORM: dict[MistakeForm, Callable[[Loop], Sequence[LinesChanged]]] = {
    MistakeForm.STEPPED_PAST_SCALER: _through_scaler,
    MistakeForm.DECISION_ON_SCALED: _unscaled_at_once,
    MistakeForm.UNSCALE_EACH_MICROBATCH: _once_a_step,
    MistakeForm.UNSCALE_TWICE: _once_unscaled,
    MistakeForm.NOTHING_TO_UPDATE: _once_a_step,
    MistakeForm.UPDATE_MISSING: _update_after_step,
    MistakeForm.UPDATE_IN_BETWEEN: _one_update,
    MistakeForm.LOSS_NOT_SCALED: _scaled,
    MistakeForm.NOTHING_SCALED: _scaled,
    MistakeForm.NO_SCALER: with_scaler,
}
