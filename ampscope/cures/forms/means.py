"""Means over nothing, and deviations of a single value, divide by at least one."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator, Sequence

from ampscope.cures.call_form import Call, CallForm
from ampscope.cures.cure_form import value
from ampscope.cures.failed_op import FailedOp
from ampscope.cures.rewriting.found_call import Asked, TorchCall
from ampscope.cures.rewriting.literals import added_keyword, value_of
from ampscope.cures.rewriting.statement import Splice, Statement, is_plain, is_repeatable
from ampscope.trace.schema import Form

#: Places of a tensor and a dimension among the arguments of a deviation.
_UNBIASED = 2
DEVIATIONS = frozenset({"std", "var", "std_mean", "var_mean"})
_LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"})
_BY_TARGET = frozenset({"cross_entropy", "nll_loss"})
#: Means, by the functions that take them.
DIVIDING = _LOSSES | _BY_TARGET | {"mean"}


class MeanOfNothing(CallForm):
    """A mean that divides by one where there is nothing to divide by."""

    form = Form.OPERAND_BOUND

    def __init__(self) -> None:
        super().__init__(DIVIDING, value=1.0)

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        if call.name == "mean":
            return _mean(call)
        return _loss(call) if call.name in _LOSSES else _loss_by_target(call)


def _mean(call: Call) -> object:
    import torch

    given = call.tensor()
    if given is None or given.numel() or not given.is_floating_point():
        return NotImplemented
    return torch.sum(*call.args, **call.kwargs)


def _loss(call: Call) -> object:
    """Takes the sum over no elements in the place of their mean, for a loss that is a mean over all of them."""
    given = call.tensor()
    if call.kwargs.get("reduction", "mean") != "mean" or given is None or given.numel():
        return NotImplemented
    return call._replace(kwargs={**call.kwargs, "reduction": "sum"})()


def _loss_by_target(call: Call) -> object:
    """Divides the sum over the targets that are not ignored by their weight, or by one where that is zero."""
    import torch
    from torch.nn import functional

    bound = inspect.signature(getattr(functional, call.name)).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    target, weight = given["target"], given["weight"]
    if given["reduction"] != "mean" or target.is_floating_point() or given.get("label_smoothing"):
        return NotImplemented
    counted = target != given["ignore_index"]
    each = counted if weight is None else weight[target.where(counted, torch.zeros_like(target))] * counted
    total = each.sum()
    summed = call._replace(args=(), kwargs={**given, "reduction": "sum"})()
    return summed / torch.where(total == 0, torch.ones_like(total), total)


class DeviationOfOne(CallForm):
    """A deviation, or a variance, of a single value that is zero; of more it is what it was."""

    form = Form.OPERAND_BOUND

    def __init__(self) -> None:
        super().__init__(DEVIATIONS, argument=0, value=1.0)

    def instead(self, call: Call) -> object:
        """See `CallForm.instead`."""
        given = call.tensor()
        if given is None or call.kwargs.keys() & {"unbiased", "correction", "out"}:
            return NotImplemented
        dim = call.argument(1, "dim")
        if isinstance(dim, bool) or len(call.args) > _UNBIASED:
            return NotImplemented
        dims = range(given.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
        if math.prod(given.shape[each] for each in dims) != 1:
            return NotImplemented
        return call._replace(kwargs={**call.kwargs, "correction": 0})()


def of_deviation(failed: FailedOp) -> Iterator[CallForm]:
    """A deviation of a single value that is zero."""
    if failed.name in DEVIATIONS and not failed.in_backward:
        yield DeviationOfOne()


def of_mean(failed: FailedOp) -> Iterator[CallForm]:
    """A mean over nothing that is zero."""
    nothing = "0" in next(iter(failed.site.in_shapes), "").split("x")
    if failed.name.startswith("nll_loss") or (nothing and failed.name in _LOSSES | {"mean"}):
        yield MeanOfNothing()


# -- in the user's statement -------------------------------------------------------------------------------------------


#: The place of the weights, which make it another mean, and the target that is left out unless another is named.
_WEIGHT, _IGNORED = 2, -100


def write(statement: Statement, found: TorchCall) -> Sequence[Splice]:
    """``x.mean()`` becomes ``x.float().sum() / max(1, x.numel())``: zero where there is nothing, else the same."""
    return _of_one(statement, found) if found.name in DEVIATIONS else _counted(statement, found)


def _counted(statement: Statement, found: TorchCall) -> Sequence[Splice]:
    place, node = found.operand(0), found.node
    if place is None or not isinstance(node, ast.Call):
        return ()
    if found.name == "mean":
        return _write_mean(statement, found, place, node)
    if found.is_method or found.keywords.keys() & {"reduction", "weight", "label_smoothing", "size_average", "reduce"}:
        return ()
    target = found.operand(1)
    if len(found.operands) > _WEIGHT or target is None or not is_repeatable(target):
        return ()
    count = f"{statement.atom(target)}.numel()"
    if found.name in _BY_TARGET:
        ignored = found.keywords.get("ignore_index")
        if ignored is not None and value_of(ignored.value) is None:
            return ()
        left_out = statement.text(ignored.value) if ignored is not None else str(_IGNORED)
        count = f"({statement.atom(target)} != {left_out}).sum()"
    start, end = statement.span(node)
    before, after = ("", "") if _stands_free(statement, node) else ("(", ")")
    return [
        Splice(start, start, before),
        added_keyword(statement, node, 'reduction="sum"'),
        Splice(end, end, f" / max(1, {count}){after}"),
    ]


def _write_mean(statement: Statement, found: TorchCall, place: ast.expr, node: ast.Call) -> Sequence[Splice]:
    if len(found.operands) > 1 or found.keywords.keys() - {"input"} or not is_repeatable(place):
        return ()  # along a dimension, what has nothing is a part of the result
    tensor = statement.atom(place)
    quotient = f"{tensor}.float().sum() / max(1, {tensor}.numel())"
    return [statement.instead(node, quotient if _stands_free(statement, node) else f"({quotient})")]


def _stands_free(statement: Statement, node: ast.expr) -> bool:
    """Whether a quotient in the place of a part is read as one: a value, what a call is given, what has parentheses."""
    if statement.enclosed(node) is not None:
        return True
    kinds = (ast.Assign, ast.AnnAssign, ast.Return, ast.Call, ast.keyword)
    return all(isinstance(each, kinds) for each in statement.parents(node))


def _of_one(statement: Statement, found: TorchCall) -> Sequence[Splice]:
    """``x.std(0)`` becomes ``x.std(0, correction=min(1, x.shape[0] - 1))``: the same of more values than one."""
    place, dim = found.operand(0), found.argument(1, "dim")
    along = value_of(dim) if dim is not None else None
    if place is None or not is_plain(place) or len(found.operands) > 2 or (dim is not None and along is None):
        return ()
    if found.keywords.keys() - {"dim", "keepdim", "input"} or not isinstance(found.node, ast.Call):
        return ()
    count = f"{statement.atom(place)}.numel()" if along is None else f"{statement.atom(place)}.shape[{along:.0f}]"
    return [added_keyword(statement, found.node, f"correction=min(1, {count} - 1)")]


def is_mean(call: str) -> bool:
    """Whether a function divides by how many values it is given."""
    return call in DIVIDING | DEVIATIONS or call.endswith("_loss")


def tried(asked: Asked) -> str:
    """See `CureForm.tried`."""
    return f"the number that {asked.call} divides by at least {value(asked)}"


def sentence(asked: Asked) -> str:
    """See `CureForm.sentence`."""
    is_one = asked.call in DEVIATIONS
    what = "is given a single value" if is_one else "has nothing to average"
    return f"Divide by at least {value(asked)} where {asked.call} {what}: it is zero then."


def code(asked: Asked) -> str:
    """See `CureForm.code`."""
    if asked.call in DEVIATIONS:
        return f"y = x.{asked.call}(0, correction=min(1, x.shape[0] - 1))"
    return "loss = total / max(1, count)  # total: the sum, count: of how many"
