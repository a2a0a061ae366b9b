"""The random numbers of a step, drawn in the dtypes in which it drew them, whatever else a replay of it changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.tracing.operators import Operator

Drawn = dict[str, list[torch.dtype]]  #: by op, the dtypes of what it drew, in the order in which it ran


class Draws:
    """Has each op draw what it drew in the real step: the same bits give other numbers in another dtype.

    Args:
        known: Of the step; empty until it has been run as it was.
        notes: This replay runs it so, and notes it there.
    """

    def __init__(self, known: Drawn, *, notes: bool) -> None:
        self._known, self._notes = known, notes
        self._ran: Counter[str] = Counter()
        self.missed = False  #: it has drawn something of which nothing was known
        if notes:
            known.clear()

    def run(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Runs an op that draws random numbers, and gives them in the dtype that is asked for now."""
        call, name = operator.overload, operator.name
        drops = name == "aten.native_dropout.default" and args[2] is not False
        values = operator.draws or "_like." in name or not any(isinstance(each, Tensor) for each in args)
        if not (values or drops) or name.startswith("aten.bernoulli_"):  # depends on values that are others, or on none
            return call(*args, **kwargs)
        if self._notes:
            result = call(*args, **kwargs)
            self._known.setdefault(name, []).append((result[0] if drops else result).dtype)
            return result
        self._ran[name] += 1
        was, first = self._known.get(name, ())[self._ran[name] - 1 : self._ran[name]], args[0] if args else None
        now = kwargs.get("dtype") or (first.dtype if isinstance(first, Tensor) else torch.get_default_dtype())
        self.missed |= not was
        if not was or not was[0].is_floating_point or was[0] is now:
            return call(*args, **kwargs)
        if operator.draws:
            return args[0].copy_(call(args[0].to(was[0]), *args[1:], **kwargs))
        if drops:
            _, kept = call(torch.ones_like(args[0], dtype=was[0]), *args[1:], **kwargs)
            return args[0] * kept / (1 - args[1] or 1.0), kept
        return call(*args, **{**kwargs, "dtype": was[0]}).to(now)
