"""The protocols of whoever is told of the torch functions that a loop calls outside watched modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class FunctionListener(Protocol):
    """Is told of the torch functions that the loop calls outside watched modules."""

    def saw_function(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, *, after_backward: bool
    ) -> None:
        """A function has run."""

    def scaled(self, loss: Any, scale: Any, result: Any) -> None:
        """A scaler has multiplied a loss by its scale."""

    def is_unheard(self, *, known: bool = True) -> None:
        """The calls that the loop makes now, after a backward, are not told: they are those of before, if ``known``."""

    @property
    def scales_by_hand(self) -> bool:
        """Whether the loop multiplies its losses by a scale of its own, so that gradients hold one."""

    def edited(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """A function has run between the unscaling of gradients and the scaler's update."""

    def weights_move(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A function is about to move weights."""

    def transformed(self, factors: Iterable[Any], result: Any) -> None:
        """A transform has returned, and has multiplied single values with ``factors``."""


class CallWatcher(Protocol):
    """Looks at the torch functions that the loop calls outside watched modules, before they run."""

    def __call__(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A function is about to run."""


#: Is told of a torch function that raised, with its arguments; must not raise itself.
ErrorListener = Callable[[Exception, Callable[..., Any], Any, Any], object]
