"""Means that may be over nothing, with what they divide by written out, and at least one."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ampscope.analysis.cures.rewriting.forms.asked import Asked
from ampscope.analysis.cures.rewriting.forms.constants import added_keyword
from ampscope.analysis.cures.rewriting.found_call import Found
from ampscope.analysis.cures.rewriting.literals import value_of
from ampscope.analysis.cures.rewriting.statement import Splice, Statement, is_repeatable

MEAN = "mean"
#: Losses that are a mean over all elements, and those over the targets that are not to be ignored.
LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"})
BY_TARGET = frozenset({"cross_entropy", "nll_loss"})
#: The place of the weights, which make it another mean, and the target that is left out unless another is named.
_WEIGHT, _IGNORED = 2, -100


def of_none(statement: Statement, asked: Asked) -> Sequence[Splice]:
    """``x.mean()`` becomes ``x.float().sum() / max(1, x.numel())``: zero where there is nothing, else the same."""
    return [splice for each in asked.all_found(statement) for splice in _counted(statement, each)]


def _counted(statement: Statement, found: Found) -> Sequence[Splice]:
    place, node = found.operand(0), found.node
    if place is None or not isinstance(node, ast.Call):
        return ()
    if found.name == MEAN:
        return _mean(statement, found, place, node)
    if found.is_method or found.keywords.keys() & {"reduction", "weight", "label_smoothing", "size_average", "reduce"}:
        return ()
    target = found.operand(1)
    if len(found.operands) > _WEIGHT or target is None or not is_repeatable(target):
        return ()
    count = f"{statement.atom(target)}.numel()"
    if found.name in BY_TARGET:
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


def _mean(statement: Statement, found: Found, place: ast.expr, node: ast.Call) -> Sequence[Splice]:
    if len(found.operands) > 1 or found.keywords.keys() - {"input"} or not is_repeatable(place):
        return ()  # along a dimension, what has nothing is a part of the result
    tensor = statement.atom(place)
    quotient = f"{tensor}.float().sum() / max(1, {tensor}.numel())"
    return [statement.instead(node, quotient if _stands_free(statement, node) else f"({quotient})")]


def _stands_free(statement: Statement, node: ast.expr) -> bool:
    """Whether a quotient in the place of a part is read as one: a value, what a call is given, what has parentheses."""
    if statement.enclosed(node) is not None:
        return True
    parents = [each for each in statement.nodes() if node in ast.iter_child_nodes(each)]
    return all(isinstance(each, (ast.Assign, ast.AnnAssign, ast.Return, ast.Call, ast.keyword)) for each in parents)
