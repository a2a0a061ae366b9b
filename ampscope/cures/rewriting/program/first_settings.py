"""Settings of what a program makes for its training: the scaler's first scale, the optimizer's eps."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ampscope.cures.rewriting.literals import added_keyword, below_one, literal, value_of
from ampscope.cures.rewriting.program.own_names import function_around, given_once, imported_name, spliced, whole
from ampscope.cures.rewriting.source_file import FoundStatement, HasPlace, statement_at
from ampscope.cures.rewriting.statement import Splice, dotted

#: Scalers, with the place of the first scale among their arguments.
_SCALERS = {
    "torch.amp.GradScaler": 1,
    "torch.amp.grad_scaler.GradScaler": 1,
    "ampscope.GradScaler": 1,
    "torch.cuda.amp.GradScaler": 0,
    "torch.cpu.amp.GradScaler": 0,
}
#: Optimizers that divide by a root and an eps, with the place of the eps.
_OPTIMIZERS = {
    "torch.optim.Adam": 3,
    "torch.optim.AdamW": 3,
    "torch.optim.NAdam": 3,
    "torch.optim.RAdam": 3,
    "torch.optim.Adamax": 3,
    "torch.optim.RMSprop": 3,
    "torch.optim.Adagrad": 5,
    "torch.optim.Adadelta": 3,
}
#: Schedules that multiply the rate that an optimizer is made with.
_SCHEDULES = frozenset(
    f"torch.optim.lr_scheduler.{name}"
    for name in (
        *("LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR"),
        *("PolynomialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau", "SequentialLR"),
    )
)
_CTC = ("torch.nn.CTCLoss", "torch.nn.modules.loss.CTCLoss")


class _Setting(NamedTuple):
    name: str
    place: int
    value: float | bool

    @property
    def text(self) -> str:
        """The value as code spells it."""
        return str(self.value) if isinstance(self.value, bool) else literal(self.value)


def with_scale(watched_at: HasPlace, scale: float) -> str | None:
    """The scaler that ``watch`` is given, made with this first scale, as a diff of the file.

    Returns:
        The diff; None where the file is not at hand, and where it is not clear which call makes the scaler.
    """
    found, tree = _program(watched_at)
    if found is None or tree is None:
        return None
    calls = [node for node in _calls(tree) if found.first <= node.lineno <= found.last]
    watches = [node for node in calls if dotted(node.func).rpartition(".")[2] == "watch"]
    if len(watches) != 1:
        return None
    named = [each.value for each in watches[0].keywords if each.arg == "scaler"]
    given = [*watches[0].args[1:2], *named]
    made = given_once(tree, given[0], watched_at.line) if len(given) == 1 else None
    place = _SCALERS.get(imported_name(tree, made.func)) if isinstance(made, ast.Call) else None
    if not isinstance(made, ast.Call) or place is None:
        return None
    return _set(found, watched_at.file, made, _Setting("init_scale", place, scale))


def with_eps(steps_at: HasPlace, eps: float) -> str | None:
    """The program's one optimizer that has an eps, made with this one, as a diff of the file that steps it."""
    found, tree = _program(steps_at)
    known = _of_these(tree, _OPTIMIZERS) if tree is not None else []
    if found is None or len(known) != 1:
        return None
    call, place = known[0]
    return _set(found, steps_at.file, call, _Setting("eps", place, eps))


def with_rate(place: HasPlace, kind: str, was: float, rate: float) -> str | None:
    """The program's one optimizer of a kind, made with another learning rate, as a diff of the file.

    Args:
        place: A line of the file.
        kind: The class of the optimizer, which takes its rate second as all of torch's do.
        was: The rate that it took its step with: it has to stand there, or to come from what stands there by schedules
            that multiply it.
        rate: What comes in its place.
    """
    found, tree = _program(place)
    named = [(call, imported_name(tree, call.func)) for call in _calls(tree)] if tree is not None else []
    made = [call for call, name in named if name.startswith("torch.optim.") and name.endswith(f".{kind}")]
    if found is None or len(made) != 1:
        return None
    (call,) = made
    given = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "lr")]
    base = value_of(given[0]) if len(given) == 1 else None
    if base is None or not was or (base != was and not _is_multiplied(found.source.tree())):
        return None
    return _set(found, place.file, call, _Setting("lr", 1, rate if base == was else float(f"{base * rate / was:.3g}")))


def _is_multiplied(tree: ast.Module | None) -> bool:
    """Whether all schedules of a program multiply the rate of their optimizer, and it has one."""
    names = [imported_name(tree, call.func) for call in _calls(tree)] if tree is not None else []
    schedules = [name for name in names if name.startswith("torch.optim.lr_scheduler.")]
    return bool(schedules) and _SCHEDULES.issuperset(schedules)


def with_zero_infinity(called_at: HasPlace) -> str | None:
    """The ``CTCLoss`` that a line calls, made so that it leaves out what has no alignment, as a diff of the file."""
    found, tree = _program(called_at)
    if found is None or tree is None:
        return None
    called = [node.func for node in _calls(tree) if found.first <= node.lineno <= found.last]
    given = [given_once(tree, each, called_at.line) for each in called]
    made = [each for each in given if isinstance(each, ast.Call) and imported_name(tree, each.func) in _CTC]
    return _set(found, called_at.file, made[0], _Setting("zero_infinity", 2, True)) if len(made) == 1 else None


def with_number(reads_at: HasPlace, was: float, value: float) -> str | None:
    """A number that the function around a line spells once, replaced, as a diff of the file.

    Args:
        reads_at: The line that fails by it.
        was: The number.
        value: What comes in its place.
    """
    found, tree = _program(reads_at)
    program = whole(found.source) if found is not None else None
    if found is None or tree is None or program is None:
        return None
    places = list(_spelled(function_around(tree, reads_at.line), was))
    if len(places) != 1:
        return None
    return spliced(found.source, reads_at.file, [program.instead(places[0], literal(below_one(value)))])


def _spelled(node: ast.AST, was: float) -> Iterator[ast.expr]:
    """The parts that spell a number, the outermost of each."""
    value = value_of(node) if isinstance(node, ast.expr) else None
    if value is not None and math.isclose(value, was, rel_tol=1e-12) and isinstance(node, ast.expr):
        yield node
    elif value is None or isinstance(node, ast.BinOp):
        for child in ast.iter_child_nodes(node):
            yield from _spelled(child, was)


def _program(place: HasPlace) -> tuple[FoundStatement | None, ast.Module | None]:
    found = statement_at(place)
    return found, found.source.tree() if found is not None else None


def _calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _of_these(tree: ast.Module, kinds: Mapping[str, int]) -> list[tuple[ast.Call, int]]:
    named = [(call, imported_name(tree, call.func)) for call in _calls(tree)]
    return [(call, kinds[name]) for call, name in named if name in kinds]


def _set(found: FoundStatement, file: str, call: ast.Call, setting: _Setting) -> str | None:
    """A call with a number in the place of the one that is there, or beside the others."""
    program, given = whole(found.source), {each.arg: each.value for each in call.keywords}
    starred = None in given or any(isinstance(each, ast.Starred) for each in call.args)
    if program is None or starred:
        return None
    there = call.args[setting.place] if setting.place < len(call.args) else given.get(setting.name)
    is_there = there is not None and program.text(there) == setting.text
    if is_there or (there is not None and (value_of(there) or 0.0) == setting.value and setting.value is not True):
        return None
    change: Splice = (
        program.instead(there, setting.text)
        if there is not None
        else added_keyword(program, call, f"{setting.name}={setting.text}")
    )
    return spliced(found.source, file, [change])
