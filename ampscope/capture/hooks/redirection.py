"""Calls of a module that mean something else than its forward.

Lightning sends ``training_step`` through ``DistributedDataParallel`` by giving the model another ``forward`` for
one call. What runs then is the user's loop: it logs, it may step optimizers. Such a call is let through, and the
modules that are called inside it count as called by the loop. A redirection is made anew for each call; a forward that
stays is the module's own from its second call on.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

from ampscope.capture.torch_support.models import unwrapped


class Redirections:
    """Knows the forward that each module had when watching began.

    Args:
        modules: The watched modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._forwards = {id(module): _own_forward(module) for module in modules}
        self._latest: dict[int, Any] = {}  # by the module called, a wrapper or what it wraps: what stood in for forward

    def is_redirected(self, module: nn.Module) -> bool:
        """Whether a call of ``module`` runs something else than the forward it had."""
        called, module = id(module), unwrapped(module)
        now = _own_forward(module)
        if now is None or now is self._forwards.setdefault(id(module), now):
            return False
        if now is self._latest.get(called):  # it stayed: the user has given the module another forward
            self._forwards[id(module)] = now
            return False
        self._latest[called] = now
        return True


def _own_forward(module: nn.Module) -> Any:
    """The forward that is set on the module itself; None where it is the one of its class, or wraps that."""
    forward = vars(module).get("forward")
    if forward is None:
        return None
    forward = inspect.unwrap(forward)
    if type(forward).__module__.startswith("ampscope."):  # a module that is kept in float32
        return None
    of_class = getattr(forward, "__func__", None) is type(module).forward
    return None if of_class and getattr(forward, "__self__", None) is module else forward
