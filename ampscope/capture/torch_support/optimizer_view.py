"""What capture asks of an optimizer; the only reader of ``param_groups`` and of the hooks around ``step``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampscope.capture.torch_support import torch_private


class OptimizerView(NamedTuple):
    """An optimizer as capture sees it; made where it is needed, nothing is kept of it."""

    optimizer: Optimizer

    @property
    def parameters(self) -> Iterator[Tensor]:
        """The parameters it steps, in the order of its groups."""
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    @property
    def gradients(self) -> Iterator[Tensor]:
        """The gradients that are there now."""
        return (parameter.grad for parameter in self.parameters if parameter.grad is not None)

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of its first group; None where it has none."""
        rate = self.optimizer.param_groups[0].get("lr") if self.optimizer.param_groups else None
        return float(rate) if rate is not None else None

    @property
    def decides_on_device(self) -> bool:
        """Whether it unscales and skips by itself, on the device (``fused=True``)."""
        return torch_private.steps_on_device(self.optimizer)

    @property
    def steps_made(self) -> int | None:
        """How many steps its state says it has made (0: it does not count them); None for one without a state."""
        if not self.optimizer.state:
            return None
        state = next(iter(self.optimizer.state.values()))
        return int(state.get("step", 0)) if isinstance(state, dict) else None


def is_optimizer(thing: object) -> bool:
    """Whether ``thing`` is an optimizer that can be watched."""
    return isinstance(thing, Optimizer)


def around_every_step(before: Callable[[Any], None], after: Callable[[Any], None]) -> tuple[Any, Any]:
    """Has ``before`` and ``after`` called with every optimizer of the process around its ``step``.

    Returns:
        Two handles, each with a ``remove``.
    """

    def on_begin(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling() or _breaks_its_graph(optimizer):
            before(optimizer)

    def on_end(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling() or _breaks_its_graph(optimizer):
            after(optimizer)

    return register_optimizer_step_pre_hook(on_begin), register_optimizer_step_post_hook(on_end)


def _breaks_its_graph(optimizer: Optimizer) -> bool:
    """Whether a compiled ``step`` leaves compiled code by itself before it computes: torch's own do, for their no_grad.

    Hooks may be called there; in any other step they would split what the user compiles as one.
    """
    return type(optimizer).step.__module__.startswith("torch.optim.")
